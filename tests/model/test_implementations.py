"""Every implementation of attention does all that it is asked, or refuses by name: outputs and gradients against
NumPy. All combinations take minutes and are marked slow; a few in which every pair of choices meets always run."""
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mha_jax.config import Config, ConfigError, ModelConfig
from mha_jax.model import attention, transformer
from mha_jax.validation import resolve
from tests.model import oracle

B, N = 2, 4
AXES = {
    "implementation": ("einsum", "blockwise", "fused"),
    "option": ("causal", "padding", "segments", "window", "sink", "weights"),
    "length": (1, 31, 128, 130, 192),
    "head_dim": (16, 64, 80),
    "kv_heads": (4, 1, 2),
    "dtype": ("float32", "bfloat16"),
}


def refused(implementation, option):
    return (implementation == "fused" and option == "sink") or (implementation != "einsum" and option == "weights")


MATRIX = [cell for cell in itertools.product(*AXES.values()) if not refused(*cell[:2])]


def covering(cells):
    """A few cells in which every pair of values that some cell has occurs, found greedily: always the first cell
    with the most new pairs."""
    pairs = {cell: set(itertools.combinations(enumerate(cell), 2)) for cell in cells}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


def test_the_few_cells_cover_every_pair():
    few = covering(MATRIX)
    assert len(few) <= 60 and len(set(few)) == len(few)
    for (i, a), (j, b) in itertools.combinations(enumerate(AXES.values()), 2):
        for x, y in itertools.product(a, b):
            if (i, j) != (0, 1) or not refused(x, y):
                assert any(cell[i] == x and cell[j] == y for cell in few), (x, y)


