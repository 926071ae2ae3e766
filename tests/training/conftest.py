"""Runs inside the test process: on one device, every program compiled once for the session, and that quickly.

Only compilation is shared: `step.compile_train_steps`, `Panel` and the batches are the real ones.
"""
import jax
import numpy as np
import pytest

from mha_jax.data import source
from mha_jax.probes.panel import Panel
from mha_jax.training import loop, state, step
from tests.training import tiny

_made = {}


def once(make, *key):
    """`make()`, or what it returned for the same key before."""
    key = repr(key)
    if key not in _made:
        _made[key] = make()
    return _made[key]


@pytest.fixture
def shared_programs(monkeypatch):
    """Runs of one config share their compiled programs, which are little optimised: that halves the time."""
    compile_step, init, batch_maker = step.compile_train_steps, state.sharded_init, source._batch_maker

    def compile_once(cfg, graph, abstract_state, batches, mesh, residual):
        return once(lambda: compile_step(cfg, graph, abstract_state, batches, mesh, residual),
                    "step", cfg.model, cfg.data, cfg.optimizer, cfg.interventions, cfg.steps, cfg.steps_per_call,
                    mesh)  # fmt: skip

    def panel(cfg, source, mesh):
        key = (cfg.model, cfg.data, cfg.probes.rows, cfg.probes.repeats, cfg.probes.periods, mesh)
        made = once(lambda: Panel(cfg, source, mesh), "panel", *key)
        if "compile" not in vars(made):
            compile_panel = made.compile
            made.compile = lambda params: once(lambda: (compile_panel(params), True), "measure", *key)
        return made

    def init_once(cfg, mesh):
        host = once(lambda: jax.tree.map(np.asarray, init(cfg, mesh)), "init", cfg.model, cfg.seed)
        to = jax.tree.map(lambda x: x.sharding, state.abstract_state(cfg, mesh))
        return jax.tree.map(lambda x, s: jax.device_put(x.copy(), s), host, to)

    def batches(task, *args):
        return once(lambda: batch_maker(task, *args), "batches", task, *args)

    monkeypatch.setattr(step, "compile_train_steps", compile_once)
    monkeypatch.setattr(loop, "Panel", panel)
    monkeypatch.setattr(state, "sharded_init", init_once)
    monkeypatch.setattr(source, "_batch_maker", batches)
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def one_device(monkeypatch):
    """JAX with one device."""
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:1])
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """kv_heads -> folder of a run that nothing interrupted; for tests that use the two fixtures above."""
    made = {}

    def folder(kv_heads):
        if kv_heads not in made:
            made[kv_heads] = tmp_path_factory.mktemp(f"whole{kv_heads}")
            tiny.train(tiny.config(**{"model.num_kv_heads": kv_heads}), made[kv_heads])
        return made[kv_heads]

    return folder
