import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, ProbesConfig
from mha_jax.data.source import TaskSource, to_batch
from mha_jax.layout import put_rows, residual_sharding
from mha_jax.model import transformer
from mha_jax.training import sharding, state, step
from mha_jax.validation import resolve

RAGGED = (3, 31, 5, 17, 1, 9, 30, 12)


def tiny(kv=2, accumulation=1, steps=20, steps_per_call=5, **kwargs):
    return resolve(Config(
        steps=steps, steps_per_call=steps_per_call,
        model=ModelConfig(d_model=32, num_heads=4, num_kv_heads=kv),
        data=DataConfig(vocab_size=64, length=32, batch_size=8, period_min=4, period_max=8, eval_rows=8),
        optimizer=OptimizerConfig(accumulation=accumulation, warmup_steps=5), probes=ProbesConfig(rows=8), **kwargs,
    ))  # fmt: skip


def one_device():
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"),
                             axis_types=(jax.sharding.AxisType.Auto,) * 3)  # fmt: skip


def ragged_batch():
    tokens = np.random.default_rng(0).integers(0, 64, (8, 33)).astype(np.int32)
    batch = to_batch(tokens)
    batch["weights_BT"] = (np.arange(32) < np.array(RAGGED)[:, None]).astype(np.float32)
    return batch


def on(mesh, batch):
    return {k: None if v is None else put_rows(mesh, v) for k, v in batch.items()}


def run_steps(config, mesh, calls, interventions=None):
    """Losses of every step and the final state, `calls` = how many steps each device call makes."""
    source, graph = TaskSource(config, mesh), transformer.graphdef(config.model)
    now = state.sharded_init(config, mesh)
    run = step.compile_train_steps(config, graph, state.abstract_state(config, mesh), source.batches(0, 1), mesh,
                                   residual_sharding(mesh))  # fmt: skip
    at, losses = 0, []
    for count in calls:
        now, metrics = run(now, source.batches(at, count), jnp.int32(count))
        losses += [float(row[0]) for row in np.asarray(metrics)[:count]]
        at += count
    return losses, now


def same_bits(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_fc_08_mean_over_tokens_by_hand(monkeypatch):
    # Micro-batch 1 has one real token with loss 1, micro-batch 2 three with loss 3: (1 + 9) / 4, not (1 + 3) / 2.
    batch = {"loss_BT": jnp.array([[1.0, 7.0, 7.0], [3.0, 3.0, 3.0]]),
             "weights_BT": jnp.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])}  # fmt: skip

    def loss_sum(graph, params, part, *_):
        return params["x"] * (part["loss_BT"] * part["weights_BT"]).sum()

    monkeypatch.setattr(step, "loss_sum", loss_sum)
    loss, grads, tokens = step.mean_loss_and_grads(None, {"x": jnp.float32(1.0)}, batch, accumulation=2)
    assert (float(loss), float(grads["x"]), float(tokens)) == (2.5, 2.5, 4.0)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("kv", [4, 2, 1])
def test_fc_08_ragged_rows_accumulated_or_not_and_on_eight_devices(kv):
    results = []
    for accumulation, mesh in ((1, one_device()), (4, one_device()), (1, sharding.make_mesh(tiny(kv)))):
        config = tiny(kv, accumulation)
        graph = transformer.graphdef(config.model)
        update = jax.jit(functools.partial(step.train_step, config, graph, residual_sharding=residual_sharding(mesh)))
        now = state.sharded_init(config, mesh)
        now["step"] = now["step"] + 3  # a step at which the learning rate is not 0
        results.append(update(now, on(mesh, ragged_batch())))
    for new, metrics in results[1:]:
        np.testing.assert_allclose(metrics, results[0][1], rtol=1e-5)
        assert float(metrics[3]) == sum(RAGGED)
        for a, b in zip(jax.tree.leaves(new["params"]), jax.tree.leaves(results[0][0]["params"]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_fc_12_a_batch_with_nothing_to_learn():
    config = tiny()
    batch = ragged_batch() | {"weights_BT": np.zeros((8, 32), np.float32)}
    params = transformer.init_params(config.model, 0)
    graph = transformer.graphdef(config.model)
    loss, grads, tokens = jax.jit(lambda p, b: step.mean_loss_and_grads(graph, p, b, 1))(params, batch)
    assert float(loss) == 0 and float(tokens) == 0
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads))


