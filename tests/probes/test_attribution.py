"""Attribution against the NumPy model's own residual stream, and hand-worked vectors."""
import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.probes import attribution
from tests.model import oracle
from tests.model.oracle import graphdef, model_config, quick_jit, random_params, random_tokens

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIGS = [
    dict(norm="layer", num_kv_heads=4, mlp="gelu", bias=True, positions="learned"),
    dict(norm="rms", num_kv_heads=2, mlp="swiglu", tied=True),
    dict(norm="none", num_kv_heads=1),
    dict(norm="layer", num_kv_heads=2, mlp="gelu", bias=True, tied=True, kept_heads=((1, 2, 3), ())),
]

value_weighted = quick_jit(attribution.value_weighted)
GROUPS = np.array([0, 0, 1, 1])


def make(**fields):
    cfg = model_config(**(dict(num_layers=2, d_model=16, num_heads=4, d_mlp=12) | fields))
    params, tokens_BU = random_params(cfg, 0), random_tokens(cfg, 1, T=8)
    return cfg, params, tokens_BU[:, :-1], tokens_BU[:, 1:]


def toward(cfg, params, x_BTD, targets_BT):
    """direction_BTD: what a vector in the residual stream adds to the target's logit, the final norm's size held."""
    unembed = params["embed_VD"].T if cfg.tied else params["unembed_DV"]
    column = unembed.T[targets_BT].astype(np.float64)
    if cfg.norm == "none":
        return column
    p = params["final_norm"]
    centred = x_BTD - (x_BTD.mean(-1, keepdims=True) if cfg.norm == "layer" else 0)
    size = np.sqrt((centred**2).mean(-1, keepdims=True) + cfg.norm_eps)
    direction = column * p["scale_D"] / size
    return direction - direction.mean(-1, keepdims=True) if cfg.norm == "layer" else direction


@pytest.mark.parametrize("fields", CONFIGS)
def test_fc_26_parts_sum_to_the_logit_and_each_head_has_its_own(fields):
    cfg, params, tokens_BT, targets_BT = make(**fields)
    parts = attribution.direct_logits(graphdef(cfg), params, tokens_BT, targets_BT)
    logits, found, resid = oracle.forward(cfg, params, tokens_BT)
    logit_BT = np.take_along_axis(logits, targets_BT[..., None], -1)[..., 0]
    heads_LNBT = np.asarray(parts.heads_LNBT)
    total_BT = parts.embedding_BT + np.nansum(heads_LNBT, (0, 1)) + parts.mlp_LBT.sum(0) + parts.bias_BT
    exact = dict(rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(total_BT, parts.logit_BT, **exact)
    np.testing.assert_allclose(total_BT, logit_BT, **exact)
    direction = toward(cfg, params, resid[-1], targets_BT)
    np.testing.assert_allclose(parts.embedding_BT, (resid[0] * direction).sum(-1), **exact)
    for layer in range(2):
        kept = range(4) if cfg.kept_heads is None else cfg.kept_heads[layer]
        assert set(np.flatnonzero(~np.isnan(heads_LNBT[layer]).any((1, 2)))) == set(kept)
        for i, n in enumerate(kept):
            wo_HD = params["layers"][f"layer_{layer:02d}"]["attention"]["wo_NHD"][i]
            expected = ((found[layer]["z"][:, :, i] @ wo_HD) * direction).sum(-1)
            np.testing.assert_allclose(heads_LNBT[layer, n], expected, **exact)
    if cfg.mlp == "none":
        assert not np.asarray(parts.mlp_LBT).any() and not np.asarray(parts.bias_BT).any()


def test_fc_26_the_one_head_that_writes_is_the_only_entry():
    cfg, params, tokens_BT, targets_BT = make(**CONFIGS[1])
    for layer in range(2):
        wo_NHD = params["layers"][f"layer_{layer:02d}"]["attention"]["wo_NHD"]
        for n in range(4):
            if (layer, n) != (1, 2):
                wo_NHD[n] = 0
    heads_LNBT = np.asarray(attribution.direct_logits(graphdef(cfg), params, tokens_BT, targets_BT).heads_LNBT)
    assert np.argwhere(np.abs(heads_LNBT).max((2, 3)) > 0).tolist() == [[1, 2]]


@pytest.mark.parametrize("fields", CONFIGS[::3])
def test_logit_lens_is_the_loss_of_a_model_that_ends_there(fields):
    cfg, params, tokens_BT, targets_BT = make(**fields)
    loss_MBT = attribution.logit_lens(graphdef(cfg), params, tokens_BT, targets_BT)
    _, _, resid = oracle.forward(cfg, params, tokens_BT)
    unembed = params["embed_VD"].T if cfg.tied else params["unembed_DV"]
    for m in range(3):
        logits = oracle.norm(cfg, params.get("final_norm"), resid[m]) @ unembed
        top = logits.max(-1)
        log_total = top + np.log(np.exp(logits - top[..., None]).sum(-1))
        expected = log_total - np.take_along_axis(logits, targets_BT[..., None], -1)[..., 0]
        np.testing.assert_allclose(loss_MBT[m], expected, rtol=1e-4, atol=1e-4)


def test_value_weighted_patterns_follow_the_sizes_of_the_groups_values():
    pattern_LBNTS = np.full((1, 1, 4, 2, 2), 0.5, np.float32)
    v_LBSKH = np.array([[[3, 4], [1, 0]], [[0, 15], [0, 1]]], np.float32)[None, None]
    weighted = value_weighted(pattern_LBNTS, v_LBSKH, GROUPS)[0, 0]
    np.testing.assert_allclose(weighted[:2], [[[0.25, 0.75]] * 2] * 2, rtol=1e-6)  # sizes 5 and 15, mean 10
    np.testing.assert_allclose(weighted[2:], pattern_LBNTS[0, 0, 2:])  # equal sizes: the pattern itself


def test_value_weighted_keeps_absent_heads_apart_and_a_group_without_values_zero():
    pattern_LBNTS = np.full((1, 1, 4, 2, 2), 0.5, np.float32)
    pattern_LBNTS[:, :, 1] = np.nan
    v_LBSKH = np.zeros((1, 1, 2, 2, 2), np.float32)
    v_LBSKH[:, :, :, 1] = np.nan
    weighted = value_weighted(pattern_LBNTS, v_LBSKH, GROUPS)[0, 0]
    assert not weighted[0].any() and np.isnan(weighted[1:]).all()


def test_before_and_after_is_negative_for_a_head_that_undoes_the_change():
    start_T, end_T = np.array([4.0, 4.0, 4.0]), np.array([4.0, 1.0, 0.0])  # the change is (0, -3, -4), its length 5
    clean_T = np.array([4.0, 1.0, 0.0])
    ablated_LNT = np.array([[[4.0, 4.0, 4.0], [9.0, 1.0, 0.0]], [[4.0, 1.0, -1.0], [np.nan] * 3]])
    found = attribution.before_after(start_T, end_T, ablated_LNT, clean_T)
    np.testing.assert_allclose(found, [[-5.0, 0.0], [0.8, np.nan]])


def test_before_and_after_of_two_equal_steps_is_refused():
    with pytest.raises(ConfigError, match="two steps whose losses differ"):
        attribution.before_after(np.ones(3), np.ones(3), np.ones((1, 1, 3)), np.ones(3))
