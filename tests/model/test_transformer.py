"""The whole model against the NumPy one, for every option; then what must hold whatever the weights are."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax.model import attention, transformer
from mha_jax.probes import icl
from tests.model import oracle

IMPLEMENTATIONS = ("einsum", "blockwise", "fused")
T = 9


@pytest.fixture(autouse=True, scope="module")
def short_blocks():
    """Blocks of 6 queries, so that rows of 9 tokens are cut into two of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", 6)
        yield


run = oracle.quick_jit(
    transformer.forward, static_argnums=0, static_argnames=("capture", "implementation", "start")
)


def logits_of(cfg, params, tokens, **kwargs):
    return run(oracle.graphdef(cfg), params, tokens, **kwargs)[0]


def check(cfg, forward, place=(None, None), seed=0):
    """The comparison that all of this file rests on: logits of `forward` equal those of the NumPy model."""
    params, tokens = oracle.random_params(cfg, seed), oracle.random_tokens(cfg, seed + 1, T=T)
    positions, segments = place
    got = forward(oracle.graphdef(cfg), params, tokens, positions_BT=positions, segments_BT=segments)[0]
    want, _, _ = oracle.forward(cfg, params, tokens, positions, segments)
    assert got.dtype == jnp.float32 and want.std() > 0.3
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def places(*documents):
    """positions_BT, segments_BT of rows with documents of the given lengths, padded on the right to T."""
    rows = [oracle.packed(lengths, T) for lengths in documents]
    return tuple(np.stack(x) for x in zip(*rows, strict=True))


def left_padded(*lengths):
    """positions_BT, segments_BT of rows with one document of the given length at their right end."""
    positions, segments = np.zeros((len(lengths), T), np.int32), np.zeros((len(lengths), T), np.int32)
    for row, length in enumerate(lengths):
        positions[row, T - length :], segments[row, T - length :] = np.arange(length), 1
    return positions, segments


WHOLE = (None, None)
OPTIONS = {
    "rope": ({}, WHOLE),
    "learned": (dict(positions="learned"), WHOLE),
    "shortformer": (dict(positions="shortformer"), WHOLE),
    "no_positions": (dict(positions="none"), WHOLE),
    "gelu": (dict(mlp="gelu"), WHOLE),
    "swiglu": (dict(norm="rms", mlp="swiglu"), WHOLE),
    "no_norm": (dict(norm="none", mlp="gelu", d_model=8, head_dim=4), WHOLE),
    "tied": (dict(tied=True), WHOLE),
    "bias": (dict(bias=True, mlp="gelu"), WHOLE),
    "bias_rms": (dict(bias=True, norm="rms", mlp="swiglu", tied=True), WHOLE),
    "smeared_key": (dict(smeared_key=True), places((4, 5), (9,))),
    "qk_norm": (dict(qk_norm=True, rope_theta=100.0), WHOLE),
    "sink": (dict(sink=True), WHOLE),
    "window": (dict(window=3), WHOLE),
    "head_dim": (dict(head_dim=6), WHOLE),
    "packed": ({}, places((2, 4, 3), (5, 1, 1))),
    "left_padding": (dict(positions="learned"), left_padded(5, 8)),
}


@pytest.mark.parametrize("K", [1, 2, 4, 8])
@pytest.mark.parametrize("option", OPTIONS)
def test_option_equals_numpy(option, K):
    """Every option for every number of KV heads; the implementations take turns, each meets each option."""
    fields, place = OPTIONS[option]
    turn = (list(OPTIONS).index(option) + (1, 2, 4, 8).index(K)) % 3
    implementation = IMPLEMENTATIONS[turn % 2 if fields.get("sink") else turn]
    check(oracle.model_config(num_kv_heads=K, attention=implementation, **fields), run, place)


