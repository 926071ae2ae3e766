"""Models with heads removed for good: the same function as cutting them off, and the same numbers for those left."""
import dataclasses

import jax
import numpy as np
import pytest

from mha_jax.model import transformer
from mha_jax.model.interventions import Interventions, ablate
from tests.model import oracle

B, T, N = 2, 6, 8
run = oracle.quick_jit(transformer.forward, static_argnums=0, static_argnames=("capture", "implementation"))
OF_HEADS = {"wq_DNH": 1, "bq_NH": 0, "wo_NHD": 0, "sink_N": 0}
OF_KV_HEADS = {"wk_DKH": 1, "wv_DKH": 1, "bk_KH": 0, "bv_KH": 0, "smear_K": 0}
KEPT = {
    "unequal_groups": ((0, 2, 5), (3, 4, 6, 7)),
    "one_group_left": ((4, 5, 6, 7), (1,)),
    "equal_groups_of_two": ((0, 3, 4, 7), (1, 2, 5, 6)),
    "emptied_first": ((), (0, 1, 2, 3, 4, 5, 7)),
    "emptied_last": ((2, 6), ()),
}


def whole_config(K, **fields):
    return oracle.model_config(num_layers=2, d_model=16, num_kv_heads=K, head_dim=4, bias=True, **fields)


def removed(cfg, params, kept):
    """The config and parameters of the model that keeps only these heads, taken from the whole one."""
    group = cfg.num_heads // cfg.num_kv_heads
    layers = {}
    for i, heads in enumerate(kept):
        block = dict(params["layers"][f"layer_{i:02}"])
        kv_heads = sorted({n // group for n in heads})
        taken = {}
        for name, x in block["attention"].items():
            if name in OF_HEADS:
                x = np.take(x, heads, OF_HEADS[name])
            elif name in OF_KV_HEADS:
                x = np.take(x, kv_heads, OF_KV_HEADS[name])
            if heads or name == "bo_D":
                taken[name] = x
        layers[f"layer_{i:02}"] = block | {"attention": taken}
    return dataclasses.replace(cfg, kept_heads=kept), params | {"layers": layers}


def gone(kept):
    return [(layer, n) for layer, heads in enumerate(kept) for n in range(N) if n not in heads]


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("name", KEPT)
def test_fc_27_removing_heads_equals_cutting_them_off(name, K):
    """The two implementations that know of sinks take turns."""
    implementation = ("einsum", "blockwise")[(list(KEPT).index(name) + K.bit_length()) % 2]
    check_removal(whole_config(K, smeared_key=True, qk_norm=True, sink=True), name, implementation)


@pytest.mark.parametrize("K", [2, 8])
def test_fc_27_removing_heads_from_fused_attention(K):
    check_removal(whole_config(K), "unequal_groups", "fused")


def check_removal(cfg, name, implementation):
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B, T)
    small_cfg, small_params = removed(cfg, params, KEPT[name])
    shapes = jax.eval_shape(lambda: transformer.init_params(small_cfg, 0))
    assert jax.tree.map(np.shape, small_params) == jax.tree.map(np.shape, shapes)
    cut = run(oracle.graphdef(cfg), params, tokens, interventions=ablate(2, N, gone(KEPT[name])))[0]
    small = run(oracle.graphdef(small_cfg), small_params, tokens, implementation=implementation)[0]
    np.testing.assert_allclose(small, cut, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(small, oracle.forward(small_cfg, small_params, tokens)[0], rtol=1e-5, atol=1e-5)


def test_fc_27_half_of_mqa_is_four_query_heads_and_one_key():
    cfg = whole_config(1)
    small_cfg, _ = removed(cfg, oracle.random_params(cfg, 0), ((1, 3, 4, 6), (0, 1, 2, 3)))
    shapes = jax.eval_shape(lambda: transformer.init_params(small_cfg, 0))["layers"]["layer_00"]["attention"]
    assert shapes["wq_DNH"].shape == (16, 4, 4) and shapes["wo_NHD"].shape == (4, 4, 16)
    assert shapes["wk_DKH"].shape == shapes["wv_DKH"].shape == (16, 1, 4)
    assert transformer.count_params(cfg) - transformer.count_params(small_cfg) == 2 * (4 * 2 * 16 * 4 + 4 * 4)


def test_fc_27_captures_speak_of_the_original_heads():
    """What is there equals the NumPy model's; what is gone is NaN, keys and values of a group without heads too."""
    cfg = dataclasses.replace(whole_config(4), kept_heads=((0, 2, 5), ()))
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B, T)
    _, (found, _), _ = oracle.forward(cfg, params, tokens)
    aux = run(oracle.graphdef(cfg), params, tokens, capture=("pattern", "z", "q", "k", "v"))[1]
    for name, axis, num, kept in (
        ("pattern_LBNTS", 1, 8, [0, 2, 5]), ("z_LBTNH", 2, 8, [0, 2, 5]), ("q_LBTNH", 2, 8, [0, 2, 5]),
        ("k_LBSKH", 2, 4, [0, 1, 2]), ("v_LBSKH", 2, 4, [0, 1, 2]),
    ):  # fmt: skip
        x = np.moveaxis(getattr(aux, name), axis + 1, 1)
        assert x.shape[:2] == (2, num) and np.isnan(x[1]).all()
        want = np.moveaxis(found[name.split("_")[0]], axis, 0)
        np.testing.assert_allclose(x[0, kept], want, rtol=1e-5, atol=1e-5)
        assert np.isnan(np.delete(x[0], kept, 0)).all()


def test_fc_27_an_emptied_layer_writes_only_its_bias():
    cfg = dataclasses.replace(whole_config(2), kept_heads=((), (1, 2)))
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B, T)
    assert list(params["layers"]["layer_00"]["attention"]) == ["bo_D"]
    resid = run(oracle.graphdef(cfg), params, tokens, capture=("resid",))[1].resid_MBTD
    bias = params["layers"]["layer_00"]["attention"]["bo_D"]
    np.testing.assert_allclose(resid[1] - resid[0], np.broadcast_to(bias, (B, T, 16)), atol=1e-6)
    assert np.abs(resid[2] - resid[1] - params["layers"]["layer_01"]["attention"]["bo_D"]).max() > 0.1


