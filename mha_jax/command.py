"""The command line of train.py and eval.py: errors are one line and exit code 2, never a traceback."""
import dataclasses
import re
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from mha_jax import config as configs
from mha_jax.config import Config, ConfigError

EXIT_BAD_INPUT, EXIT_NON_FINITE, EXIT_SAVE_FAILED = 2, 3, 4


def run(main):
    """`app.run(main)`, with bad flags, config or input on one line."""
    logging.set_verbosity(logging.WARNING)  # else JAX reports every accelerator it did not find
    try:
        app.run(main, flags_parser=_parse)
    except ConfigError as error:
        fail(error, EXIT_BAD_INPUT)
    except OSError as error:  # a folder that is full, read-only or not one
        fail(f"{type(error).__name__}: {error}", EXIT_BAD_INPUT)


def fail(error, code: int):
    """Prints one line and exits."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def define_config():
    """The flag --config=FILE with its --config.section.key=value overrides."""
    return config_flags.DEFINE_config_file("config", None, "config file; override with --config.section.key=value")


def _parse(argv: list[str]) -> list[str]:
    argv, nones = _take_nones(argv)
    try:
        rest = flags.FLAGS(argv)
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        getattr(config, "name", None)  # a file that is not there raises only when something is read from it
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