RICH = dict(
    num_layers=2, num_kv_heads=4, positions="shortformer", mlp="swiglu", bias=True, smeared_key=True, qk_norm=True,
    window=4, head_dim=6,
)  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_all_options_at_once_equal_numpy(implementation):
    cfg = oracle.model_config(**RICH, attention=implementation, sink=implementation != "fused")
    check(cfg, run, places((2, 4, 2), (5, 4)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradient_equals_numpy_difference(implementation):
    """Slope of the loss along a random direction: by JAX, and by differences of the NumPy model's loss."""
    cfg = oracle.model_config(**(RICH | {"num_layers": 1}), attention=implementation, sink=implementation != "fused")
    graph, params, tokens = oracle.graphdef(cfg), oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, T=T)
    positions, segments = places((2, 4, 2), (5, 4))
    targets = oracle.random_tokens(cfg, 2, T=T)

    @oracle.quick_jit
    def gradient(params):
        def loss(params):
            logits, _, _ = transformer.forward(graph, params, tokens, positions_BT=positions, segments_BT=segments)
            return icl.token_loss(logits, targets).mean()

        return jax.grad(loss)(params)

    def loss64(params):
        logits, _, _ = oracle.forward(cfg, params, tokens, positions, segments)
        top = logits.max(-1, keepdims=True)
        log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        return -np.take_along_axis(log_p, targets[..., None], -1).mean()

    grads, rng = gradient(params), np.random.default_rng(3)
    for _ in range(2):
        way = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
        up, down = (loss64(jax.tree.map(lambda x, d, s=s: x + s * 1e-5 * d, params, way)) for s in (1, -1))
        slope = sum((g * d).sum() for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(way), strict=True))
        assert abs(slope) > 0.01
        np.testing.assert_allclose(slope, (up - down) / 2e-5, rtol=2e-4)


def _split_without_transpose(q, k, v, *args, **kwargs):
    """Heads cut by reshape(B, N, T, H) of [B, T, N * H], forgetting that T comes before N."""
    B, T, _N, H = q.shape
    q, k, v = (x.reshape(B, x.shape[2], T, H).swapaxes(1, 2) for x in (q, k, v))
    return RIGHT(q, k, v, *args, **kwargs)


def _kv_heads_tiled(q, k, v, *args, **kwargs):
    """Query head n reads KV head n mod K."""
    n = np.arange(q.shape[2]) % k.shape[2]
    return RIGHT(q, k[:, :, n], v[:, :, n], *args, **kwargs)


RIGHT = attention.attend


@pytest.mark.parametrize("wrong", [_split_without_transpose, _kv_heads_tiled])
def test_the_comparison_catches_wrong_heads(wrong, monkeypatch):
    """Both faults keep every shape and still train; the comparison above must not let them pass."""
    cfg = oracle.model_config(num_kv_heads=2)
    check(cfg, run)
    monkeypatch.setattr(attention, "attend", wrong)
    broken = oracle.quick_jit(lambda *args, **kwargs: transformer.forward(*args, **kwargs), static_argnums=0)
    with pytest.raises(AssertionError, match="Not equal"):
        check(cfg, broken)


def test_captures_equal_numpy():
    cfg = oracle.model_config(**RICH, sink=True)
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, T=T)
    _, found, residuals = oracle.forward(cfg, params, tokens)
    _, aux, cache = run(oracle.graphdef(cfg), params, tokens, capture=transformer.CAPTURES)
    assert cache is None
    np.testing.assert_allclose(aux.resid_MBTD, np.stack(residuals), rtol=1e-5, atol=1e-5)
    for name, field in dict(pattern="BNTS", z="BTNH", q="BTNH", k="BSKH", v="BSKH").items():
        want = np.stack([f[name] for f in found])
        np.testing.assert_allclose(getattr(aux, f"{name}_L{field}"), want, rtol=1e-5, atol=1e-5)
    _, none, _ = run(oracle.graphdef(cfg), params, tokens)
    assert all(value is None for value in dataclasses.asdict(none).values())


def test_twelve_layers_keep_their_order():
    """Sorted as plain strings, layer 10 comes before layer 2: everything that speaks of layers would be wrong."""
    cfg = oracle.model_config(num_layers=12, d_model=8, num_heads=2, num_kv_heads=2)
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, T=4)
    _, found, residuals = oracle.forward(cfg, params, tokens)
    _logits, aux, _ = run(oracle.graphdef(cfg), params, tokens, capture=("resid", "z"))
    np.testing.assert_allclose(aux.resid_MBTD, np.stack(residuals), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(aux.z_LBTNH, np.stack([f["z"] for f in found]), rtol=1e-4, atol=1e-4)
    assert list(params["layers"]) == [f"layer_{i:02d}" for i in range(12)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 3])