def place(option, T):
    """positions_bT, segments_bT: a row padded on the left and one on the right, or rows of several documents."""
    if option == "padding":
        pad = T // 3
        left, right = np.arange(T) >= pad, np.arange(T) < T - pad
        return np.stack([np.maximum(np.arange(T) - pad, 0), np.arange(T)]), np.stack([left, right]).astype(np.int32)
    if option == "segments":
        rows = [oracle.packed([T // 3, T - T // 3], T), oracle.packed([T // 2, T // 5, T // 5], T)]
        return tuple(np.stack(x) for x in zip(*rows, strict=True))
    return np.arange(T)[None], None


def compare(cell, jit):
    """Output, weights and gradients of one cell: 2e-5 in float32; 2e-2 of max(1, value) in bfloat16, whose own
    rounding is 0.4 %."""
    implementation, option, T, H, K, dtype = cell
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    q, k, v, dz = (rng.normal(size=s).astype(jnp.dtype(dtype)) for s in shapes)
    sink = rng.normal(size=N).astype(np.float32) if option == "sink" else None
    positions, segments = place(option, T)
    window = 7 if option == "window" else None

    @jit
    def forward_and_backward(q, k, v, sink):
        def f(q, k, v, sink):
            return attention.attend(
                q, k, v, positions, segments, window=window, sink_N=sink, implementation=implementation,
                need_pattern=option == "weights",
            )  # fmt: skip

        z, pull, pattern = jax.vjp(f, q, k, v, sink, has_aux=True)
        return z, pattern, pull(dz)

    z, pattern, (dq, dk, dv, dsink) = forward_and_backward(q, k, v, sink)
    seen = np.stack([oracle.seen(T, None if segments is None else segments[b], window) for b in range(B)])
    want_z, want_pattern = oracle.attend(q, k, v, seen, sink)
    assert z.dtype == q.dtype and (z[~seen.any(-1)] == 0).all()
    assert (pattern is None) == (option != "weights") and (dsink is None) == (option != "sink")
    results = list(zip((z, dq, dk, dv, dsink), (want_z, *oracle.attend_grads(q, k, v, seen, dz, sink)), strict=True))
    if pattern is not None:
        assert pattern.dtype == jnp.float32 and (pattern[..., ~seen[0]] == 0).all()
        results.append((pattern, want_pattern))
    for got, want in results:
        if got is not None:
            allowed = 2e-5 if dtype == "float32" else 2e-2 * np.maximum(1, np.abs(want))
            assert (np.abs(got.astype(np.float64) - want) <= allowed).all()


def name(cell):
    return "-".join(map(str, cell))


@pytest.mark.parametrize("cell", covering(MATRIX), ids=name)
def test_fc_03_every_pair_of_choices_equals_numpy(cell):
    compare(cell, oracle.quick_jit)


@pytest.mark.slow
@pytest.mark.parametrize("cell", MATRIX, ids=name)
def test_fc_03_every_combination_equals_numpy(cell):
    compare(cell, oracle.quick_jit)


@pytest.mark.slow
@pytest.mark.parametrize("cell", covering(MATRIX), ids=name)
def test_fc_03_every_pair_compiled_plainly(cell):
    compare(cell, oracle.plain_jit)


@pytest.mark.parametrize(("implementation", "option"), [
    (how, what) for how in AXES["implementation"] for what in AXES["option"] if refused(how, what)
])  # fmt: skip
def test_fc_03_what_is_not_done_is_refused_by_name(implementation, option):
    q = jnp.ones((1, 4, 2, 8))
    sink = jnp.zeros(2) if option == "sink" else None
    with pytest.raises(ValueError, match=f"'{implementation}'.*{'sink' if option == 'sink' else 'pattern'}.*allowed"):
        attention.attend(
            q, q, q, jnp.arange(4)[None], None, sink_N=sink, implementation=implementation,
            need_pattern=option == "weights",
        )  # fmt: skip
    if option == "sink":
        with pytest.raises(ConfigError, match=f"config.model.attention = '{implementation}'.*config.model.sink"):
            resolve(Config(model=ModelConfig(attention=implementation, sink=True)))


def test_choices_of_auto():
    """The pattern where it is asked for and where it is small, whatever the dtype; else blocks."""
    assert attention.choose("auto", needs_pattern=True, sink=True, length=192) == "einsum"
    assert attention.choose("auto", needs_pattern=False, sink=False, length=128) == "einsum"
    assert attention.choose("auto", needs_pattern=False, sink=False, length=129) == "blockwise"


@pytest.mark.parametrize("implementation", AXES["implementation"])
@pytest.mark.parametrize(("dtype", "fields"), [
    ("float32", {"num_kv_heads": 1, "smeared_key": True, "window": 70, "qk_norm": True}),
    ("bfloat16", {"num_kv_heads": 2, "positions": "learned", "mlp": "gelu"}),
], ids=["float32", "bfloat16"])  # fmt: skip
def test_fc_03_the_future_changes_nothing(dtype, fields, implementation):
    """Other tokens after t leave every logit up to t the same to the last bit, across blocks of 64 queries."""
    cfg = oracle.model_config(130, num_heads=4, d_model=16, dtype=dtype, attention=implementation, **fields)
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, 2, 130)
    logits = functools.partial(oracle.plain_jit(transformer.forward, static_argnums=0), oracle.graphdef(cfg), params)
    before = logits(tokens)[0]
    for t in (0, 63, 64, 100, 128):
        other = tokens.copy()
        other[:, t + 1 :] = (other[:, t + 1 :] + 1 + np.arange(129 - t) % 3) % cfg.vocab_size
        after = logits(other)[0]
        assert (after[:, : t + 1] == before[:, : t + 1]).all() and (after[:, t + 1 :] != before[:, t + 1 :]).any()


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
def test_rows_may_be_mapped_in_any_number_of_shards(shards):
    """8 rows seen as [shards, 8 / shards]; 3 does not divide and the rows stay together."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(8, 9, n, 4)).astype(np.float32) for n in (4, 2, 2))
    positions, segments = (np.stack([x] * 8) for x in oracle.packed((3, 5), 9))
    segments[5] = 1
    positions[5] = np.arange(9)
    attend = oracle.quick_jit(attention.attend, static_argnames=("implementation", "batch_shards"))
    z, _ = attend(q, k, v, positions, segments, implementation="blockwise", batch_shards=shards)
    want, _ = oracle.attend(q, k, v, np.stack([oracle.seen(9, row) for row in segments]))
    np.testing.assert_allclose(z, want, atol=1e-5)


def test_blocks_over_a_sharded_batch_need_no_communication():
    """Sixteen rows on eight devices: each maps over its own two rows and asks the others for nothing."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    q = jax.device_put(np.random.default_rng(0).normal(size=(16, 9, 2, 4)).astype(np.float32), sharding)

    def z(q, shards):
        return attention.attend(q, q, q, jnp.arange(9)[None], None, implementation="blockwise", batch_shards=shards)[0]

    good, bad = (jax.jit(z, static_argnums=1).lower(q, shards).compile().as_text() for shards in (8, 1))
    words = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    assert not any(word in good for word in words) and any(word in bad for word in words)
