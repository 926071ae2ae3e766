"""What a task of the laboratory found; `report` prints, draws and writes it."""
import dataclasses

import numpy as np

from mha_jax.config import ConfigError
from mha_jax.data.source import Evaluation
from mha_jax.probes import icl
from mha_jax.pruning.effects import Effects, effects
from mha_jax.run import Snapshot
from mha_jax.training.folder import DEFINITIONS


@dataclasses.dataclass(frozen=True)
class Result:
    """facts: what holds for the whole result (definitions, choices, seeds), as JSON. tables: rows by name, a CSV each;
    columns of numbers are in nats unless they say otherwise. arrays: what pictures are drawn from, shapes in names."""

    task: str
    facts: dict
    tables: dict[str, list[dict]]
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def provenance(snapshot: Snapshot) -> dict:
    """What every result starts with: which run, which parameters, which data, which definitions."""
    return {
        "run": snapshot.run.config.name,
        "step": snapshot.step,
        "hash": snapshot.meta["hash"],
        "tokens": snapshot.meta["tokens"],
        "data": snapshot.panel.source.description,
        "data_fingerprint": snapshot.panel.source.fingerprint,
        "definitions": DEFINITIONS,
    }


def check_choices(key: str, chosen, allowed):
    """ConfigError naming the first of `chosen` that is not among those allowed or comes twice, or that none is."""
    if isinstance(chosen, str) or not chosen:
        raise ConfigError(f"--{key}={chosen!r}: allowed are some of {', '.join(allowed)}")
    for i, name in enumerate(chosen):
        if name not in allowed:
            raise ConfigError(f"--{key}={name}: allowed are {', '.join(allowed)}")
        if name in chosen[:i]:
            raise ConfigError(f"--{key}={','.join(chosen)}: {name} is named twice")


def evaluation_rows(snapshot: Snapshot, rows: int | None) -> np.ndarray:
    """The first `rows` evaluation rows. ConfigError when there are fewer, or too few for an ICL score."""
    e = snapshot.panel.evaluation
    tokens_RU, rows = e.tokens_RU, len(e.tokens_RU) if rows is None else rows
    if not 2 <= rows <= len(tokens_RU):
        raise ConfigError(f"--rows={rows}: allowed are 2 to config.data.eval_rows = {len(tokens_RU)}")
    icl.check_windows(e.early_RT[:rows], e.late_RT[:rows], "--rows")
    return tokens_RU[:rows]


def cost_of(snapshot: Snapshot, whole_RT, loss_PSRT, seed: int = 0) -> Effects:
    """What the sets of heads cost on the first evaluation rows, with the run's own ICL windows."""
    e, R = snapshot.panel.evaluation, len(whole_RT)
    return effects(whole_RT, loss_PSRT, e.early_RT[:R], e.late_RT[:R], no_context_line(e)[1][:R], seed)


def no_context_line(evaluation: Evaluation) -> tuple[str, np.ndarray]:
    """(name, loss [R, T]) of the best line that knows nothing of the row but the current token."""
    name = next(n for n in ("no_icl", "bigram", "uniform") if n in evaluation.lines)
    return name, evaluation.lines[name]