def test_gradients_flow_only_from_the_past(implementation, window):
    """Tokens 0..T-1 in order, so row s of the embedding acts at position s alone: its gradient must be exactly 0
    for every output before s, and before the window."""
    cfg = oracle.model_config(vocab_size=T, num_kv_heads=2, window=window)
    graph, params = oracle.graphdef(cfg), oracle.random_params(cfg, 0)
    mix_V = np.random.default_rng(1).normal(size=T).astype(np.float32)

    @oracle.quick_jit
    def influence(params):
        def outputs(embed_VD):
            tokens = jnp.arange(T)[None]
            logits, _, _ = transformer.forward(
                graph, params | {"embed_VD": embed_VD}, tokens, implementation=implementation
            )
            return logits[0] @ mix_V

        return jnp.abs(jax.jacrev(outputs)(params["embed_VD"])).max(-1)

    influence_TS = influence(params)
    may = oracle.seen(T, window=window)
    assert (influence_TS[~may] == 0).all() and (influence_TS[may] > 1e-4).all()


@pytest.mark.parametrize("start", [1, 3])
def test_entering_at_a_layer_equals_the_whole(start):
    cfg = oracle.model_config(num_layers=3, num_kv_heads=2, positions="shortformer", mlp="gelu")
    graph, params, tokens = oracle.graphdef(cfg), oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, T=T)
    logits, whole, _ = run(graph, params, tokens, capture=("resid", "pattern"))
    resid = whole.resid_MBTD[start]
    capture = ("resid", "pattern") if start < 3 else ("resid",)
    again, part, _ = run(graph, params, tokens, start=start, x_BTD=resid, capture=capture)
    np.testing.assert_allclose(again, logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(part.resid_MBTD, whole.resid_MBTD[start:], rtol=1e-5, atol=1e-5)
    if start < 3:
        np.testing.assert_allclose(part.pattern_LBNTS, whole.pattern_LBNTS[start:], rtol=1e-5, atol=1e-6)
    moved = logits_of(cfg, params, tokens, start=start, x_BTD=resid + (np.arange(32) == 1).astype(np.float32))
    assert np.abs(moved - logits).max() > 0.01


def test_what_forward_refuses():
    cfg = oracle.model_config(length=8, positions="learned")
    graph, params, tokens = oracle.graphdef(cfg), oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, T=8)
    with pytest.raises(ValueError, match="capture.*'patern'.*pattern"):
        transformer.forward(graph, params, tokens, capture=("patern",))
    with pytest.raises(ValueError, match="cache"):
        transformer.forward(graph, params, tokens, cache={})
    with pytest.raises(ValueError, match="length 9 .* 8 positions"):
        transformer.forward(graph, params, oracle.random_tokens(cfg, 1, T=9))
    with pytest.raises(ValueError, match="start and x_BTD"):
        transformer.forward(graph, params, tokens, start=1)
    for start in (-1, cfg.num_layers + 1):
        with pytest.raises(ValueError, match=f"start = {start}: allowed are 0 to {cfg.num_layers}"):
            transformer.forward(graph, params, tokens, start=start, x_BTD=jnp.zeros((2, 8, 32)))
    with pytest.raises(ValueError, match="no layer that runs has a head"):
        transformer.forward(graph, params, tokens, start=1, x_BTD=jnp.zeros((2, 8, 32)), capture=("z",))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fc_05_bfloat16_leaves_logits_in_float32(implementation):
    cfg = oracle.model_config(dtype="bfloat16", num_kv_heads=2, mlp="swiglu")
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, T=T)
    logits = logits_of(cfg, params, tokens, implementation=implementation)
    want, _, _ = oracle.forward(cfg, params, tokens)
    assert logits.dtype == np.float32
    assert (logits != logits.astype(jnp.bfloat16)).mean() > 0.9, "logits were rounded to bfloat16"
    assert np.abs(logits - want).max() < 0.05 * np.abs(want).max()


def test_fc_05_loss_of_equal_logits():
    cfg = oracle.model_config(dtype="bfloat16", d_model=4, num_heads=1, num_kv_heads=1, vocab_size=50_000)
    params = oracle.random_params(cfg, 0) | {"unembed_DV": np.zeros((4, 50_000), np.float32)}
    logits = run(oracle.graphdef(cfg), params, oracle.random_tokens(cfg, 1, B=1, T=2))[0]
    loss = icl.token_loss(logits, jnp.array([[7, 49_999]]))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, 10.8198, atol=1e-3)


def size(params) -> int:
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))


def shapes_of(cfg):
    return jax.eval_shape(lambda: transformer.init_params(cfg, 0))


