"""The command line of every command: errors are one line and exit code 2, never a traceback."""
import contextlib
import dataclasses
import difflib
import logging as logs
import pathlib
import re
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from mha_jax import config as configs
from mha_jax.config import Config, ConfigError

EXIT_BAD_INPUT, EXIT_NON_FINITE, EXIT_SAVE_FAILED = 2, 3, 4
PATHS = ("config", "workdir", "out")  # flags that name a file or a folder

flags.disclaim_key_flags()  # what is defined here is a flag of the command that asked for it, and in its --help


def run(main):
    """`app.run(main)`, with bad flags, config or input on one line."""
    logging.set_verbosity(logging.WARNING)  # else JAX reports every accelerator it did not find
    _say_errors_once()
    with errors_on_one_line():
        app.run(main, flags_parser=_parse)


@contextlib.contextmanager
def errors_on_one_line():
    """Around a command, or over its main function: bad input is one line and exit code 2."""
    try:
        yield
    except ConfigError as error:
        fail(error, EXIT_BAD_INPUT)
    except OSError as error:  # a folder that is full, read-only or not one
        fail(f"{type(error).__name__}: {error}", EXIT_BAD_INPUT)


def _say_errors_once():
    """Keeps off the screen what the threads of Orbax and TensorStore print of a failed read or write, besides raising
    it where we wait: tracebacks in two logs, and those of callbacks into an event loop that has ended."""
    for name in ("absl", "asyncio"):
        logs.getLogger(name).addFilter(_is_news)
    sys.unraisablehook = _print_unraisable


def _is_news(record: logs.LogRecord) -> bool:
    again = "orbax" in record.pathname or "exception was never retrieved" in str(record.msg)
    return not (again and record.exc_info)


def _print_unraisable(unraisable):
    if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(unraisable)


def fail(error, code: int):
    """Prints one line and exits."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def define_config():
    """The flag --config=FILE with its --config.section.key=value overrides."""
    return config_flags.DEFINE_config_file("config", None, "config file; override with --config.section.key=value")


def _parse(argv: list[str]) -> list[str]:
    argv, nones = _take_nones(argv)
    given = {name: _given(argv, name) for name in PATHS if name in flags.FLAGS}
    for name, value in given.items():
        if value == "":
            raise ConfigError(f"--{name}= is empty: allowed is a path")
    if given.get("config") is not None:
        _require_file(pathlib.Path(given["config"].partition(":")[0]))  # behind a colon: an argument of get_config
    try:
        rest = flags.FLAGS(argv)
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        getattr(config, "name", None)  # a file that cannot be read raises only when something is taken from it
    except Exception as error:  # a config file is a program of the user's: anything can come out of it
        raise _in_one_line(error) from None
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"--config: get_config() returned a {type(config).__name__}: allowed is a Config")
    if len(rest) > 1:
        raise ConfigError(f"{rest[1]!r}: not a flag; flags are --name=value")
    for key in nones if config is not None else ():
        section, _, field = key.rpartition(".")
        setattr(getattr(config, section) if section else config, field, None)
    return rest


def _given(argv: list[str], name: str) -> str | None:
    """What --name=VALUE or --name VALUE gives, the last time it is there."""
    found = None
    for argument, following in zip(argv, [*argv[1:], None], strict=True):
        key, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and key == name:
            found = value if equals else following
    return found


def _require_file(path: pathlib.Path):
    """ConfigError when there is no such config file, with the nearest name beside it or in configs/."""
    if path.exists():
        return
    ours = pathlib.Path(__file__).parents[1] / "configs"
    by_name = {p.stem: p for folder in (ours, path.parent) for p in sorted(folder.glob("*.py"))}
    near = [by_name[name] for name in difflib.get_close_matches(path.stem, by_name, 1)]
    here = pathlib.Path.cwd()
    hint = "".join(f"; did you mean {p.relative_to(here) if p.is_relative_to(here) else p}?" for p in near)
    raise ConfigError(f"--config={path}: there is no such file{hint}")


def _in_one_line(error: Exception) -> ConfigError:
    """What parsing or a config file raised; a misspelt keyword of a section is an unknown key like any other."""
    wrong = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if wrong:
        sections = {f.type.__name__: f"{f.name}." for f in dataclasses.fields(Config)}
        return configs.unknown_key(sections.get(wrong[1], "") + wrong[2])
    text = " ".join(str(error).split())
    if "Error whilst parsing config file" in text:  # config_flags puts a whole traceback here
        return ConfigError(f"--config: cannot be loaded: {str(error).strip().splitlines()[-1]}")
    return ConfigError(text if isinstance(error, flags.Error) else
                       f"--config: cannot be loaded: {type(error).__name__}: {text}")  # fmt: skip


def _take_nones(argv: list[str]) -> tuple[list[str], list[str]]:
    """Checks that every overridden key exists, and takes out `=None`, which config_flags cannot read."""
    known, kept, nones = configs.flat(Config()), [], []
    for argument in argv:
        name, _, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name.startswith(("config.", "noconfig.")):
            key = name.partition(".")[2]
            if key not in known:
                raise configs.unknown_key(key)
            if value == "None":
                nones.append(key)
                continue
        kept.append(argument)
    return kept, nones
