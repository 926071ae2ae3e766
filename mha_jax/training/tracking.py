"""metrics.jsonl and probes/*.npz are the truth; Weights & Biases is a view that can never hurt the run."""
import json
import math
import netrc
import os
import pathlib
import secrets
import sys

import numpy as np

from mha_jax import config as configs
from mha_jax.config import Config, ConfigError
from mha_jax.probes.behaviour import HEAD_SCORES
from mha_jax.training.folder import first_line, write_atomically, write_json

# What every full panel holds, and pictures are drawn from.
PANEL = {"loss_by_position_T", "induction_PLN", "induction_chance_P",
         *(f"{score}_{part}" for score in HEAD_SCORES for part in ("LN", "chance"))}  # fmt: skip


def variant(cfg) -> str:
    """'MHA', 'MQA' or 'GQA-2' (two KV heads) of a ModelConfig."""
    if cfg.num_kv_heads == cfg.num_heads:
        return "MHA"
    return "MQA" if cfg.num_kv_heads == 1 else f"GQA-{cfg.num_kv_heads}"


def read_metrics(workdir: pathlib.Path) -> list[dict]:
    """The events of a run in order; a last line cut short by a kill is left out. ConfigError for any other damage."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return []
    out = []
    lines = path.read_bytes().splitlines()
    for i, line in enumerate(lines):
        try:
            event = json.loads(line)
        except ValueError:
            if i < len(lines) - 1:
                raise ConfigError(f"{path}, line {i + 1}: not JSON") from None
            break
        if not _is_event(event):
            raise ConfigError(f"{path}, line {i + 1}: not an event, an object of numbers with a whole step")
        out.append(event)
    return out


def _is_event(value) -> bool:
    return (isinstance(value, dict) and isinstance(value.get("step"), int)
            and all(v is None or isinstance(v, (int, float)) for v in value.values()))  # fmt: skip


def _to_stderr(message: str):
    print(f"warning: {message}", file=sys.stderr, flush=True)


def probe_files(workdir: pathlib.Path, warn=_to_stderr) -> dict[int, pathlib.Path]:
    """{step: probes/STEP.npz}, ascending. An .npz of another name is left alone, and named through `warn`."""
    out = {}
    for path in sorted((workdir / "probes").glob("*.npz")):
        if path.stem.isdecimal():
            out[int(path.stem)] = path
        else:
            warn(f"{path} is not used: the files of probes/ are named STEP.npz")
    return dict(sorted(out.items()))


def read_probes(workdir) -> dict[int, dict]:
    """{step: arrays} of the full panels in a run folder, ascending. ConfigError naming a file that is no panel."""
    out = {}
    for step, path in probe_files(pathlib.Path(workdir)).items():
        try:
            with np.load(path) as arrays:
                out[step] = dict(arrays)
        except Exception as error:  # there is no end to what a damaged zip file can raise
            raise ConfigError(f"{path}: cannot be read as a panel ({type(error).__name__}); move it away to draw the "
                              "others") from None  # fmt: skip
        missing = PANEL - out[step].keys()
        if missing:
            raise ConfigError(f"{path}: not a panel, it has no {', '.join(sorted(missing))}")
    return out


def drop_after(workdir: pathlib.Path, step: int, warn=_to_stderr) -> int:
    """Rewinds a run folder to the parameters after `step` updates; returns how many events it had.

    Train and failure lines belong to the update that follows their step, so those of `step` go too. warn: as for
    `probe_files`.
    """
    events = read_metrics(workdir)
    kept = [e for e in events if e["step"] < step or (e["step"] == step and not {"train/loss", "failed_at"} & set(e))]
    write_atomically(workdir / "metrics.jsonl", "".join(json.dumps(e) + "\n" for e in kept))
    for at, path in probe_files(workdir, warn).items():
        if at > step:
            path.unlink()
    return len(events)


class Tracker:
    """Writes one run's events; one that is not active does nothing."""

    def __init__(self, workdir: pathlib.Path, config: Config, say, *, active: bool = True, logged: int = 0,
                 changed: bool = False):  # fmt: skip
        """active: on process 0 only. logged: events before the folder was rewound, which W&B has already.
        changed: the config differs from then."""
        self.active, self.workdir, self._say = active, workdir, say
        self._file = self._wandb = None
        if self.active:
            workdir.mkdir(parents=True, exist_ok=True)
            (workdir / "probes").mkdir(exist_ok=True)
            self._file = open(workdir / "metrics.jsonl", "a")  # noqa: SIM115
            # A run repeats its events in the same order, so the n-th one sent is the n-th of every repetition.
            self._events = len(read_metrics(workdir))
            self._wandb, self._sent = _start_wandb(workdir, config, say, logged, new=changed)

    def log(self, step: int, tokens: int, seconds: float, values: dict):
        """One event. Values are numbers; one that is not finite is written as null."""
        if not self.active:
            return
        numbers = {k: _number(v) for k, v in values.items()}
        line = {"step": step, "tokens": tokens, "seconds": round(seconds, 3)} | numbers
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._events += 1
        if self._wandb is not None and self._events > self._sent:
            self._guard(lambda: self._wandb.log({k: v for k, v in line.items() if v is not None}))

    def arrays(self, step: int, values: dict[str, np.ndarray]):
        """probes/{step}.npz, whole or not at all."""
        if not self.active:
            return
        path = self.workdir / "probes" / f"{step:06d}.npz"
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            np.savez(file, step=step, **values)
        os.replace(temporary, path)

    def images(self, step: int, paths: dict[str, pathlib.Path]):
        """Pictures for W&B; they are files of the run folder already."""
        if self._wandb is not None:
            def send():
                import wandb

                self._wandb.log({"step": step} | {name: wandb.Image(str(path)) for name, path in paths.items()})

            self._guard(send)

    def summary(self, values: dict):
        """summary.json, and W&B's summary."""
        if not self.active:
            return
        write_json(self.workdir / "summary.json", values)
        if self._wandb is not None:
            self._guard(lambda: self._wandb.summary.update(values))

    def close(self, exit_code: int = 0):
        """Ends the W&B run, waiting no longer than `tracking.timeout`. exit_code: 0, or why the run did not end."""
        if not self.active:
            return
        self._file.close()
        if self._wandb is not None:
            self._guard(lambda: self._wandb.finish(exit_code=exit_code))

    def _guard(self, action):
        try:
            action()
        except Exception as error:
            self._say(f"W&B is off from here on: {first_line(error)}; metrics.jsonl has everything")
            self._wandb = None


