"""One edge cut: against a NumPy forward in which one head alone reads another residual stream, and by hand."""
import jax
import numpy as np
import pytest

from mha_jax.model import transformer
from mha_jax.pruning import ablation, edges, sets
from mha_jax.pruning.edges import Edge
from tests.model import oracle
from tests.pruning.test_ablation import T, rows, subject, token_loss

pytestmark = pytest.mark.usefixtures("quick_module")
MODELS = {
    "MHA": dict(K=4),
    "GQA, learned positions, sink, MLP": dict(K=2, positions="learned", sink=True, mlp="gelu"),
    "MQA, shortformer, all extras": dict(K=1, positions="shortformer", smeared_key=True, qk_norm=True, window=3,
                                         norm="rms"),
    "GQA with heads gone": dict(K=2, sink=True, kept_heads=((1, 3), (2, 3), (0, 1, 2))),
}  # fmt: skip
SOURCES, TARGETS = [(0, 1), (0, 3), (1, 2)], [(1, 3), (2, 2)]


def blocks(s, B=4):
    """Two repeat lengths of rows as long as those of `rows`: nothing is compiled a second time."""
    tokens_BT = rows(s, 5, B)[:, :-1]
    return np.stack([tokens_BT[:, np.arange(T) % period] for period in (2, 3)])