def test_fc_27_nothing_left_is_a_bigram_model():
    """Without heads and biases the logits at a position depend on its token alone."""
    cfg = oracle.model_config(num_layers=2, d_model=16, kept_heads=((), ()))
    params, tokens = oracle.random_params(cfg, 0), np.array([[3, 1, 3, 3], [1, 3, 2, 1]], np.int32)
    logits = run(oracle.graphdef(cfg), params, tokens)[0]
    assert (logits[tokens == 3] == logits[0, 0]).all() and (logits[tokens == 1] == logits[1, 0]).all()
    assert "attention" not in params["layers"]["layer_00"]


def test_keeping_all_heads_is_the_whole_model():
    cfg = whole_config(2)
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B, T)
    all_kept, same = removed(cfg, params, (tuple(range(N)),) * 2)
    a, b = (run(oracle.graphdef(c), p, tokens)[0] for c, p in ((cfg, params), (all_kept, same)))
    assert (a == b).all()


def test_interventions_on_a_smaller_model_name_the_original_heads():
    """Gate, replacement, forced pattern and mix of head 5, the last of the three that remain; values of removed
    heads are not read."""
    cfg = whole_config(4)
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B, T)
    kept = ((0, 2, 5), (1, 5))
    small_cfg, small_params = removed(cfg, params, kept)
    left = np.array([[n in heads for n in range(N)] for heads in kept])
    rng = np.random.default_rng(5)
    value = rng.normal(size=(2, B, T, N, 4)).astype(np.float32)
    pattern = np.tril(rng.uniform(size=(2, B, N, T, T))).astype(np.float32)
    five = np.tile(np.arange(N) == 5, (2, 1))
    mix = np.tile(np.eye(N, dtype=np.float32), (2, 1, 1))
    mix[0, 5, 0] = 0.5
    for interventions in (
        Interventions(gate_LN=np.where(five, 0.3, 1)),
        Interventions(gate_LN=rng.uniform(size=(B, T, 2, N))),
        Interventions(replace_LN=five, value_LBTNH=value),
        Interventions(force_LN=five, pattern_LBNTS=pattern),
        Interventions(mix_LNN=mix),
    ):
        gate = 1.0 if interventions.gate_LN is None else interventions.gate_LN
        also_cut = dataclasses.replace(interventions, gate_LN=left * gate)
        want = run(oracle.graphdef(cfg), params, tokens, interventions=also_cut)[0]
        got = run(oracle.graphdef(small_cfg), small_params, tokens, interventions=interventions)[0]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    changed = run(oracle.graphdef(small_cfg), small_params, tokens, interventions=ablate(2, N, [(0, 5)]))[0]
    alone, _ = removed(cfg, params, ((0, 2), (1, 5)))
    without = run(oracle.graphdef(alone), removed(cfg, params, ((0, 2), (1, 5)))[1], tokens)[0]
    np.testing.assert_allclose(changed, without, rtol=1e-5, atol=1e-5)