COUNTED = [
    {}, dict(num_kv_heads=2), dict(num_kv_heads=1), dict(head_dim=6, num_kv_heads=4), dict(tied=True),
    dict(positions="learned"), dict(positions="shortformer", bias=True), dict(mlp="gelu"), dict(mlp="swiglu"),
    dict(mlp="gelu", bias=True), dict(mlp="swiglu", bias=True, norm="rms"), dict(norm="none", mlp="gelu"),
    dict(sink=True, smeared_key=True, qk_norm=True, num_kv_heads=2), dict(d_mlp=20, mlp="gelu"), RICH,
    dict(kept_heads=((0, 1, 5), (2,)), num_layers=2, num_kv_heads=4, bias=True, sink=True, smeared_key=True),
    dict(kept_heads=((), tuple(range(8))), num_layers=2, bias=True, qk_norm=True, mlp="gelu"),
]  # fmt: skip


@pytest.mark.parametrize("fields", COUNTED)
def test_closed_form_counts_every_parameter(fields):
    cfg = oracle.model_config(**fields)
    assert transformer.count_params(cfg) == size(shapes_of(cfg))


def test_number_of_parameters_by_hand():
    """Embedding and unembedding 2 x 11 x 32, two layers of 4 x 32 x 32, three norms of 32; K = 2 of 8 heads saves
    three quarters of 2 x 32 x 32 a layer."""
    cfg = oracle.model_config(num_layers=2)
    assert transformer.count_params(cfg) == 704 + 2 * 4096 + 96
    gqa = dataclasses.replace(cfg, num_kv_heads=2)
    assert transformer.count_params(gqa) == 704 + 2 * (4096 - 1536) + 96


def test_mha_is_as_large_for_every_number_of_heads():
    sizes = {size(shapes_of(oracle.model_config(num_heads=n, num_kv_heads=n, mlp="gelu"))) for n in (1, 2, 4, 8, 16)}
    assert len(sizes) == 1
    extras = {size(shapes_of(oracle.model_config(num_heads=n, num_kv_heads=n, sink=True))) for n in (2, 4)}
    assert len(extras) == 2


def test_init_is_a_pure_function_of_a_traced_seed():
    cfg = oracle.model_config(num_layers=2, num_kv_heads=2, bias=True)
    init = oracle.quick_jit(lambda seed: transformer.init_params(cfg, seed))
    many = oracle.quick_jit(jax.vmap(lambda seed: transformer.init_params(cfg, seed)))(jnp.arange(2))
    for seed in range(2):
        same = jax.tree.map(lambda a, b: bool((a == b[seed]).all()), init(seed), many)  # noqa: B023
        assert all(jax.tree.leaves(same))
    a, b = init(0), init(1)
    assert all((a[name] != b[name]).all() for name in ("embed_VD", "unembed_DV"))
    graph = oracle.graphdef(cfg)
    assert graph == transformer.graphdef(cfg) and hash(graph) == hash(transformer.graphdef(cfg))
    layers = [a["layers"][f"layer_0{i}"]["attention"] for i in (0, 1)]
    assert (layers[0]["wq_DNH"] != layers[1]["wq_DNH"]).all() and (layers[0]["wk_DKH"] != layers[0]["wv_DKH"]).all()


@pytest.mark.parametrize(
    ("init", "inner", "outer", "down"),
    [("fan_in", 64**-0.5, (16 * 8) ** -0.5, 256**-0.5), ("gpt2", 0.02, 0.02 / 2, 0.02 / 2)],
)
def test_sizes_of_initial_parameters(init, inner, outer, down):
    """fan_in: variance 1 / inputs. gpt2: 0.02, and 0.02 / sqrt(2 L) where a layer writes to the residual stream."""
    cfg = oracle.model_config(
        num_layers=2, d_model=64, num_heads=16, num_kv_heads=16, head_dim=8, vocab_size=300, mlp="gelu", bias=True,
        init=init,
    )  # fmt: skip
    params = oracle.quick_jit(lambda: transformer.init_params(cfg, 0))()
    attn, mlp = params["layers"]["layer_01"]["attention"], params["layers"]["layer_01"]["mlp"]
    expected = {
        inner: [params[x] for x in ("embed_VD", "unembed_DV")] + [attn[x] for x in ("wq_DNH", "wk_DKH", "wv_DKH")],
        outer: [attn["wo_NHD"]],
        down: [mlp["w_down_FD"]],
    }
    for std, arrays in expected.items():
        for x in arrays:
            np.testing.assert_allclose(x.std(), std, rtol=0.03)
            assert abs(x.mean()) < 0.04 * std
    assert all((x == 0).all() for name, x in attn.items() if name.startswith("b"))
    assert (params["final_norm"]["scale_D"] == 1).all() and (params["final_norm"]["bias_D"] == 0).all()
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
