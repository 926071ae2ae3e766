"""Weights read as circuits, against the d x d and V x V matrices themselves."""
import copy

import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.probes import circuits
from tests.model.oracle import model_config, random_params, rotate

OFFSETS = (3, 7, 15)
CONFIGS = [
    dict(norm="layer", num_kv_heads=4, positions="rope", bias=True),
    dict(norm="rms", num_kv_heads=2, positions="learned", tied=True),
    dict(norm="none", num_kv_heads=1, positions="rope"),
    dict(norm="layer", num_kv_heads=2, positions="rope", qk_norm=True, kept_heads=((1, 2, 3), (), (0, 3))),
    dict(norm="layer", num_kv_heads=4, positions="learned", head_dim=24, smeared_key=True),
]


def make(num_layers=3, **fields):
    fields = dict(num_layers=num_layers, d_model=16, num_heads=4, vocab_size=11) | fields
    cfg = model_config(**fields)
    return cfg, random_params(cfg, 0)


def whole_matrices(cfg, params):
    """Per head (layer, n): W_Q, W_K, W_V, W_O [d, H] .. [H, d], norms as matrices; and W_E, W_U."""
    d = cfg.d_model
    centre = np.eye(d) - (1 / d if cfg.norm == "layer" else 0)
    found = {}
    for layer in range(cfg.num_layers):
        p = params["layers"][f"layer_{layer:02d}"]
        norm = centre if cfg.norm == "none" else centre @ np.diag(p["attention_norm"]["scale_D"].astype(np.float64))
        kept = range(cfg.num_heads) if cfg.kept_heads is None else cfg.kept_heads[layer]
        groups = sorted({n * cfg.num_kv_heads // cfg.num_heads for n in kept})
        for i, n in enumerate(kept):
            a = p["attention"]
            j = groups.index(n * cfg.num_kv_heads // cfg.num_heads)
            gains = (a["q_scale_H"], a["k_scale_H"]) if cfg.qk_norm else (1.0, 1.0)
            found[layer, n] = (norm @ a["wq_DNH"][:, i] * gains[0], norm @ a["wk_DKH"][:, j] * gains[1],
                               norm @ a["wv_DKH"][:, j], a["wo_NHD"][i] @ centre)  # fmt: skip
    final = centre if cfg.norm == "none" else centre @ np.diag(params["final_norm"]["scale_D"].astype(np.float64))
    unembed = params["embed_VD"].T if cfg.tied else params["unembed_DV"]
    return found, params["embed_VD"].astype(np.float64), final @ unembed


def turned(w_DH, offset, cfg):
    if cfg.positions != "rope" or offset == 0:
        return w_DH
    return rotate(w_DH[:, None], np.full(len(w_DH), offset), cfg.rope_theta)[:, 0]


@pytest.mark.parametrize("fields", CONFIGS)
def test_copying_is_that_of_the_matrix_over_the_vocabulary(fields):
    cfg, params = make(**fields)
    heads, embed, unembed = whole_matrices(cfg, params)
    score_LN, _ = circuits.copying_eigenvalues(params, cfg)
    assert score_LN.shape == (3, 4)
    for at in np.ndindex(3, 4):
        if at not in heads:
            assert np.isnan(score_LN[at])
            continue
        _, _, v, o = heads[at]
        eigenvalues = np.linalg.eigvals(embed @ v @ o @ unembed)
        assert score_LN[at] == pytest.approx(eigenvalues.real.sum() / np.abs(eigenvalues).sum(), abs=1e-6), at


def test_a_head_that_copies_scores_1_one_that_suppresses_minus_1_and_a_zero_head_nothing():
    cfg, params = make(num_layers=1, num_kv_heads=4, norm="none", tied=True, head_dim=16)
    params["layers"]["layer_00"]["attention"] |= {
        "wv_DKH": np.stack([np.eye(16)] * 4, axis=1), "wo_NHD": np.stack([np.eye(16), -np.eye(16), np.zeros((16, 16)),
                                                                        np.diag([1.0, -1.0] * 8)]),
    }  # fmt: skip
    params["embed_VD"] = np.eye(11, 16)
    score_LN, _ = circuits.copying_eigenvalues(params, cfg)
    np.testing.assert_allclose(score_LN[0], [1, -1, np.nan, 1 / 11], atol=1e-9)  # 6 tokens raised, 5 lowered


@pytest.mark.parametrize(("H", "expected"), [(8, 0.23), (16, 0.11), (32, 0.05)])
def test_chance_sd_of_copying_is_what_the_definitions_print(H, expected):
    rng = np.random.default_rng(1)
    loop = rng.normal(size=(4 * H, 64)) @ rng.normal(size=(64, 4 * H))
    assert circuits.copying_chance_sd(loop, H, draws=300) == pytest.approx(expected, abs=0.02)


def test_random_heads_spread_as_the_chance_sd_says():
    cfg, params = make(num_layers=12, num_kv_heads=8, num_heads=8, d_model=32, norm="layer", vocab_size=40)
    score_LN, sd = circuits.copying_eigenvalues(params, cfg)
    assert score_LN.std() == pytest.approx(sd, rel=0.2) and abs(score_LN.mean()) < 4 * sd / np.sqrt(96)


@pytest.mark.parametrize("fields", CONFIGS)
def test_composition_is_the_frobenius_ratio_of_whole_matrices(fields):
    cfg, params = make(**fields)
    heads, _, _ = whole_matrices(cfg, params)
    found = circuits.composition(params, cfg, OFFSETS, rotations=2)
    rope = cfg.positions == "rope"
    assert set(found) == {"q", "k", "v"} | ({"q_offsets", "k_offsets"} if rope else set())
    assert {name for name, c in found.items() if c.approximate} == (set(found) - {"v"} if cfg.qk_norm else set())
    baseline = (cfg.d_model - (cfg.norm == "layer")) ** -0.5
    norm = np.linalg.norm
    for at in np.ndindex(3, 4, 3, 4):
        first, second = at[:2], at[2:]
        if first not in heads or second not in heads or first[0] >= second[0]:
            assert all(np.isnan(c.score_LNLN[at]) and np.isnan(c.z_LNLN[at]) for c in found.values()), at
            continue
        ov = heads[first][2] @ heads[first][3]
        q, k, v, o = heads[second]
        for name, c in found.items():
            ratios = []
            for offset in OFFSETS if name.endswith("_offsets") else (0,):
                qk = turned(q, offset, cfg) @ k.T
                w = {"q": qk, "k": qk.T, "v": v @ o}[name[0]]
                ratios.append(norm(ov @ w) / (norm(ov) * norm(w)))
            assert c.score_LNLN[at] == pytest.approx(np.mean(ratios) - baseline, abs=1e-7), (name, at)
            assert c.baseline == pytest.approx(baseline)


def test_z_is_against_random_rotations_of_the_whole_residual_stream():
    cfg, params = make(num_layers=2, num_kv_heads=2, norm="layer", positions="rope")
    found = circuits.composition(params, cfg, OFFSETS, rotations=400)
    heads, _, _ = whole_matrices(cfg, params)
    ov = heads[0, 1][2] @ heads[0, 1][3]
    q, k, v, o = heads[1, 2]
    beside = np.linalg.svd(np.eye(16) - 1 / 16)[0][:, :15]
    rng = np.random.default_rng(5)
    norm = np.linalg.norm
    ratios = {"k": [], "v": [], "q_offsets": []}
    for _ in range(1500):
        frame, corner = np.linalg.qr(rng.normal(size=(15, 15)))
        moved = ov @ beside @ (frame * np.sign(np.diag(corner))) @ beside.T / norm(ov)
        ratios["k"].append(norm(moved @ k @ q.T) / norm(k @ q.T))
        ratios["v"].append(norm(moved @ v @ o) / norm(v @ o))
        turns = [turned(q, offset, cfg) @ k.T for offset in OFFSETS]
        ratios["q_offsets"].append(np.mean([norm(moved @ w) / norm(w) for w in turns]))
    for name, values in ratios.items():
        c = found[name]
        expected = (c.score_LNLN[0, 1, 1, 2] + c.baseline - np.mean(values)) / np.std(values)
        assert c.z_LNLN[0, 1, 1, 2] == pytest.approx(expected, abs=0.2 + 0.12 * abs(expected)), name


@pytest.mark.parametrize(("rank", "sd"), [(16, 0.006), (2, 0.039)])
def test_random_heads_have_the_baseline_and_the_published_spread(rank, sd):
    cfg, params = make(num_layers=3, d_model=64, num_heads=8, num_kv_heads=8, head_dim=rank, norm="none")
    found = circuits.composition(params, cfg)["k"]
    score, z = (x[~np.isnan(x)] for x in (found.score_LNLN, found.z_LNLN))
    assert found.baseline == 1 / 8 and len(score) == 3 * 64
    assert abs(score.mean()) < sd and score.std() == pytest.approx(sd, rel=0.25)
    assert abs(z.mean()) < 0.5 and z.std() == pytest.approx(1, abs=0.25)


def test_a_head_that_reads_only_what_another_writes_stands_out_by_the_right_letter():
    cfg, params = make(num_layers=2, d_model=32, num_heads=4, num_kv_heads=4, norm="none", positions="learned")
    first, second = (params["layers"][f"layer_0{i}"]["attention"] for i in range(2))
    second["wk_DKH"][:, 3] = first["wo_NHD"][1].T  # head 1.3 takes its keys from what 0.1 writes
    found = circuits.composition(params, cfg)
    assert np.unravel_index(np.nanargmax(found["k"].score_LNLN), (2, 4, 2, 4)) == (0, 1, 1, 3)
    assert found["k"].z_LNLN[0, 1, 1, 3] > 5
    assert max(np.nanmax(found["q"].z_LNLN), np.nanmax(found["v"].z_LNLN)) < 4


def test_what_layer_norm_hides_counts_nowhere():
    cfg, params = make(norm="layer", num_kv_heads=2, positions="rope")
    changed = copy.deepcopy(params)
    for p in changed["layers"].values():
        for name in ("wq_DNH", "wk_DKH", "wv_DKH"):
            p["attention"][name] += 7 / p["attention_norm"]["scale_D"][:, None, None]
        p["attention"]["wo_NHD"] += 5.0
    changed["embed_VD"] += 3.0
    changed["unembed_DV"] += 2 / changed["final_norm"]["scale_D"][:, None]
    previous_LN = np.full((3, 4), 0.5)
    before, after = (circuits.composition(p, cfg, rotations=2) for p in (params, changed))
    for name in before:
        np.testing.assert_allclose(after[name].score_LNLN, before[name].score_LNLN, atol=1e-4)
    np.testing.assert_allclose(circuits.copying_eigenvalues(changed, cfg)[0],
                               circuits.copying_eigenvalues(params, cfg)[0], atol=1e-3)  # fmt: skip
    np.testing.assert_allclose(circuits.qk_trace(changed, cfg, previous_LN)[1],
                               circuits.qk_trace(params, cfg, previous_LN)[1], atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("fields", CONFIGS)
def test_qk_trace_is_that_of_the_matrix_over_the_vocabulary(fields):
    cfg, params = make(**fields)
    heads, embed, _ = whole_matrices(cfg, params)
    score_LN = np.random.default_rng(2).uniform(size=(3, 4))
    for at in set(np.ndindex(3, 4)) - set(heads):
        score_LN[at] = np.nan
    trace_LN, share_LN = circuits.qk_trace(params, cfg, score_LN, OFFSETS)
    for at in np.ndindex(3, 4):
        if at not in heads or at[0] == 0:
            assert np.isnan(trace_LN[at]) and np.isnan(share_LN[at])
            continue
        before = sum(score_LN[e] * heads[e][2] @ heads[e][3] for e in heads if e[0] < at[0])
        q, k, _, _ = heads[at]
        qk = np.mean([turned(q, offset, cfg) @ k.T for offset in OFFSETS], axis=0)
        whole = embed @ qk @ (embed @ before).T
        moduli = np.abs(np.linalg.eigvals(whole)).sum()
        assert trace_LN[at] == pytest.approx(np.trace(whole), rel=1e-8)
        assert share_LN[at] == pytest.approx(np.trace(whole) / moduli, abs=1e-5)


def test_qk_trace_of_a_hand_made_induction_circuit_is_1_and_wrong_shapes_are_named():
    cfg, params = make(num_layers=2, num_kv_heads=4, norm="none", positions="learned", head_dim=16)
    eye_N = np.stack([np.eye(16)] * 4)
    for p in params["layers"].values():
        p["attention"] |= {"wq_DNH": eye_N.swapaxes(0, 1), "wk_DKH": eye_N.swapaxes(0, 1),
                           "wv_DKH": eye_N.swapaxes(0, 1), "wo_NHD": eye_N}  # fmt: skip
    params["embed_VD"] = np.eye(11, 16)
    trace_LN, share_LN = circuits.qk_trace(params, cfg, np.array([[0.9, 0, 0, 0], [0, 0, 0, 0]]))
    np.testing.assert_allclose(trace_LN, [[np.nan] * 4, [9.9] * 4])
    np.testing.assert_allclose(share_LN, [[np.nan] * 4, [1.0] * 4])
    with pytest.raises(ConfigError, match=r"shape \(4,\): allowed is \(2, 4\)"):
        circuits.qk_trace(params, cfg, np.ones(4))
