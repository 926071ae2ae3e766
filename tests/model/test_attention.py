"""The parts of attention against values worked out by hand, and what attention may and may not see."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax.model import attention, transformer
from mha_jax.training import step
from tests.model import oracle

IMPLEMENTATIONS = ("einsum", "blockwise", "fused")


@pytest.fixture(autouse=True, scope="module")
def short_blocks():
    """Blocks of 6 queries, so that short rows are cut into several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", 6)
        yield


static = dict(static_argnums=0, static_argnames=("capture", "implementation"))
quick, plain = (jit(transformer.forward, **static) for jit in (oracle.quick_jit, oracle.plain_jit))
attend = oracle.quick_jit(attention.attend, static_argnames=("implementation", "need_pattern"))


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_mask_by_hand():
    """Segments 0 (padding), 1, 1, 2, 2, 2 with positions from 0 in each; window 2 sees itself and one before."""
    positions, segments = jnp.array([0, 0, 1, 0, 1, 2]), jnp.array([0, 1, 1, 2, 2, 2])
    rows = ["......", ".x....", ".xx...", "...x..", "...xx.", "...xxx"]
    whole = np.array([[c == "x" for c in row] for row in rows])
    np.testing.assert_array_equal(attention.mask(positions, positions, segments, segments), whole)
    narrow = whole.copy()
    narrow[5, 3] = False
    np.testing.assert_array_equal(attention.mask(positions, positions, segments, segments, 2), narrow)
    # One query of a longer text, as in decoding: position 4 of 6 keys.
    np.testing.assert_array_equal(attention.mask(jnp.array([4]), jnp.arange(6), window=3), [[0, 0, 1, 1, 1, 0]])
    batched = attention.mask(jnp.arange(3)[None], jnp.arange(3)[None], jnp.ones((2, 3)), jnp.ones((2, 3)))
    assert batched.shape == (2, 3, 3) and (batched == np.tril(np.ones((3, 3)))).all()


def test_softmax_by_hand():
    scores, seen = jnp.log(jnp.array([[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]])), jnp.array([[1, 1, 0], [0, 0, 0]]) > 0
    np.testing.assert_allclose(attention.softmax(scores, seen), [[1 / 3, 2 / 3, 0], [0, 0, 0]], rtol=1e-6)
    # A sink of logit ln 3 beside weights 1 and 2 takes half; where nothing is seen it takes everything.
    np.testing.assert_allclose(
        attention.softmax(scores, seen, jnp.log(3.0)[None]), [[1 / 6, 1 / 3, 0], [0, 0, 0]], rtol=1e-6
    )


def test_softmax_of_unseen_rows_has_finite_gradients():
    def total(scores):
        return (attention.softmax(scores, jnp.array([[True, True], [False, False]])) * jnp.array([1.0, 3.0])).sum()

    gradient = jax.grad(total)(jnp.array([[0.0, 0.0], [7.0, -jnp.inf]]))
    np.testing.assert_allclose(gradient, [[-0.5, 0.5], [0, 0]], atol=1e-7)


