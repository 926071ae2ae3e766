"""A run of 30 steps on one device, small enough for a test, and ways to look at what it left."""
import json
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, ProbesConfig
from mha_jax.training import loop, sharding, state
from mha_jax.training.checkpoint import Checkpoints
from mha_jax.validation import resolve

STEPS, BATCH, LENGTH = 30, 8, 32
# The only values that two equal runs differ in.
TIMES = ("seconds", "perf/probe_share", "perf/input_share", "perf/tokens_per_second")


def config(**changes) -> Config:
    """The tiny run, resolved; changes are given as {'model.num_kv_heads': 1}. Device calls are cut at 4, 5, 9, 10, ...

    Panels and saves at 0, 10, 20, 30, light probes at the other multiples of 5.
    """
    base = Config(
        name="tiny", steps=STEPS, steps_per_call=4,
        model=ModelConfig(num_layers=2, d_model=32, num_heads=4, num_kv_heads=4),
        data=DataConfig(length=LENGTH, batch_size=BATCH, vocab_size=64, period_min=4, period_max=8, eval_rows=8),
        optimizer=OptimizerConfig(warmup_steps=5, weight_decay=0.1),
        probes=ProbesConfig(panel="10", induction_every=5, rows=8, repeats=8, periods=(4, 8)),
        checkpoint=CheckpointConfig(save="10"),
    )  # fmt: skip
    for key, value in changes.items():
        section, _, field = key.rpartition(".")
        setattr(getattr(base, section) if section else base, field, value)
    return resolve(base)


class Screen:
    """Stands in for the console and remembers what was said."""

    def __init__(self):
        self.lines = []

    def say(self, message):
        self.lines.append(message)

    def start(self, *_):
        pass

    show = start

    def close(self):
        pass


def train(cfg: Config, workdir, restore="state", **kwargs) -> tuple[dict, list[str]]:
    """(summary, lines said) of `loop.train`."""
    screen = Screen()
    return loop.train(cfg, workdir, restore=restore, console=screen, **kwargs), screen.lines


def events(workdir) -> list[dict]:
    """The lines of metrics.jsonl without the values that time decides."""
    lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def saved(cfg: Config, workdir, step=STEPS) -> dict:
    """{path: numpy array} of the parameters and the optimizer of a checkpoint."""
    mesh = sharding.make_mesh(cfg)
    abstract = state.abstract_state(cfg, mesh)
    found, _ = Checkpoints(pathlib.Path(workdir).resolve(), cfg.checkpoint).restore(
        step, {name: abstract[name] for name in ("params", "optimizer")}
    )
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_flatten_with_path(found)[0]}


def probes(workdir) -> dict[str, dict]:
    """{file name: arrays} of probes/."""
    return {p.name: dict(np.load(p)) for p in sorted((pathlib.Path(workdir) / "probes").iterdir())}


def assert_same_bits(a: dict, b: dict):
    """Two dicts of arrays hold the same keys and the same bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name


def assert_same_run(cfg: Config, a, b):
    """Two finished run folders agree in everything but time."""
    assert events(a) == events(b)
    assert_same_bits(saved(cfg, a), saved(cfg, b))
    assert probes(a).keys() == probes(b).keys()
    for name, arrays in probes(a).items():
        assert_same_bits(arrays, probes(b)[name])


class Killed(BaseException):
    """kill -9, as far as the files are concerned."""


def stop_at(monkeypatch, at: int, how):
    """Calls `how` after the device call that reaches step `at`; a run that never reaches it fails the test."""
    advance = loop.Training._advance

    def and_stop(self):
        advance(self)
        if self.progress.step == at:
            monkeypatch.setattr(loop.Training, "_advance", advance)
            how()
        assert self.progress.step <= at or loop.Training._advance is advance

    monkeypatch.setattr(loop.Training, "_advance", and_stop)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def kill():
    raise Killed


def interrupted(monkeypatch, cfg, workdir, at, how):
    stop_at(monkeypatch, at, how)
    with pytest.raises((loop.Stopped, Killed)) as caught:
        train(cfg, workdir)
    if caught.type is loop.Stopped:
        assert caught.value.code == 143
        assert Checkpoints(workdir, cfg.checkpoint).steps()[-1] == at


class Poisoned:
    """A source whose batch of one step has infinite weights, hence a loss that is not finite."""

    def __init__(self, source, at):
        self._source, self._at = source, at

    def __getattr__(self, name):
        return getattr(self._source, name)

    def batches(self, first, n):
        batches = self._source.batches(first, n)
        if first <= self._at < first + n:
            batches["weights_BT"] = batches["weights_BT"].at[self._at - first].set(jnp.inf)
        return batches