def send_evaluation(workdir: pathlib.Path, config: Config, name: str, step: int, pictures: dict, tables: dict,
                    say=print):  # fmt: skip
    """The pictures and tables (rows of dicts, by name) of an evaluation to the run's own W&B page, where it has one and
    W&B is on."""
    id_file, mode = workdir / "wandb_id.txt", _mode(config.tracking)
    if mode in (None, "disabled") or not id_file.exists():
        return
    try:
        import wandb

        run_id, cfg = id_file.read_text().split()[0], config.tracking
        run = wandb.init(project=cfg.project, entity=cfg.entity, mode=mode, resume="allow", id=run_id,
                         dir=str(workdir), settings=_settings(cfg))  # fmt: skip
        shown = {f"eval/{name}/{key or 'figure'}": wandb.Image(str(path)) for key, path in pictures.items()}
        for key, rows in tables.items():
            columns = list(dict.fromkeys(c for row in rows for c in row))
            cells = [[row.get(c) for c in columns] for row in rows]
            shown[f"eval/{name}/table/{key}"] = wandb.Table(columns=columns, data=cells)
        run.log({"step": step} | shown)
        run.finish()
    except Exception as error:
        say(f"W&B is off: {first_line(error)}; the folder has everything")


def _number(value):
    value = float(value)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _has_key() -> bool:
    """Whether W&B would know who we are, found out without importing it or asking anybody."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def _mode(cfg) -> str | None:
    """online, offline, disabled; None where `auto` finds no key."""
    if cfg.wandb != "auto":
        return cfg.wandb
    return os.environ.get("WANDB_MODE") or ("online" if _has_key() else None)


def _settings(cfg):
    import wandb

    return wandb.Settings(init_timeout=cfg.timeout, finish_timeout=cfg.timeout, finish_timeout_raises=True,
                          console="off", silent=True)  # fmt: skip


def _start_wandb(workdir: pathlib.Path, config: Config, say, logged: int, new: bool):
    """(W&B run or None, how many of the first events it has). The run's id and that number are in wandb_id.txt.

    The number is kept there because a run that was rewound twice may not have come as far again in between.
    """
    cfg, mode = config.tracking, _mode(config.tracking)
    if mode is None:
        say("W&B: no key found, so off; metrics.jsonl has everything (tracking.wandb = online | offline to change)")
        return None, 0
    if mode == "disabled":
        return None, 0
    if mode == "online" and not _has_key():  # W&B would ask for one, and wait
        say("W&B is off: no key found (WANDB_API_KEY, or wandb login); metrics.jsonl has everything")
        return None, 0
    kind, task = variant(config.model), config.data.task
    id_file = workdir / "wandb_id.txt"
    try:
        import wandb

        run_id, sent = secrets.token_hex(4), 0
        if id_file.exists() and not new:
            run_id, before = id_file.read_text().split()
            sent = max(logged, int(before))
        run = wandb.init(
            project=cfg.project, entity=cfg.entity, group=cfg.group or f"{task}-{kind}", name=config.name, id=run_id,
            resume="allow", mode=mode, dir=str(workdir), tags=[kind, task, f"{config.model.num_layers}L"],
            config={k: str(v) if isinstance(v, tuple) else v for k, v in configs.flat(config).items()},
            settings=_settings(cfg),
        )  # fmt: skip
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        write_atomically(id_file, f"{run_id}\n{sent}\n")
        return run, sent
    except Exception as error:
        say(f"W&B is off: {first_line(error)}; metrics.jsonl has everything")
        return None, 0