@pytest.mark.parametrize(("score", "sink"), [(0.0, 200.0), (-1e6, 0.0), (1e6, 0.0), (0.0, -1e6)])
def test_a_sink_far_from_the_scores_is_finite(score, sink):
    def first(score, sink):
        return attention.softmax(jnp.stack([score, score])[None], jnp.ones((1, 2), bool), sink[None])[0, 0]

    share, slopes = jax.value_and_grad(first, argnums=(0, 1))(jnp.float32(score), jnp.float32(sink))
    assert share == (0.5 if score > sink else 0.0) and slopes == (0.0, 0.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_fc_02_masked_keys_get_nothing_at_huge_scores(sign):
    """Scores of +-1e6, the masked ones a million above the seen ones and the other way round."""
    q = np.full((1, 6, 1, 4), 1e3, np.float32)
    k = sign * np.where(np.arange(6) < 3, -500, 500)[None, :, None, None] * np.ones((1, 6, 1, 4), np.float32)
    segments = np.array([[0, 1, 1, 2, 2, 2]])
    positions = np.array([[0, 0, 1, 0, 1, 2]])
    _, pattern = attend(q, k, k, positions, segments, need_pattern=True)
    seen = oracle.seen(6, segments[0])
    assert abs(float((q[0, 0, 0] * k[0, 0, 0]).sum() / 2)) == 1e6
    assert (pattern[0, 0][~seen] == 0).all()
    np.testing.assert_allclose(pattern[0, 0].sum(-1), [0, 1, 1, 1, 1, 1], atol=1e-6)
    for implementation in IMPLEMENTATIONS:
        z, _ = attend(q, k, k, positions, segments, implementation=implementation)
        assert (z[0, 0] == 0).all() and np.isfinite(z).all()


def test_fc_05_weights_of_equal_keys_in_bfloat16():
    q, k, v = (jnp.ones((1, 1024, 1, 8), jnp.bfloat16) for _ in range(3))
    z, pattern = attend(q, k, v, jnp.arange(1024)[None], None, need_pattern=True)
    assert pattern.dtype == jnp.float32 and z.dtype == jnp.bfloat16
    np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-3)
    np.testing.assert_allclose(pattern[0, 0, 1023], 1 / 1024, rtol=1e-3)
    weights = attention.softmax(jnp.ones((1, 1024), jnp.bfloat16), jnp.ones((1, 1024), bool))
    assert weights.dtype == jnp.float32 and abs(float(weights.sum()) - 1) < 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fc_05_scores_of_bfloat16_are_not_rounded(implementation):
    """Scores 100 and 100.25 of two keys: bfloat16 has steps of 0.5 there and would make the weights equal."""
    q, k, v = (np.zeros((1, 2, 1, 16), jnp.bfloat16) for _ in range(3))
    q[..., :2], k[..., 0], k[:, 1, :, 1], v[:, 1] = (20, 1), 20, 1, 1
    z, _ = attend(q, k, v, np.arange(2)[None], None, implementation=implementation)
    np.testing.assert_allclose(z[0, 1].astype(np.float32), 1 / (1 + np.exp(-0.25)), atol=5e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fc_05_values_in_bfloat16_are_averaged_in_float32(implementation, monkeypatch):
    """A query over 1,024 equal keys reads their mean; sums kept in bfloat16 would stop growing at 256."""
    monkeypatch.setattr(attention, "BLOCK", 512)
    q = jnp.zeros((1, 1024, 1, 8), jnp.bfloat16)
    z, _ = attend(q, q, q + 1, jnp.arange(1024)[None], None, implementation=implementation)
    np.testing.assert_allclose(z.astype(jnp.float32), 1, atol=2e-2)


def test_rope_by_hand():
    """H = 4, theta 100: component 0 turns with 2 by one radian a position, 1 with 3 by a tenth."""
    x = jnp.array([1.0, 2.0, 3.0, 4.0])[None, None, None]
    got = attention.rope(x, jnp.array([[3]]), 100.0)[0, 0, 0]
    c, s, c1, s1 = np.cos(3), np.sin(3), np.cos(0.3), np.sin(0.3)
    np.testing.assert_allclose(got, [c - 3 * s, 2 * c1 - 4 * s1, 3 * c + s, 4 * c1 + 2 * s1], rtol=1e-5)
    np.testing.assert_array_equal(attention.rope(x, jnp.array([[0]]), 100.0), x)


def test_rope_sees_only_distances():
    q, k = normal(0, 1, 1, 2, 8), normal(1, 1, 1, 2, 8)

    def score(t, s):
        at = [attention.rope(x, jnp.array([[p]]), 1e4) for x, p in ((q, t), (k, s))]
        return np.asarray((at[0] * at[1]).sum(-1))

    np.testing.assert_allclose(score(7, 3), score(104, 100), atol=1e-4)
    assert np.abs(score(7, 3) - score(8, 3)).max() > 0.05


def test_rope_turns_bfloat16_in_float32():
    """At position 500 an angle kept in bfloat16 would be wrong by a radian."""
    x = normal(0, 1, 1, 1, 8)
    low, high = (attention.rope(jnp.asarray(x, d), jnp.array([[501]]), 1e4) for d in (jnp.bfloat16, jnp.float32))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), high, atol=0.03)