def numpy_cut(s, tokens_BT, edge=None, target=(1, 3)):
    """(logits_BTV, pattern_BTS of the target) in float64 with the edge cut, if any."""
    cfg, params = s.cfg, jax.tree.map(lambda x: np.asarray(x, np.float64), s.params)
    B = len(tokens_BT)
    heads = cfg.kept_heads or (range(cfg.num_heads),) * cfg.num_layers
    group = cfg.num_heads // cfg.num_kv_heads
    positions = np.broadcast_to(np.arange(T), (B, T))
    table = params["positions_PD"][positions] if cfg.positions in ("learned", "shortformer") else None
    _, whole, residuals = oracle.forward(cfg, s.params, tokens_BT)
    layer, n = edge.target if edge else target
    written = np.zeros_like(residuals[0])
    if edge:
        place = list(heads[edge.source[0]]).index(edge.source[1])
        kernel_HD = params["layers"][transformer.layer_key(edge.source[0])]["attention"]["wo_NHD"][place]
        written = whole[edge.source[0]]["z"][:, :, place] @ kernel_HD

    def attend(i, x):
        p = params["layers"][transformer.layer_key(i)]
        return oracle.attention_layer(cfg, p["attention"], i, oracle.norm(cfg, p.get("attention_norm"), x), positions,
                                      None, table)  # fmt: skip

    x = residuals[layer]
    for i in range(layer, cfg.num_layers):
        p = params["layers"][transformer.layer_key(i)]
        out, found = attend(i, x)
        if i == layer:
            cut = attend(i, x - written)[1]
            here, kv = list(heads[i]).index(n), sorted({m // group for m in heads[i]}).index(n // group)
            q, k, v = ((cut if edge and edge.into == name else found)[name[0]][:, :, [at]]
                       for name, at in (("query", here), ("key", kv), ("value", kv)))  # fmt: skip
            sink = p["attention"]["sink_N"][[here]] if cfg.sink else None
            z, pattern = oracle.attend(q, k, v, np.stack([oracle.seen(T, None, cfg.window)] * B), sink)
            out = out + (z[:, :, 0] - found["z"][:, :, here]) @ p["attention"]["wo_NHD"][here]
        x = x + out
        if cfg.mlp != "none":
            x = x + oracle.mlp(cfg, p["mlp"], oracle.norm(cfg, p["mlp_norm"], x))
    return oracle.norm(cfg, params["final_norm"], x) @ params["unembed_DV"], pattern[:, 0]


def prefix_matching(tokens_BT, pattern_BTS):
    """Attention on what followed earlier copies of the query's token, over queries that have an earlier copy."""
    masses = []
    for tokens, pattern_TS in zip(tokens_BT.tolist(), pattern_BTS, strict=True):
        for t in range(T):
            after = [j + 1 for j in range(t) if tokens[j] == tokens[t] and j + 1 < t]
            masses += [pattern_TS[t, after].sum()] if after else []
    return np.mean(masses)


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_is_what_numpy_makes_of_it(name):
    s = subject(**MODELS[name])
    tokens, repeats = rows(s), blocks(s)
    found = edges.between(SOURCES, TARGETS if name == "MHA" else TARGETS[:1])
    cuts = edges.cut_edges(s, tokens, found, repeats)
    np.testing.assert_allclose(cuts.whole_RT, ablation.whole_losses(s, tokens), atol=1e-5)
    for e, edge in enumerate(found):
        wanted = token_loss(numpy_cut(s, tokens[:, :-1], edge)[0], tokens[:, 1:])
        effect = np.abs(wanted - cuts.whole_RT).max()
        assert np.abs(cuts.loss_ERT[e] - wanted).max() < min(3e-5, effect / 4), (edge, effect)
        for q, tokens_BT in enumerate(repeats):
            for scores, cut in ((cuts.prefix_EQ, edge), (cuts.whole_EQ, None)):
                wanted = prefix_matching(tokens_BT, numpy_cut(s, tokens_BT, cut, edge.target)[1])
                assert scores[e, q] == pytest.approx(wanted, abs=1e-5), (edge, cut)
        same = cuts.prefix_EQ[e] == cuts.whole_EQ[e]
        assert (same if edge.into == "value" else ~same).all(), "values are not what a head looks at"


@pytest.mark.parametrize("K", [4, 2, 1])
def test_a_head_that_reads_nothing_but_the_source(K):
    """Without its queries or its keys it attends evenly, without its values it is silent."""
    s = subject(K, num_layers=2, norm="none", positions="none", bias=False)
    low, high = (s.params["layers"][transformer.layer_key(i)]["attention"] for i in range(2))
    s.params["embed_VD"][:, 8:] = 0
    low["wo_NHD"][:, :, :8], low["wo_NHD"][[0, 1, 3]] = 0, 0  # head 2 alone writes, and to a place of its own
    for name in ("wq_DNH", "wk_DKH", "wv_DKH"):
        high[name][:8] = 0
    tokens, repeats, target = rows(s), blocks(s), (1, 1)
    query, key, value, other = (Edge((0, n), target, into) for n, into in
                                [(2, "query"), (2, "key"), (2, "value"), (0, "value")])  # fmt: skip
    cuts = edges.cut_edges(s, tokens, [query, key, value, other], repeats)
    for e, replacement in enumerate(("uniform", "uniform", "zero")):
        wanted = ablation.sweep(s, tokens, sets.mask(s, [(target,)]), ablation.Way(replacement, "live"))
        np.testing.assert_allclose(cuts.loss_ERT[e], wanted.loss_PSRT[0, 0], atol=1e-5)
        assert np.abs(cuts.loss_ERT[e] - cuts.whole_RT).max() > 2e-5
    chance = [prefix_matching(x, np.stack([oracle.seen(T) / np.arange(1, T + 1)[:, None]] * 4)) for x in repeats]
    np.testing.assert_allclose(cuts.prefix_EQ[:2], [chance, chance], atol=1e-6)
    np.testing.assert_array_equal(cuts.loss_ERT[3], cuts.whole_RT)  # a source without an output kernel
    np.testing.assert_array_equal(cuts.prefix_EQ[2:], cuts.whole_EQ[2:])


@pytest.mark.parametrize("K", [2, 1])
def test_other_heads_of_the_group_keep_their_keys_and_values(K):
    """Were they to lose the edge as well, the loss would change though the target writes nothing."""
    s = subject(K, num_layers=2)
    s.params["layers"]["layer_01"]["attention"]["wo_NHD"][3] = 0
    found = edges.between([(0, 1)], [(1, 3), (1, 2)])
    cuts = edges.cut_edges(s, rows(s), found, blocks(s))
    for e, edge in enumerate(found):
        assert (np.abs(cuts.loss_ERT[e] - cuts.whole_RT).max() > 2e-5) == (edge.target == (1, 2)), edge
        assert edge.target == (1, 2) or (cuts.loss_ERT[e] == cuts.whole_RT).all()


def test_rows_in_chunks_are_the_rows_at_once(monkeypatch):
    s = subject(2, num_layers=2)
    tokens, repeats, done = rows(s), blocks(s, 2), []
    found = edges.between([(0, 0)], [(1, 1)])
    wanted = edges.cut_edges(s, tokens, found, repeats)
    monkeypatch.setattr("mha_jax.probes.subject.ROWS", 2)
    cuts = edges.cut_edges(s, tokens, found, repeats, done.append)
    np.testing.assert_allclose(cuts.loss_ERT, wanted.loss_ERT, atol=1e-6)
    np.testing.assert_allclose(cuts.whole_RT, wanted.whole_RT, atol=1e-6)
    assert done == [2] * 3 * (2 + len(repeats))  # rows of each edge: two chunks, then every repeat length


def test_edges_go_upwards_from_every_lower_head():
    found = edges.between([(0, 1), (1, 0), (1, 1)], [(1, 0), (2, 3)])
    pairs = [((0, 1), (1, 0)), ((0, 1), (2, 3)), ((1, 0), (2, 3)), ((1, 1), (2, 3))]
    assert found == [Edge(*pair, into) for pair in pairs for into in ("query", "key", "value")]


@pytest.mark.parametrize(("edge", "message"), [
    (Edge((1, 2), (1, 3), "key"), "must lie in a lower layer"),
    (Edge((2, 0), (1, 3), "key"), "must lie in a lower layer"),
    (Edge((0, 1), (1, 3), "keys"), "into 'keys': allowed are query, key, value"),
    (Edge((0, 0), (1, 3), "key"), r"head \(0, 0\) is not in this model"),
    (Edge((0, 1), (1, 1), "key"), r"head \(1, 1\) is not in this model"),
    (Edge((0, 1), (1, -1), "key"), r"head \(1, -1\) is not in this model"),
])  # fmt: skip
def test_edges_that_cannot_be_cut(edge, message):
    s = subject(**MODELS["GQA with heads gone"])
    with pytest.raises(ValueError, match=message):
        edges.cut_edges(s, rows(s), [edge], blocks(s))
