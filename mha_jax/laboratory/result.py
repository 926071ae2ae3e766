"""What a task of the laboratory found; `report` prints, draws and writes it."""
import dataclasses

import numpy as np

from mha_jax.data.source import Evaluation
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


def no_context_line(evaluation: Evaluation) -> tuple[str, np.ndarray]:
    """(name, loss [R, T]) of the best line that knows nothing of the row but the current token."""
    name = next(n for n in ("no_icl", "bigram", "uniform") if n in evaluation.lines)
    return name, evaluation.lines[name]
