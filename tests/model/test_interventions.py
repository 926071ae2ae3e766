"""What can be done to heads: nothing when nothing is asked, else exactly what is asked, to the head that is named."""
import dataclasses
import functools

import jax
import numpy as np
import pytest

from mha_jax.model import transformer
from mha_jax.model.interventions import Interventions, ablate
from tests.model import oracle

IMPLEMENTATIONS = ("einsum", "blockwise", "fused")
B, T, L, N = 2, 6, 2, 4


def small(**fields):
    return oracle.model_config(**({"num_layers": L, "d_model": 16, "num_heads": N, "num_kv_heads": 2} | fields))


def inputs(cfg):
    return oracle.graphdef(cfg), oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B, T)


def changed(params, layer, name, change):
    """Parameters with `change` applied to one array of one attention layer; JAX may still be reading the old ones."""
    params = jax.tree.map(lambda x: x, params)
    kernels = params["layers"][f"layer_{layer:02}"]["attention"]
    kernels[name] = change(kernels[name].copy())
    return params


static = {"static_argnums": 0, "static_argnames": ("capture", "implementation", "start")}
quick, plain = (jit(transformer.forward, **static) for jit in (oracle.quick_jit, oracle.plain_jit))


def logits(cfg, interventions, run=quick, **kwargs):
    return run(*inputs(cfg), interventions=interventions, **kwargs)[0]


def put(x, *places):
    """A float32 copy of x with x[index] = value for each (index, value)."""
    x = np.array(x, np.float32)
    for index, value in places:
        x[index] = value
    return x


EYE = np.broadcast_to(np.eye(N), (L, N, N))
BACK = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]  # equal weight on everything up to oneself


def one(layer, head):
    return np.arange(L * N).reshape(L, N) == layer * N + head


def identities(aux):
    """Interventions that ask for nothing: with values that are not to be used, or that were there already."""
    no, yes = np.zeros((L, N), bool), np.ones((L, N), bool)
    z, pattern, eye = aux.z_LBTNH, aux.pattern_LBNTS, put(EYE)
    return {
        "gate": Interventions(gate_LN=np.ones((L, N))),
        "gate_of_tokens": Interventions(gate_LN=np.ones((B, T, L, N))),
        "replace_none": Interventions(replace_LN=no, value_LBTNH=np.full_like(z, np.nan)),
        "replace_by_itself": Interventions(replace_LN=yes, value_LBTNH=z),
        "force_none": Interventions(force_LN=no, pattern_LBNTS=np.full_like(pattern, np.nan)),
        "force_to_itself": Interventions(force_LN=yes, pattern_LBNTS=pattern),
        "mix": Interventions(mix_LNN=eye),
        "all": Interventions(np.ones((B, T, L, N)), yes, z, yes, pattern, eye),
    }


@pytest.mark.parametrize("K", [1, 2, 4])
def test_identity_is_bit_equal_to_none(K):
    cfg = small(num_kv_heads=K, attention="einsum", mlp="gelu")
    without = logits(cfg, None, plain)
    cases = identities(plain(*inputs(cfg), capture=("z", "pattern"))[1])
    for name, interventions in cases.items() if K == 2 else [("all", cases["all"])]:
        assert (logits(cfg, interventions, plain) == without).all(), name


@pytest.mark.parametrize("implementation", ["blockwise", "fused"])
def test_identity_changes_nothing_in_other_implementations(implementation):
    cfg = small(attention=implementation)
    cases = identities(quick(*inputs(cfg), capture=("z", "pattern"), implementation="einsum")[1])
    for name in ("gate", "gate_of_tokens", "replace_none", "replace_by_itself"):
        np.testing.assert_allclose(logits(cfg, cases[name]), logits(cfg, None), atol=1e-5)


@pytest.mark.parametrize(("layer", "head"), [(0, 1), (1, 3)])
def test_everything_else_changes_the_logits(layer, head):
    cfg = small(num_kv_heads=4)
    for interventions in (
        ablate(L, N, [(layer, head)]),
        Interventions(gate_LN=put(np.ones((B, T, L, N)), ((1, 2, layer, head), 0.5))),
        Interventions(replace_LN=one(layer, head), value_LBTNH=np.ones((L, B, T, N, 4))),
        Interventions(force_LN=one(layer, head), pattern_LBNTS=put(np.broadcast_to(BACK, (L, B, N, T, T)))),
        Interventions(mix_LNN=put(EYE, ((layer, head), 1 / N))),
    ):
        assert np.abs(logits(cfg, interventions) - logits(cfg, None)).max() > 1e-3, interventions


