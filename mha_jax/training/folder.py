"""The run folder: it explains itself. Config, environment, and what a resumed run may and may not change.

    config.json       the resolved config           environment.json  versions, devices, mesh, commit
    tokenizer.json    of a text run                 metrics.jsonl     one event a line
    probes/           one .npz per full panel       checkpoints/      parameters, optimizer, meta
    summary.json      the final figures             plots/
"""
import fcntl
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile

import jax

from mha_jax import config as configs
from mha_jax.config import Config, ConfigError
from mha_jax.validation import resolve

DEFINITIONS = "1"  # version of what every printed number means; raised when a definition changes

# What a resumed run may change; anything else would make it another run.
FREE = ("name", "steps", "steps_per_call", "mesh.", "tracking.", "checkpoint.", "probes.panel", "data.cache_dir")


def absolute(path) -> pathlib.Path:
    """The one spelling of a folder: ~ and links resolved (Orbax refuses relative paths, late and in a thread)."""
    return pathlib.Path(path).expanduser().resolve()

TEXT_FINGERPRINT = re.compile(r"[0-9a-f]{16}(-[0-9a-f]{16}){2}")  # tokenizer, training tokens, validation tokens


def write_atomically(path: pathlib.Path, text: str):
    """The whole file or the old one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(file.name, 0o666 & ~mask)  # temporary files are private; a run folder is read by others
    os.replace(file.name, path)


def write_json(path: pathlib.Path, value):
    """JSON, indented, written atomically; a number that is not finite becomes null."""
    write_atomically(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> dict:
    """The JSON object of a file that a run wrote. ConfigError naming the file when it holds anything else."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:  # cut short, or not even text
        raise ConfigError(f"{path}: not JSON ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {json.dumps(value)[:40]}, allowed is an object {{...}}")
    return value


def _finite(value):
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lock(workdir: pathlib.Path):
    """Holds the folder for this process until it ends. ConfigError when another one writes to it."""
    file = open(workdir / ".lock", "w")  # noqa: SIM115  (open is what holds it)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ConfigError(f"--workdir={workdir}: another run is writing to it") from None
    return file


def first_line(error: Exception) -> str:
    """One line of an exception, for a message; of a long one its two ends, for the reason often stands last."""
    text = (str(error).strip().splitlines() or [""])[0]
    text = text if len(text) <= 200 else f"{text[:100]} ... {text[-95:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def read_config(workdir: pathlib.Path) -> Config:
    """The config a run was started with. ConfigError when the folder holds no run, or one of another version."""
    path = workdir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{workdir}: not a run folder, it has no config.json")
    values = read_json(path)
    try:
        return resolve(configs.from_dict(values))  # checked anew: the file may be another version's, or edited
    except ConfigError as error:
        raise ConfigError(f"{path} was written by mha_jax {_version_of(workdir)}: {error}") from None


def _version_of(workdir: pathlib.Path) -> str:
    """The version that wrote a run folder, for a message."""
    try:
        return str(read_json(workdir / "environment.json")["versions"]["mha_jax"])
    except (OSError, ConfigError, KeyError, TypeError):
        return "of an unknown version"


def differences(old: Config, new: Config) -> dict[str, tuple]:
    """{key: (old, new)} of every field in which two configs differ."""
    a, b = configs.flat(old), configs.flat(new)
    return {k: (a[k], b[k]) for k in a if a[k] != b[k]}


def check_same_run(workdir: pathlib.Path, new: Config, params_only: bool) -> list[str]:
    """Warnings for a resumed run whose config changed harmlessly; ConfigError listing what would make it another.

    params_only: a fresh optimizer is wanted, so optimizer settings and the seed may differ too.
    """
    changed = differences(read_config(workdir), new)
    free = FREE + (("optimizer.", "seed") if params_only else ())
    fatal = {k: v for k, v in changed.items() if not k.startswith(free)}
    if fatal:
        listed = "; ".join(f"config.{k} was {a!r}, is {b!r}" for k, (a, b) in fatal.items())
        hint = " (--restore=params keeps the parameters and starts a fresh optimizer)" if all(
            k.startswith("optimizer.") for k in fatal) else ""  # fmt: skip
        raise ConfigError(f"--workdir={workdir} holds another run: {listed}; choose another --workdir (make: "
                          f"WORKDIR=...){hint}")  # fmt: skip
    out = []
    if "steps" in changed:
        old, now = changed["steps"]
        out.append(f"config.steps was {old} and is now {now}: the learning rate follows the new total, {now}")
    return out