def test_smear_by_hand():
    """Gates ln 3 and 0 keep 3/4 and 1/2 of each key; the third token starts a document and stays as it is."""
    k = jnp.array([[4.0, 4.0], [8.0, 8.0], [1.0, 1.0], [5.0, 5.0]])[None, :, :, None]
    first = attention.starts(jnp.array([[0, 1, 0, 1]]), jnp.array([[1, 1, 2, 2]]))
    np.testing.assert_array_equal(first, [[True, False, True, False]])
    got = attention.smear(k, jnp.array([jnp.log(3.0), 0.0]), first)[0, :, :, 0]
    np.testing.assert_allclose(got, [[4, 4], [7, 6], [1, 1], [4, 3]], rtol=1e-6)
    np.testing.assert_array_equal(attention.starts(jnp.arange(3)[None], None), [[True, False, False]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("N", "K", "read"), [(4, 2, [0, 0, 1, 1]), (6, 3, [0, 0, 1, 1, 2, 2]), (4, 1, [0] * 4), (4, 4, [0, 1, 2, 3])]
)
def test_fc_01_query_heads_of_a_group_are_neighbours(N, K, read, implementation):
    """Equal weights and KV head j worth j everywhere: what a query head reads is the number of its KV head."""
    v = np.broadcast_to(np.arange(K, dtype=np.float32)[:, None], (1, 5, K, 8))
    q = np.zeros((1, 5, N, 8), np.float32)
    z, _ = attend(q, np.zeros_like(v), v, np.arange(5)[None], None, implementation=implementation)
    np.testing.assert_allclose(z, np.broadcast_to(np.array(read)[:, None], z.shape), atol=1e-6)


def expanded(cfg, params, K):
    """Parameters of the MHA model that says the same: each KV head copied N / K times in a row."""
    params = jax.tree.map(np.asarray, params)
    for layer in params["layers"].values():
        for name, axis in dict(wk_DKH=1, wv_DKH=1, bk_KH=0, bv_KH=0, smear_K=0).items():
            if layer["attention"].get(name) is not None:
                layer["attention"][name] = np.repeat(layer["attention"][name], cfg.num_heads // K, axis)
    return params


@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_fc_01_gqa_is_mha_with_copied_heads(K):
    fields = dict(num_layers=2, bias=True, smeared_key=True, qk_norm=True)
    gqa, mha = oracle.model_config(num_kv_heads=K, **fields), oracle.model_config(**fields)
    params, tokens = oracle.random_params(gqa, 0), oracle.random_tokens(gqa, 1)
    got = quick(oracle.graphdef(gqa), params, tokens)[0]
    want = quick(oracle.graphdef(mha), expanded(gqa, params, K), tokens)[0]
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("positions", ["rope", "learned", "shortformer", "none"])
def test_fc_04_left_padding_changes_nothing(positions, implementation):
    cfg = oracle.model_config(num_layers=2, num_kv_heads=2, positions=positions, smeared_key=True)
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B=1, T=12)
    padded = np.concatenate([np.full((1, 4), 3, np.int32), tokens], 1)
    positions = np.concatenate([np.zeros(4, np.int32), np.arange(12)])[None]
    segments = np.repeat([[0, 1]], [4, 12], axis=1)
    got = quick(
        oracle.graphdef(cfg), params, padded, positions_BT=positions, segments_BT=segments,
        implementation=implementation,
    )[0]  # fmt: skip
    np.testing.assert_allclose(got[:, 4:], oracle.forward(cfg, params, tokens)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "positions"),
    [("einsum", "rope"), ("blockwise", "rope"), ("blockwise", "learned"), ("fused", "learned")],
)
def test_fc_07_packed_documents_are_alone(implementation, positions):
    """A of 7 tokens and the end of document, then B of 9: B is the same to the last bit whatever A is."""
    cfg = oracle.model_config(32, num_layers=2, num_kv_heads=4, positions=positions, smeared_key=True)
    params, row = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B=1, T=17)
    place = dict(zip(("positions_BT", "segments_BT"), (x[None] for x in oracle.packed((8, 9), 17)), strict=True))
    other = row.copy()
    other[0, :7] = (other[0, :7] + 1 + np.arange(7)) % (cfg.vocab_size - 1)
    graph = oracle.graphdef(cfg)
    a, b = (plain(graph, params, x, **place, implementation=implementation)[0] for x in (row, other))
    assert (a[:, 8:] == b[:, 8:]).all() and np.abs(a[:, :8] - b[:, :8]).max() > 0.1
    np.testing.assert_allclose(a[:, 8:], oracle.forward(cfg, params, row[:, 8:])[0], rtol=1e-5, atol=1e-5)


def test_fc_07_without_segments_documents_do_meet():
    """The same two rows without segments: the test above must not pass for want of influence."""
    cfg = oracle.model_config(32, num_layers=2, num_kv_heads=4)
    params, row = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B=1, T=17)
    other = row.copy()
    other[0, :7] = (other[0, :7] + 1 + np.arange(7)) % (cfg.vocab_size - 1)
    a, b = (quick(oracle.graphdef(cfg), params, x)[0][:, 8:] for x in (row, other))
    assert np.abs(a - b).max() > 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fc_02_rows_of_padding_touch_nothing(implementation):
    cfg = oracle.model_config(num_kv_heads=2, mlp="gelu", attention=implementation)
    graph, params = oracle.graphdef(cfg), oracle.random_params(cfg, 0)
    positions, segments = (np.stack(x) for x in zip(
        (np.arange(12), np.ones(12)), (np.maximum(np.arange(12) - 5, 0), np.arange(12) >= 5), (np.zeros(12),) * 2,
        strict=True,
    ))  # fmt: skip
    batch = {
        "inputs_BT": oracle.random_tokens(cfg, 1, B=3, T=12), "targets_BT": oracle.random_tokens(cfg, 2, B=3, T=12),
        "weights_BT": (segments > 0).astype(np.float32), "positions_BT": positions.astype(np.int32),
        "segments_BT": segments.astype(np.int32),
    }  # fmt: skip
    mean_loss_and_grads = oracle.quick_jit(lambda batch: step.mean_loss_and_grads(graph, params, batch, 1))
    loss, grads, tokens = mean_loss_and_grads(batch)
    loss2, grads2, tokens2 = mean_loss_and_grads({name: x[:2] for name, x in batch.items()})
    assert tokens == tokens2 == 12 + 7
    np.testing.assert_allclose(loss, loss2, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads2), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-6)