def test_gate_equals_scaled_output_kernel():
    cfg = small(bias=True)
    graph, params, tokens = inputs(cfg)
    gate = np.random.default_rng(5).uniform(0, 2, (L, N)).astype(np.float32)
    scaled = params
    for layer in range(L):
        scaled = changed(scaled, layer, "wo_NHD", lambda x, g=gate[layer]: x * g[:, None, None])
    want, _, _ = oracle.forward(cfg, scaled, tokens)
    got = quick(graph, params, tokens, interventions=Interventions(gate_LN=gate))[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gate_of_one_token_acts_there_alone():
    """In the last layer nothing carries it further; in the first it may reach this position and later ones."""
    cfg, ones = small(), put(np.ones((B, T, L, N)))
    for layer, reached in ((1, slice(3, 4)), (0, slice(3, None))):
        change = logits(cfg, Interventions(gate_LN=put(ones, ((1, 3, layer, 2), 0.0)))) - logits(
            cfg, Interventions(gate_LN=ones)
        )
        moved = np.abs(change).max(-1) > 0
        assert moved[1, reached].all() and moved.sum() == moved[1, reached].sum()


def test_interventions_keep_their_layer_when_entering_later():
    """Entering at layer 1 with its own residual stream, layer 1 is still layer 1."""
    cfg = small()
    gate = Interventions(gate_LN=put(np.ones((L, N)), ((0, 1), 0.3), ((1, 2), 0.6)))
    whole, aux, _ = quick(*inputs(cfg), interventions=gate, capture=("resid",))
    again = quick(*inputs(cfg), interventions=gate, start=1, x_BTD=aux.resid_MBTD[1])[0]
    np.testing.assert_allclose(again, whole, rtol=1e-5, atol=1e-5)


def test_gradient_of_gates_is_per_token_and_head():
    """Summed over tokens, the gradient of token gates is that of head gates."""
    cfg = small()
    graph, params, tokens = inputs(cfg)

    def total(gate):
        out, _, _ = transformer.forward(graph, params, tokens, interventions=Interventions(gate_LN=gate))
        return (out[..., 0] ** 2).sum()

    of_tokens = oracle.quick_jit(jax.grad(total))(np.ones((B, T, L, N)))
    of_heads = oracle.quick_jit(jax.grad(total))(np.ones((L, N)))
    assert (np.abs(of_heads) > 1e-3).all()
    np.testing.assert_allclose(of_tokens.sum((0, 1)), of_heads, rtol=1e-4, atol=1e-5)


def test_replace_then_gate():
    """z is the value given, then gated; other heads keep their own; the layer writes the sum through wo."""
    cfg = small(norm="none")
    value = np.random.default_rng(5).normal(size=(L, B, T, N, 4)).astype(np.float32)
    interventions = Interventions(
        gate_LN=put(np.ones((L, N)), ((0, 2), 0.5)), replace_LN=one(0, 2) | one(0, 3), value_LBTNH=value
    )
    capture = ("z", "resid")
    before, after = (quick(*inputs(cfg), interventions=i, capture=capture)[1] for i in (None, interventions))
    np.testing.assert_allclose(after.z_LBTNH[0, :, :, 2], 0.5 * value[0, :, :, 2])
    np.testing.assert_array_equal(after.z_LBTNH[0, :, :, 3], value[0, :, :, 3])
    np.testing.assert_allclose(after.z_LBTNH[0, :, :, :2], before.z_LBTNH[0, :, :, :2], rtol=1e-6)
    wo_NHD = inputs(cfg)[1]["layers"]["layer_00"]["attention"]["wo_NHD"]
    written = np.einsum("btnh,nhd->btd", after.z_LBTNH[0], wo_NHD)
    np.testing.assert_allclose(after.resid_MBTD[1], after.resid_MBTD[0] + written, rtol=1e-5, atol=1e-5)


def test_forced_patterns_are_what_heads_read_with():
    """Head 1 told to look at itself reads its own value; head 2 told to look everywhere back reads the mean."""
    cfg = small()
    told = put(np.zeros((L, B, N, T, T)), ((1, slice(None), 1), np.eye(T)), ((1, slice(None), 2), BACK))
    interventions = Interventions(force_LN=one(1, 1) | one(1, 2), pattern_LBNTS=told)
    capture = ("z", "v", "pattern")
    free, aux = (quick(*inputs(cfg), interventions=i, capture=capture)[1] for i in (None, interventions))
    v_BSKH = aux.v_LBSKH[1]
    np.testing.assert_allclose(aux.z_LBTNH[1, :, :, 1], v_BSKH[:, :, 0], rtol=1e-6)
    mean = np.cumsum(v_BSKH[:, :, 1], 1) / np.arange(1, T + 1)[:, None]
    np.testing.assert_allclose(aux.z_LBTNH[1, :, :, 2], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(aux.pattern_LBNTS[1, :, 1], np.broadcast_to(np.eye(T), (B, T, T)))
    np.testing.assert_allclose(aux.pattern_LBNTS[1, :, 3], free.pattern_LBNTS[1, :, 3], rtol=1e-6)


def test_mixed_patterns():
    """Head 0 gets the pattern of head 3, head 1 half of its own and half of head 2's: read row by row."""
    cfg = small()
    mix = put(EYE, ((0, 0), [0, 0, 0, 1]), ((0, 1), [0, 0.5, 0.5, 0]))
    free, aux = (
        quick(*inputs(cfg), interventions=i, capture=("pattern",))[1].pattern_LBNTS
        for i in (None, Interventions(mix_LNN=mix))
    )
    want = free[0].copy()
    want[:, 0], want[:, 1] = free[0, :, 3], (free[0, :, 1] + free[0, :, 2]) / 2
    np.testing.assert_allclose(aux[0], want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fields", [
    {"gate_LN": np.ones((N,))}, {"gate_LN": np.ones((L, 1))}, {"gate_LN": np.ones((N, L))},
    {"gate_LN": np.ones((B, L, N))}, {"gate_LN": np.ones((B, T, L, 1))}, {"gate_LN": np.ones((L, N + 1))},
    {"replace_LN": one(0, 0)[0], "value_LBTNH": np.ones((L, B, T, N, 4))},
    {"replace_LN": np.ones((B, T, L, N), bool), "value_LBTNH": np.ones((L, B, T, N, 4))},
    {"replace_LN": one(0, 0), "value_LBTNH": np.ones((L, B, T, 1, 4))},
    {"replace_LN": one(0, 0), "value_LBTNH": np.ones((L - 1, B, T, N, 4))},
    {"replace_LN": one(0, 0), "value_LBTNH": np.ones((B, T, N, 4))},
    {"force_LN": one(0, 0)[:, :2], "pattern_LBNTS": np.ones((L, B, N, T, T))},
    {"force_LN": one(0, 0), "pattern_LBNTS": np.ones((L, B, 2, T, T))},
    {"force_LN": one(0, 0), "pattern_LBNTS": np.ones((L, N, T, T))},
    {"mix_LNN": np.eye(N)}, {"mix_LNN": np.ones((L, N, 1))}, {"mix_LNN": np.ones((L + 1, N, N))},
])  # fmt: skip
def test_wrong_shapes_are_refused(fields):
    name = "|".join(fields)
    with pytest.raises(ValueError, match=rf"({name}) has shape .* \(layers, heads\) = \(2, 4\)"):
        transformer.forward(*inputs(small()), interventions=Interventions(**fields))


def test_halves_are_refused():
    with pytest.raises(ValueError, match="replace_LN and value_LBTNH"):
        Interventions(replace_LN=one(0, 0))
    with pytest.raises(ValueError, match="force_LN and pattern_LBNTS"):
        Interventions(pattern_LBNTS=np.ones((L, B, N, T, T)))


@pytest.mark.parametrize("implementation", ["blockwise", "fused"])
def test_patterns_cannot_be_edited_where_none_is_formed(implementation):
    for interventions in (
        Interventions(mix_LNN=np.ones((L, N, N))),
        Interventions(force_LN=one(0, 0), pattern_LBNTS=np.ones((L, B, N, T, T))),
    ):
        with pytest.raises(ValueError, match=f"{implementation}.*einsum"):
            transformer.forward(*inputs(small(attention=implementation)), interventions=interventions)


@pytest.mark.parametrize("head", [(0, 4), (2, 0), (-1, 0), (0, -1)])
def test_heads_that_do_not_exist(head):
    with pytest.raises(IndexError, match=r"layers are 0\.\.1, heads 0\.\.3"):
        ablate(L, N, [(0, 0), head])


def test_fc_25_ablation_is_the_same_in_every_implementation():
    cfg = small()
    without, cut = logits(cfg, None), logits(cfg, ablate(L, N, [(1, 2)]))
    assert np.abs(cut - without).max() > 1e-3
    for implementation in IMPLEMENTATIONS:
        other = logits(dataclasses.replace(cfg, attention=implementation), ablate(L, N, [(1, 2)]))
        np.testing.assert_allclose(other, cut, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_fc_26_heads_sum_to_the_layer(bias):
    cfg = small(bias=bias, num_kv_heads=4)
    params = inputs(cfg)[1]
    _, aux, _ = quick(*inputs(cfg), capture=("z", "resid"))
    for layer in range(L):
        kernels = params["layers"][f"layer_0{layer}"]["attention"]
        heads = np.einsum("btnh,nhd->nbtd", aux.z_LBTNH[layer], kernels["wo_NHD"])
        output = aux.resid_MBTD[layer + 1] - aux.resid_MBTD[layer]
        np.testing.assert_allclose(heads.sum(0) + (kernels["bo_D"] if bias else 0), output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", range(N))
def test_fc_26_ablation_is_zero_rows_of_the_output_kernel(head):
    cfg = small(bias=True)
    graph, params, tokens = inputs(cfg)
    cut = plain(graph, params, tokens, interventions=ablate(L, N, [(1, head)]))[0]
    without = changed(params, 1, "wo_NHD", lambda x: np.where(np.arange(N)[:, None, None] == head, 0, x))
    zeroed = plain(graph, without, tokens, interventions=ablate(L, N, []))[0]
    assert (cut == zeroed).all()


def test_fc_26_zero_ablation_takes_the_value_bias_along():
    """With every head cut the layer writes its output bias and nothing of the value biases."""
    cfg = small(bias=True)
    _, aux, _ = quick(*inputs(cfg), capture=("resid",), interventions=ablate(L, N, [(0, n) for n in range(N)]))
    bias = inputs(cfg)[1]["layers"]["layer_00"]["attention"]["bo_D"]
    np.testing.assert_allclose(aux.resid_MBTD[1] - aux.resid_MBTD[0], np.broadcast_to(bias, (B, T, 16)), atol=1e-6)


@pytest.mark.parametrize("head", range(N))
def test_fc_26_a_query_kernel_moves_its_own_pattern(head):
    cfg = small(num_layers=1)
    graph, params, tokens = inputs(cfg)
    before = plain(graph, params, tokens, capture=("pattern",))[1].pattern_LBNTS
    moved = changed(params, 0, "wq_DNH", lambda x: x + 0.3 * (np.arange(N) == head)[:, None].astype(np.float32))
    after = plain(graph, moved, tokens, capture=("pattern",))[1].pattern_LBNTS
    moved_N = np.abs(after - before).max((0, 1, 3, 4))
    assert moved_N[head] > 1e-3 and (np.delete(moved_N, head) == 0).all()


def test_fc_26_the_only_head_that_writes_is_found_where_it_is():
    """Twelve layers, of which head (7, 3) alone has an output kernel: rows are layers, columns heads."""
    cfg = small(num_layers=12, d_model=8)
    graph, params, tokens = inputs(cfg)
    kernels = [params["layers"][f"layer_{i:02}"]["attention"]["wo_NHD"] for i in range(12)]
    for layer, kernel in enumerate(kernels):
        kernel[[n for n in range(N) if (layer, n) != (7, 3)]] = 0
    gates = np.concatenate([1 - np.eye(12 * N), np.ones((1, 12 * N))]).reshape(-1, 12, N)

    @oracle.quick_jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def cut(params, gate):
        return transformer.forward(graph, params, tokens, interventions=Interventions(gate_LN=gate))[0]

    *each, whole = np.asarray(cut(params, gates))
    effects = np.abs(np.stack(each) - whole).max((1, 2, 3)).reshape(12, N)
    z_LBTNH = quick(graph, params, tokens, capture=("z",))[1].z_LBTNH
    written = np.abs(np.einsum("lbtnh,lnhd->lnbtd", z_LBTNH, np.stack(kernels))).max((2, 3, 4))
    for table in (effects, written):
        assert table[7, 3] > 1e-2
        assert np.argwhere(table != 0).tolist() == [[7, 3]]


@pytest.mark.parametrize("K", [1, 2])
def test_fc_27_ablating_a_head_leaves_its_group_alone(K):
    cfg = small(num_heads=8, num_kv_heads=K, d_model=32)
    cut, whole = (
        plain(*inputs(cfg), capture=("z", "k", "v"), interventions=ablate(L, 8, heads))[1] for heads in ([(0, 5)], [])
    )
    assert cut.k_LBSKH.shape == cut.v_LBSKH.shape == (L, B, T, K, 4)
    assert (cut.z_LBTNH[0, :, :, 5] == 0).all() and (whole.z_LBTNH[0, :, :, 5] != 0).all()
    others = np.delete(np.arange(8), 5)
    assert (cut.z_LBTNH[0][:, :, others] == whole.z_LBTNH[0][:, :, others]).all()
    assert (cut.k_LBSKH[0] == whole.k_LBSKH[0]).all() and (cut.v_LBSKH[0] == whole.v_LBSKH[0]).all()