def check_same_optimizer(meta: dict, new: Config):
    """ConfigError when a checkpoint's optimizer state belongs to other settings than the run now has.

    config.json cannot tell: a run continued with --restore=params and stopped before its first save has replaced it.
    """
    changed = differences(configs.from_dict(meta["config"]), new)
    listed = "; ".join(f"config.{k} was {a!r}, is {b!r}" for k, (a, b) in changed.items() if k.startswith("optimizer."))
    if listed:
        raise ConfigError(f"the optimizer state of checkpoint {meta['step']} was made under other settings: {listed} "
                          "(--restore=params keeps the parameters and starts a fresh optimizer)")  # fmt: skip


def check_same_data(meta: dict, source):
    """ConfigError when the data of `source` is not what a checkpoint was trained on (another Python, say, has another
    standard library): the same config would speak of other tokens."""
    saved, now = str(meta.get("data")), source.fingerprint
    if saved == now:
        return
    names = ("tokenizer", "training tokens", "validation tokens")
    parts = zip(names, saved.split("-"), now.split("-"), strict=False)
    other = ", ".join(n for n, a, b in parts if a != b) if TEXT_FINGERPRINT.fullmatch(now) else "task"
    hint = ("; 'stdlib' is the library of the Python that runs, so use the Python of environment.json, or train on a "
            "prepared dataset folder") if source.name == "stdlib" else ""  # fmt: skip
    raise ConfigError(f"the data here, {source.name}, is not that of step {meta['step']} ({other}): its fingerprint is "
                      f"{now}, the checkpoint's {saved}{hint}")  # fmt: skip


def write_environment(workdir: pathlib.Path, mesh, step: int, warn):
    """environment.json: where the run continues now, and under `earlier` where it ran before, with the steps.

    One that cannot be read is named through `warn` and moved to damaged/: the run itself needs nothing from it.
    """
    path, earlier = workdir / "environment.json", []
    try:
        if path.exists():
            before = read_json(path)
            listed = before.pop("earlier", [])
            if not isinstance(listed, list):
                raise ConfigError(f"{path}: earlier = {listed!r}, allowed is a list")
            earlier = [*listed, before]
    except ConfigError as error:
        aside = free_place(workdir, path.name)
        path.rename(aside)
        warn(f"environment.json begins anew, the one before is moved to {aside}: {error}")
    write_json(path, {"from_step": step} | environment(mesh) | {"earlier": earlier})


def free_place(workdir: pathlib.Path, name: str) -> pathlib.Path:
    """A path in damaged/ at which nothing lies yet, for what cannot be read; the folder is there."""
    aside = workdir / "damaged" / name
    aside.parent.mkdir(exist_ok=True)
    while aside.exists():
        aside = aside.with_name(aside.name + "_")
    return aside


def environment(mesh) -> dict:
    """What the run ran on: versions, devices, mesh, commit."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorflow-datasets", "grain", "tokenizers",
             "numpy")  # fmt: skip
    devices = jax.devices()
    return {
        "versions": {n: importlib.metadata.version(n) for n in names} | {"mha_jax": version()},
        "python": sys.version.split()[0],
        "machine": platform.platform(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "process_count": jax.process_count(),
        "mesh": dict(mesh.shape),
        "commit": _commit(),
        "command": sys.argv,
    }


def version() -> str:
    """The project's version, from pyproject.toml beside the package."""
    import tomllib

    project = pathlib.Path(__file__).parents[2] / "pyproject.toml"
    return tomllib.loads(project.read_text())["project"]["version"]


def _commit() -> str | None:
    root = pathlib.Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-dirty" if dirty.strip() else "")
