import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mha_jax.config import Config, ModelConfig, OptimizerConfig
from mha_jax.model import transformer
from mha_jax.training import optimizer
from mha_jax.validation import resolve

FULL = ModelConfig(num_heads=4, num_kv_heads=2, d_model=32, bias=True, mlp="swiglu", positions="learned", sink=True,
                   smeared_key=True, qk_norm=True)  # fmt: skip


def rates(**kwargs):
    cfg = OptimizerConfig(learning_rate=1.0, end_learning_rate=0.1, warmup_steps=10, **kwargs)
    return jax.jit(jax.vmap(optimizer.learning_rate(cfg, 100)))


def test_fc_09_learning_rate_by_optimizer_step():
    got = rates()(jnp.array([0, 1, 10, 55, 100]))
    np.testing.assert_allclose(got, [0.0, 0.1, 1.0, 0.55, 0.1], rtol=1e-6)


def test_learning_rate_is_optax_schedule():
    steps = np.arange(101)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100, 0.1)
    np.testing.assert_allclose(rates()(steps), jax.vmap(theirs)(steps), rtol=1e-5, atol=1e-7)


def test_constant_schedule_and_a_warmup_longer_than_the_run():
    np.testing.assert_allclose(rates(schedule="constant")(jnp.array([5, 10, 99])), [0.5, 1.0, 1.0])
    cfg = OptimizerConfig(learning_rate=1.0, warmup_steps=100)
    assert float(optimizer.learning_rate(cfg, 20)(jnp.int32(20))) == pytest.approx(0.2)


def test_fc_10_decay_touches_matrices_alone():
    model = resolve(Config(model=FULL)).model
    params = jax.tree.map(lambda x: x + 1.0, transformer.init_params(model, 0))  # biases start at 0: move them
    cfg = OptimizerConfig(learning_rate=1.0, warmup_steps=0, schedule="constant", weight_decay=0.1)
    opt = optimizer.make(cfg, 100)
    updates, _ = opt.update(jax.tree.map(jnp.zeros_like, params), opt.init(params), params)
    new = optax.apply_updates(params, updates)
    decayed = set()
    for (path, old), (_, now) in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree_util.tree_leaves_with_path(new), strict=True
    ):
        name = path[-1].key
        if np.array_equal(old, now):
            continue
        decayed.add(name)
        np.testing.assert_allclose(now, 0.9 * old, rtol=1e-6)
    assert decayed == {"embed_VD", "unembed_DV", "wq_DNH", "wk_DKH", "wv_DKH", "wo_NHD", "w_gate_DF", "w_up_DF",
                       "w_down_FD"}  # fmt: skip