@pytest.mark.usefixtures("quick_compile")
def test_fc_12_b_nothing_changes_from_the_first_bad_step_on(monkeypatch):
    config, real = tiny(), step.mean_loss_and_grads

    def explode(graph, params, batch, *args):
        loss, grads, tokens = real(graph, params, batch, *args)
        bad = batch["inputs_BT"][0, 0] == 63  # the fourth batch below, alone
        return loss, jax.tree.map(lambda g: jnp.where(bad, jnp.inf, g), grads), tokens

    monkeypatch.setattr(step, "mean_loss_and_grads", explode)
    batches = jax.tree.map(lambda x: np.stack([x] * 5), to_batch(np.random.default_rng(0).integers(0, 63, (8, 33))))
    batches["inputs_BT"][3, 0, 0] = 63
    run = jax.jit(functools.partial(step.train_steps, config, transformer.graphdef(config.model)))
    start = state.init_state(config, 0)
    good, _ = run(start, batches, 3)
    stopped, metrics = run(start, batches, 5)
    assert int(stopped["failed_at"]) == 3 and int(good["failed_at"]) == -1
    assert same_bits(good["params"], stopped["params"]) and same_bits(good["optimizer"], stopped["optimizer"])
    assert np.isfinite(metrics[:3]).all() and np.isinf(metrics[3, 1])


def test_several_steps_in_one_call_are_single_steps_bit_for_bit():
    config, mesh = tiny(), sharding.make_mesh(tiny())
    by_one, one = run_steps(config, mesh, [1] * 12)
    by_many, many = run_steps(config, mesh, [5, 2, 4, 1])
    assert by_one == by_many and same_bits(one, many)


@pytest.mark.parametrize("kv", [pytest.param(4, marks=pytest.mark.slow), 1])
def test_eight_devices_train_like_one(kv):
    config = tiny(kv, steps=100, steps_per_call=25)
    one, _ = run_steps(config, one_device(), [25] * 4)
    eight, _ = run_steps(config, sharding.make_mesh(config), [25] * 4)
    np.testing.assert_allclose(eight, one, atol=1e-5)


@pytest.mark.usefixtures("quick_compile")
def test_fsdp_and_tensor_parallel_train_like_one():
    config = tiny(2, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    got, _ = run_steps(config, sharding.make_mesh(config), [5] * 4)
    plain, _ = run_steps(tiny(2), one_device(), [5] * 4)
    np.testing.assert_allclose(got, plain, atol=1e-5)


@pytest.mark.usefixtures("quick_compile")
def test_kv_heads_that_do_not_divide_by_the_tensor_axis_are_replicated():
    config = tiny(2, mesh=MeshConfig(data=2, fsdp=1, tensor=4))
    got, now = run_steps(config, sharding.make_mesh(config), [5, 5])
    plain, _ = run_steps(tiny(2), one_device(), [5, 5])
    np.testing.assert_allclose(got, plain, atol=1e-5)
    assert now["params"]["layers"]["layer_00"]["attention"]["wk_DKH"].sharding.spec[1] is None


def compiled(config, mesh):
    source = TaskSource(config, mesh)
    return step.compile_train_steps(config, transformer.graphdef(config.model), state.abstract_state(config, mesh),
                                    source.batches(0, 1), mesh, residual_sharding(mesh))  # fmt: skip


@pytest.mark.parametrize("attention", [pytest.param("einsum", marks=pytest.mark.slow), "blockwise"])
def test_data_parallelism_gathers_nothing_and_shares_the_work(attention):
    config = tiny(steps_per_call=1)
    config.model.attention = attention
    one, eight = compiled(config, one_device()), compiled(config, sharding.make_mesh(config))
    assert "all-gather" not in eight.as_text() and "all-reduce" in eight.as_text()
    per_device, total = eight.cost_analysis()["flops"], one.cost_analysis()["flops"]
    if attention == "einsum":  # the cost model counts the body of a loop over rows once
        assert per_device == pytest.approx(total / 8, rel=0.15)


def test_golden_first_steps():
    """A change of these numbers means every published run changes: say so in the commit that does it."""
    losses, _ = run_steps(tiny(), one_device(), [4])
    np.testing.assert_allclose(losses, GOLDEN, rtol=1e-5)


GOLDEN = [4.644581, 4.767326, 4.550973, 4.477783]
