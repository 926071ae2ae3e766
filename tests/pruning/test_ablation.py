"""Every replacement and downstream choice against a NumPy forward that is changed by hand, for MHA, GQA and MQA."""
import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from mha_jax.model import transformer
from mha_jax.model.interventions import Interventions
from mha_jax.probes import behaviour, induction
from mha_jax.probes.subject import Subject
from mha_jax.pruning import ablation, sets
from tests.model import oracle

pytestmark = pytest.mark.usefixtures("quick_module")
WAYS = list(itertools.product(ablation.REPLACEMENTS, ablation.DOWNSTREAM))
L, N, T = 3, 4, 6


def subject(K=4, devices=1, **fields):
    cfg = oracle.model_config(**dict(num_layers=L, d_model=16, num_heads=N, num_kv_heads=K, bias=True) | fields)
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), ("data", "fsdp", "tensor"),
                axis_types=(AxisType.Auto,) * 3)  # fmt: skip
    return Subject(cfg, oracle.random_params(cfg, 0), mesh)


def rows(s, seed=1, B=4):
    return oracle.random_tokens(s.cfg, seed, B, T + 1)


def token_loss(logits, targets):
    logits = logits - logits.max(-1, keepdims=True)
    return np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]


def changed(s, tokens_RU, heads, how, what, value=None):
    """loss_RT with `heads` ablated, layer by layer in float64; value [layer][b, t, n] -> z of mean and resample."""
    cfg, params = s.cfg, jax.tree.map(lambda x: np.asarray(x, np.float64), s.params)
    places = np.broadcast_to(np.arange(T), (len(tokens_RU), T))
    whole = oracle.forward(cfg, s.params, tokens_RU[:, :-1])[1]
    x = params["embed_VD"][tokens_RU[:, :-1]]
    if cfg.positions == "learned":
        x = x + params["positions_PD"][places]
    for layer in range(cfg.num_layers):
        p = params["layers"][transformer.layer_key(layer)]
        normed = oracle.norm(cfg, p["attention_norm"], x)
        found = oracle.attention_layer(cfg, p["attention"], layer, normed, places, None, None)[1]
        here = [n for i, n in heads if i == layer]
        pattern = (whole if what == "frozen" else {layer: found})[layer]["pattern"].copy()
        if how == "uniform":
            seen_TS = oracle.seen(T, None, cfg.window)
            pattern[:, here] = seen_TS / seen_TS.sum(-1, keepdims=True)
        if how == "tie" and here:
            pattern[:] = pattern[:, here]
        v = np.repeat(found["v"], cfg.num_heads // cfg.num_kv_heads, axis=2)
        z = np.einsum("bnts,bsnh->btnh", pattern, v)
        for n in here if how in ("zero", "mean", "resample") else ():
            z[:, :, n] = 0 if how == "zero" else value[layer][:, :, n]
        x = x + z.reshape(*x.shape[:2], -1) @ p["attention"]["wo_NHD"].reshape(-1, cfg.d_model) + p["attention"]["bo_D"]
        if cfg.mlp != "none":
            x = x + oracle.mlp(cfg, p["mlp"], oracle.norm(cfg, p["mlp_norm"], x))
    return token_loss(oracle.norm(cfg, params["final_norm"], x) @ params["unembed_DV"], tokens_RU[:, 1:])


def z_of(s, tokens_RU):
    return [f["z"] for f in oracle.forward(s.cfg, s.params, tokens_RU[:, :-1])[1]]


@pytest.mark.parametrize(("K", "way"), [
    pytest.param(k, w, marks=[pytest.mark.slow] * (k != 2 and w not in (("zero", "live"), ("tie", "frozen"))))
    for k in (4, 2, 1) for w in WAYS if k == 2 or w[0] in ("zero", "tie")
])  # fmt: skip
def test_every_way_is_what_numpy_makes_of_it(K, way):
    s = subject(K)
    tokens, others = rows(s), rows(s, 2, 6)
    chosen = [((1, 2),)] if way[0] == "tie" else [((0, 1),), ((1, 2),), ((0, 3), (2, 0), (2, 1)), ((2, 3),)]
    value_P, wanted_P = None, [None]
    if way[0] == "mean":
        value_P = ablation.mean_values(s, others)
        wanted_P = [[z.mean(0, keepdims=True) for z in z_of(s, others)]]
    elif way[0] == "resample":
        value_P = ablation.resampled_values(s, tokens, 3, permutations=2)
        rng = np.random.default_rng(3)
        orders = [ablation.one_cycle(rng, len(tokens)) for _ in range(2)]
        wanted_P = [[z[order] for z in z_of(s, tokens)] for order in orders]
    found = ablation.sweep(s, tokens, sets.mask(s, chosen), ablation.Way(*way, value_P))
    np.testing.assert_allclose(found.whole_RT, changed(s, tokens, (), "zero", "live"), atol=2e-5)
    for p, value in enumerate(wanted_P):
        for i, heads in enumerate(chosen):
            wanted = changed(s, tokens, heads, *way, value)
            np.testing.assert_allclose(found.loss_PSRT[p, i], wanted, atol=3e-5, err_msg=f"{heads} {p}")
            assert np.abs(wanted - found.whole_RT).max() > 1e-3, "every ablation changes something"


@pytest.mark.parametrize("way", [("zero", "frozen"), ("uniform", "live"), ("tie", "live")])
def test_learned_positions_an_mlp_a_window_and_sinks(way):
    """A set above layer 0 enters with positions already in its residual stream, and evenly is over what may be seen."""
    s = subject(2, num_layers=2, positions="learned", mlp="gelu", window=3, sink=True)
    tokens, chosen = rows(s), [((0, 1),), ((1, 2),)]
    found = ablation.sweep(s, tokens, sets.mask(s, chosen), ablation.Way(*way))
    for i, heads in enumerate(chosen):
        wanted = changed(s, tokens, heads, *way)
        np.testing.assert_allclose(found.loss_PSRT[0, i], wanted, atol=3e-5)
        assert np.abs(wanted - found.whole_RT).max() > 1e-3


def test_frozen_zero_takes_away_the_paths_through_the_head():
    """With patterns held and no norm the logits are a sum over paths; those through the head are the difference."""
    s = subject(2, num_layers=2, norm="none", bias=False)
    tokens = rows(s)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), s.params)
    layers = [params["layers"][f"layer_0{i}"]["attention"] for i in range(2)]
    pattern = [f["pattern"] for f in oracle.forward(s.cfg, s.params, tokens[:, :-1])[1]]

    def through(x, layer, n):
        return pattern[layer][:, n] @ x @ layers[layer]["wv_DKH"][:, n // 2] @ layers[layer]["wo_NHD"][n]

    embedded = params["embed_VD"][tokens[:, :-1]]
    one = {(i, n): through(embedded, i, n) for i in range(2) for n in range(N)}
    two = {(n, m): through(one[0, n], 1, m) for n in range(N) for m in range(N)}
    total = embedded + sum(one.values()) + sum(two.values())
    gone = {(0, 1): one[0, 1] + sum(two[1, m] for m in range(N)), (1, 3): one[1, 3] + sum(two[n, 3] for n in range(N))}
    found = ablation.sweep(s, tokens, sets.mask(s, [(h,) for h in gone]), ablation.Way("zero", "frozen"))
    for i, paths in enumerate(gone.values()):
        wanted = token_loss((total - paths) @ params["unembed_DV"], tokens[:, 1:])
        np.testing.assert_allclose(found.loss_PSRT[0, i], wanted, atol=3e-5)


@pytest.mark.parametrize("how", ["mean", "resample"])
def test_rows_in_chunks_over_devices_are_the_rows_at_once(how, monkeypatch):
    """Five rows: two chunks over two devices and one row left over, which lies on both."""
    s, tokens = subject(2, num_layers=2), rows(subject(2), 1, 5)
    values = {"mean": ablation.mean_values, "resample": lambda s, t: ablation.resampled_values(s, t, 0, 2)}[how]
    at_once, chosen = values(s, tokens), sets.mask(s, [((0, 1),)])
    wanted = ablation.sweep(s, tokens, chosen, ablation.Way(how, "live", at_once))
    monkeypatch.setattr("mha_jax.probes.subject.ROWS", 2)
    two, done = subject(2, 2, num_layers=2), []
    in_chunks = values(two, tokens)
    np.testing.assert_allclose(in_chunks, at_once, atol=1e-5)
    found = ablation.sweep(two, tokens, chosen, ablation.Way(how, "live", in_chunks), progress=done.append)
    np.testing.assert_allclose(found.whole_RT, wanted.whole_RT, atol=1e-5)
    np.testing.assert_allclose(found.loss_PSRT, wanted.loss_PSRT, atol=2e-5)
    assert done == [rows for rows in (2, 2, 1) for _ in range(len(at_once))]


def test_no_head_is_no_change_and_live_is_frozen_in_the_last_layer():
    s = subject(2)
    tokens, last = rows(s), sets.mask(s, [(), ((2, 1),), ((2, 0), (2, 3))])
    live, frozen = (ablation.sweep(s, tokens, last, ablation.Way("zero", what)) for what in ablation.DOWNSTREAM)
    np.testing.assert_allclose(live.loss_PSRT[0, 0], live.whole_RT, atol=1e-6)
    np.testing.assert_allclose(live.loss_PSRT, frozen.loss_PSRT, atol=2e-6)


def test_a_tied_layer_has_one_pattern():
    s = subject(1)
    tokens = rows(s)[:, :-1]
    pattern = s.forward(tokens, capture=("pattern",))[1].pattern_LBNTS
    way = ablation.Way("tie", "live")
    change = ablation.interventions(way, sets.mask(s, [((1, 3),)])[0], None, pattern, None)
    tied = s.forward(tokens, capture=("pattern",), interventions=change)[1].pattern_LBNTS
    for n in range(N):
        np.testing.assert_array_equal(tied[1, :, n], pattern[1, :, 3])
    apart = behaviour.disagreement_cosine(tied).all_L
    assert float(apart[1]) == 0 and float(apart[0]) > 0 and float(apart[2]) > 0


@pytest.mark.parametrize("way", [w for w in WAYS if w[1] == "live"])
def test_prefix_matching_of_the_others_is_measured_under_every_live_way(way):
    s = subject(2)
    tokens, blocks = rows(s), np.tile(rows(s, 5, 2)[:, :3], (1, 2))[None]
    value = {"mean": ablation.mean_values, "resample": lambda s, t: ablation.resampled_values(s, t, 0)}.get(way[0])
    chosen = sets.mask(s, [((0, 1),), ((1, 0),)])
    found = ablation.sweep(s, tokens, chosen, ablation.Way(*way, value and value(s, tokens)), repeats_QRT=blocks)
    empty = ablation.sweep(s, tokens, sets.mask(s, [()]), ablation.Way("zero", "live"), repeats_QRT=blocks)
    whole_LN = empty.prefix_SQLN[0, 0]
    assert found.prefix_SQLN.shape == (2, 1, L, N)
    np.testing.assert_allclose(found.prefix_SQLN[1, 0, 0], whole_LN[0], atol=1e-6)  # below the set nothing moves
    assert np.abs(found.prefix_SQLN[0, 0, 1:] - whole_LN[1:]).max() > 1e-4  # above it everything may
    frozen = ablation.sweep(s, tokens, chosen, ablation.Way("zero", "frozen"), repeats_QRT=blocks)
    assert frozen.prefix_SQLN is None


def test_prefix_matching_under_resampling_is_the_mean_over_permutations():
    s = subject(2)
    tokens, blocks = rows(s), np.tile(rows(s, 5, 4)[:, :3], (1, 2))
    way = ablation.Way("resample", "live", ablation.resampled_values(s, tokens, 0, 3))
    set_SLN = sets.mask(s, [((0, 1),)])
    found = ablation.sweep(s, tokens, set_SLN, way, repeats_QRT=blocks[None], seed=7).prefix_SQLN[0, 0]
    rng, z = np.random.default_rng(7), np.stack(z_of(s, np.pad(blocks, ((0, 0), (0, 1)))))
    scores = []
    for order in [ablation.one_cycle(rng, 4) for _ in range(3)]:
        change = Interventions(replace_LN=set_SLN[0], value_LBTNH=z[:, order].astype(np.float32))
        pattern = s.forward(blocks, capture=("pattern",), interventions=change)[1].pattern_LBNTS
        scores.append(np.asarray(induction.target_mass(pattern, induction.prefix_targets(blocks))))
    np.testing.assert_allclose(found, np.mean(scores, 0), atol=2e-5)
    assert np.ptp(scores, axis=0).max() > 1e-3, "permutations differ"


def test_resampling_leaves_nothing_in_place_and_takes_one_source_for_all_heads():
    for n in (2, 3, 7):
        order = ablation.one_cycle(np.random.default_rng(n), n)
        assert sorted(order) == list(range(n)) and (order != np.arange(n)).all()
    s = subject(4)
    tokens = rows(s)
    value_PLRTNH, z = ablation.resampled_values(s, tokens, 0, 5), np.stack(z_of(s, tokens))
    for p in range(5):
        source = [int(np.abs(z - value_PLRTNH[p][:, i : i + 1]).sum((0, 2, 3, 4)).argmin()) for i in range(4)]
        np.testing.assert_allclose(value_PLRTNH[p], z[:, source], atol=1e-5)
        assert (np.array(source) != np.arange(4)).all()


@pytest.mark.parametrize("K", [2, 1])
def test_fc_27_other_heads_of_the_group_read_exactly_what_they_read(K):
    s = subject(K, num_layers=1, num_heads=8, d_model=32)
    tokens = rows(s)[:, :-1]
    whole = s.forward(tokens, capture=("z",))[1].z_LBTNH
    gone = Interventions(gate_LN=1.0 - sets.mask(s, [((0, 5),)])[0])
    z = s.forward(tokens, capture=("z",), interventions=gone)[1].z_LBTNH
    np.testing.assert_array_equal(z[0][:, :, [4, 6, 7]], whole[0][:, :, [4, 6, 7]])
    assert (np.asarray(z)[0, :, :, 5] == 0).all() and (np.asarray(whole)[0, :, :, 5] != 0).any()


def test_fc_26_ablating_a_head_is_zeroing_its_rows_of_the_output_kernel():
    s = subject(2)
    tokens = rows(s)
    cut = jax.tree.map(np.array, s.params)
    cut["layers"]["layer_01"]["attention"]["wo_NHD"][2] = 0
    found = ablation.sweep(s, tokens, sets.mask(s, [((1, 2),)]), ablation.Way("zero", "live")).loss_PSRT[0, 0]
    np.testing.assert_allclose(found, ablation.whole_losses(dataclasses.replace(s, params=cut), tokens), atol=1e-6)


def test_a_model_with_heads_gone_is_swept_by_its_original_numbers():
    s = subject(2, kept_heads=((0, 2), (), (1, 2, 3)))
    tokens, blocks = rows(s), np.tile(rows(s, 5, 2)[:, :3], (1, 2))[None]
    for way in WAYS[:2]:
        found = ablation.sweep(s, tokens, sets.mask(s, [((2, 1),), ((0, 2),)]), ablation.Way(*way), repeats_QRT=blocks)
        assert np.isfinite(found.loss_PSRT).all()
        assert (np.abs(found.loss_PSRT[0] - found.whole_RT).max((1, 2)) > 1e-3).all()
    gone_LN = ~ablation.present(s)
    found = ablation.sweep(s, tokens, sets.mask(s, [((2, 1),)]), ablation.Way("zero", "live"), repeats_QRT=blocks)
    np.testing.assert_array_equal(np.isnan(found.prefix_SQLN[0, 0]), gone_LN)


def test_tie_takes_one_head():
    s = subject(2)
    with pytest.raises(ValueError, match="'tie': a set is the one head"):
        ablation.sweep(s, rows(s), sets.mask(s, [((0, 0), (0, 1))]), ablation.Way("tie", "live"))


def test_chunks_of_one_start_have_one_shape():
    masks = np.zeros((6, 3, 2), bool)
    masks[[0, 1, 2], 1, 0], masks[3, 0, 1], masks[4, 2, 0] = True, True, True
    found = [(start, list(chosen)) for start, chosen in ablation.by_start(masks, 2)]
    assert found == [(0, [3]), (1, [0, 1]), (1, [2, 2]), (2, [4, 5])]
