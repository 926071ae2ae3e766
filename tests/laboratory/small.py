"""One trained run of GQA, small enough for a test and made once a session: what the laboratory is asked about in tests.

`loss_without` is the same model without some heads in NumPy, to compare with.
"""
import contextlib
import copy
import functools
import pathlib
import tempfile

import jax
import numpy as np
import pytest

from mha_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ProbesConfig,
    TrackingConfig,
)
from mha_jax.laboratory import ablate, prune
from mha_jax.laboratory.result import Result
from mha_jax.run import Run, Snapshot, open_run
from mha_jax.training import loop
from mha_jax.training.console import Console
from mha_jax.validation import resolve
from tests.model import oracle

STEPS, HALF = 30, 15
LAYERS, HEADS, KV_HEADS = 2, 4, 2
ROWS = 16  # evaluation rows
ALL = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
HOME = tempfile.TemporaryDirectory()


def config() -> Config:
    """Resolved; checkpoints at 0, 15 and 30."""
    return resolve(Config(
        name="small", steps=STEPS, steps_per_call=5,
        model=ModelConfig(num_layers=LAYERS, d_model=32, num_heads=HEADS, num_kv_heads=KV_HEADS),
        data=DataConfig(length=32, batch_size=8, vocab_size=32, period_min=4, period_max=8, eval_rows=ROWS),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        probes=ProbesConfig(panel="15", induction_every=15, rows=8, repeats=8, periods=(4, 8)),
        checkpoint=CheckpointConfig(save="15"), tracking=TrackingConfig(wandb="disabled"),
    ))  # fmt: skip


@contextlib.contextmanager
def surroundings():
    """JAX with one device and little optimised programs: both halve the time of a test."""
    with pytest.MonkeyPatch.context() as patch:
        devices = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda *_: devices)
        patch.setattr(jax, "device_count", lambda *_: 1)
        before = jax.config.values["jax_disable_most_optimizations"]
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", before)


def train(cfg: Config, workdir) -> dict:
    """The summary of `loop.train`, in silence."""
    return loop.train(cfg, workdir, console=Console(active=False))


@functools.cache
def run() -> Run:
    """The run, trained when it is first asked for."""
    with surroundings():
        workdir = pathlib.Path(HOME.name).resolve() / "small"
        train(config(), workdir)
        return open_run(workdir)


@functools.cache
def snapshot(step: int = STEPS) -> Snapshot:
    """The run at a saved step."""
    with surroundings():
        return run().at(step)


@functools.cache
def ablated() -> Result:
    """Everything that can be ablated, in every way."""
    with surroundings():
        return ablate.ablate(snapshot())


@functools.cache
def pruned() -> Result:
    """Every order of single heads."""
    with surroundings():
        return prune.prune(snapshot())


def loss_without(heads, tokens_RU=None, kernels_HD=None) -> np.ndarray:
    """loss_RT in nats, by NumPy, with the output kernels of these heads 0, and of others as in kernels_HD; on the
    evaluation rows unless given."""
    found = snapshot()
    tokens_RU = found.panel.evaluation.tokens_RU if tokens_RU is None else tokens_RU
    params = copy.deepcopy(jax.tree.map(np.array, found.params))
    for (layer, head), kernel_HD in (dict.fromkeys(heads, 0.0) | (kernels_HD or {})).items():
        params["layers"][f"layer_{layer:02d}"]["attention"]["wo_NHD"][head] = kernel_HD
    return token_loss(oracle.forward(found.run.config.model, params, tokens_RU[:, :-1])[0], tokens_RU[:, 1:])


def token_loss(logits, targets) -> np.ndarray:
    """-ln softmax(logits)[target]."""
    top = logits.max(-1, keepdims=True)
    log_sum = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    return log_sum - np.take_along_axis(logits, targets[..., None], -1)[..., 0]


def parse(names: str) -> list[tuple[int, int]]:
    """[(0, 1), (1, 3)] of 'L0H1 L1H3'."""
    return [(int(name[1]), int(name[3])) for name in names.split()]


def comparable(rows: list[dict]) -> list[dict]:
    """Rows in which NaN equals NaN."""
    return [{k: None if isinstance(v, float) and np.isnan(v) else v for k, v in row.items()} for row in rows]
