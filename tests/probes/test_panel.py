import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax.config import Config, DataConfig, ModelConfig, ProbesConfig
from mha_jax.data.source import TaskSource, to_batch
from mha_jax.model import transformer
from mha_jax.probes import behaviour, icl, induction, panel
from mha_jax.training import sharding
from mha_jax.validation import resolve

pytestmark = pytest.mark.usefixtures("quick_module")


def make(kv=2, task="repeat", vocab=64, length=32, model=None, **data):
    config = resolve(Config(
        model=dataclasses.replace(ModelConfig(d_model=32, num_heads=4, num_kv_heads=kv), **(model or {})),
        data=DataConfig(task=task, vocab_size=vocab, length=length, batch_size=8, eval_rows=16, period_min=4,
                        period_max=8, **data),
        probes=ProbesConfig(rows=8, repeats=8),
    ))  # fmt: skip
    mesh = sharding.make_mesh(config)
    return config, panel.Panel(config, TaskSource(config, mesh), mesh)


@pytest.fixture(scope="module")
def gqa(quick_module):
    config, p = make()
    params = transformer.init_params(config.model, 0)
    return config, p, params, p.measure(params)


def test_the_panel_is_its_parts_computed_one_by_one(gqa):
    """Against the plain functions on the same tokens, outside the panel and on one device."""
    _, p, params, reading = gqa
    with jax.default_matmul_precision("highest"):
        batch = to_batch(p.evaluation.tokens_RU)
        forward = jax.jit(lambda t: transformer.forward(p.graph, params, t, capture=("pattern",)))
        loss_BT = icl.token_loss(forward(batch["inputs_BT"])[0], batch["targets_BT"])
        rows = batch["inputs_BT"][:8]
        pattern = forward(rows)[1].pattern_LBNTS
        blocks = p.repeats["induction"][1][1]
        repeated = forward(blocks)[1].pattern_LBNTS
    np.testing.assert_allclose(reading.values["eval/loss"], loss_BT.mean(), rtol=1e-5)
    np.testing.assert_allclose(reading.arrays["loss_by_position_T"], loss_BT.mean(0), rtol=1e-4)
    score, se = icl.icl_score(loss_BT, p.evaluation.early_RT, p.evaluation.late_RT)
    np.testing.assert_allclose([reading.values["icl/score"], reading.values["icl/score_se"]], [score, se], rtol=1e-3)
    np.testing.assert_allclose(reading.arrays["previous_token_LN"], behaviour.previous_token(pattern), rtol=1e-4)
    duplicate = behaviour.duplicate_token(pattern, rows)
    np.testing.assert_allclose(reading.arrays["duplicate_token_LN"], duplicate, rtol=1e-4)
    mass = induction.target_mass(repeated, induction.prefix_targets(blocks))
    np.testing.assert_allclose(reading.arrays["induction_PLN"][1], mass, rtol=1e-4)
    assert reading.values["previous_token/L1H2"] == pytest.approx(float(reading.arrays["previous_token_LN"][1, 2]))


def test_the_light_probe_is_the_panels_own_prefix_matching(gqa):
    _, p, params, reading = gqa
    light = p.light(params)
    assert light.values and all(reading.values[k] == v for k, v in light.values.items())
    np.testing.assert_array_equal(light.arrays["induction_PLN"], reading.arrays["induction_PLN"])


def test_fc_30_measuring_leaves_nothing_behind_and_repeats_bit_for_bit(gqa):
    _, p, params, reading = gqa
    before = jax.tree.map(np.array, params)
    again = p.measure(params)
    assert again.values == reading.values
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, params))


@pytest.mark.parametrize("kv", [4, 2, 1])
def test_copying_reads_each_query_heads_own_value_and_output(kv):
    """A head whose OV circuit is the identity copies; under GQA it borrows the group's value kernel."""
    config, p = make(kv, model={"norm": "none", "head_dim": 32})
    params = transformer.init_params(config.model, 0)
    orthogonal = jnp.linalg.qr(jax.random.normal(jax.random.key(1), (64, 32)))[0] * 4
    params["embed_VD"], params["unembed_DV"] = orthogonal, orthogonal.T
    attention = params["layers"]["layer_00"]["attention"]
    attention["wv_DKH"] = jnp.stack([jnp.eye(32)] * kv, axis=1)
    attention["wo_NHD"] = jnp.zeros((4, 32, 32)).at[2].set(jnp.eye(32))
    copying_LN = p.measure(params).arrays["copying_LN"]
    np.testing.assert_array_equal(copying_LN[0, [0, 1, 3]], 0.0)
    assert copying_LN[0, 2] > 0.3 > 3 * p.copying_chance


@pytest.mark.parametrize("model", [{"kept_heads": ((0, 3), (1, 2, 3))}, {"kept_heads": ((), (1, 2))}])
def test_heads_that_are_gone_are_nan_and_named_nowhere(model):
    config, p = make(model=model)
    reading = p.measure(transformer.init_params(config.model, 0))
    gone = [(layer, h) for layer in (0, 1) for h in range(4) if h not in model["kept_heads"][layer]]
    for name in ("induction_PLN", *(f"{n}_LN" for n in behaviour.HEAD_SCORES)):
        absent = np.isnan(reading.arrays[name]).reshape(-1, 2, 4).all(0)
        assert [tuple(x) for x in np.argwhere(absent)] == gone, name
    assert not any(panel.head_name(*h) in key for h in gone for key in reading.values)
    assert np.isfinite(list(reading.values.values())).all()


def test_a_small_vocabulary_is_scored_on_the_tasks_own_sequences():
    config, p = make(task="markov", vocab=3)
    assert p.source.induction_probe == "the task's own sequences"
    np.testing.assert_array_equal(p.repeats["induction"][1][0], p.evaluation.tokens_RU[:8, :-1])
    assert 0.2 < p.chance_P["induction"][0] < 0.5
    assert "induction/max" in p.measure(transformer.init_params(config.model, 0)).values


def test_limits_are_on_the_evaluation_rows_themselves(gqa):
    _, p, _, _ = gqa
    assert p.limits["limit/bayes"] == p.evaluation.lines["bayes"].mean()
    assert p.limits["icl/bayes"] < p.limits["icl/unigram"] < 0
