"""Head behaviour on patterns and circuits made by hand."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax.probes import behaviour, induction

T = 6
TOKENS = np.array([[3, 1, 3, 1, 2, 3], [0, 0, 1, 2, 3, 4]])


def random_patterns(shape, seed=0):
    """Causal attention patterns [..., T, S] with random weights."""
    scores = np.random.default_rng(seed).normal(0, 2, shape)
    scores = np.where(np.tri(shape[-1], dtype=bool), scores, -np.inf)
    return jax.nn.softmax(jnp.asarray(scores, jnp.float32), axis=-1)


def reference_patterns():
    """Four heads over 8 tokens, unmasked, from a fixed random embedding: [L=1, B=1, N, T, S]."""
    rng = np.random.default_rng(0)
    embed = rng.normal(0, 1, (8, 32))
    query, key = rng.normal(0, 0.4, (4, 32, 8)), rng.normal(0, 0.4, (4, 32, 8))
    scores = np.einsum("nth,nsh->nts", embed @ query, embed @ key) / np.sqrt(8)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return jnp.asarray(weights / weights.sum(-1, keepdims=True), jnp.float32)[None, None]


def test_reference_entropies_and_similarity():
    pattern = reference_patterns()
    entropies = behaviour.row_entropy(pattern).mean((0, 1, 3))
    np.testing.assert_allclose(entropies, [0.5704, 0.7017, 1.2150, 0.4940], atol=5e-5)
    assert 1 - behaviour.cosine_distances(pattern).mean() == pytest.approx(0.1892, abs=5e-5)


def test_js_is_the_mean_over_rows_of_the_divergence_from_the_average():
    p, q = np.asarray(reference_patterns()[0, 0, :2], np.float64)
    m = (p + q) / 2
    rows = 0.5 * (p * np.log(p / m)).sum(-1) + 0.5 * (q * np.log(q / m)).sum(-1)
    js = behaviour.js_distances(reference_patterns())[0, 0, 0]
    assert js == pytest.approx(rows.mean() / np.log(2), rel=1e-5)


def test_each_behaviour_is_one_for_its_own_head_and_zero_for_the_others():
    eye = np.eye(T, dtype=np.float32)
    previous = np.eye(T, k=-1, dtype=np.float32)
    first = np.zeros((T, T), np.float32)
    previous[0, 0] = 1
    first[:, 0] = 1
    targets = np.asarray(induction.duplicate_targets(TOKENS), np.float32)
    count = targets.sum(-1, keepdims=True)
    duplicate = np.where(count > 0, targets / np.maximum(count, 1), eye)
    rows = [np.broadcast_to(p, (2, T, T)) for p in (previous, eye, first, duplicate)]
    pattern = jnp.asarray(np.stack(rows, axis=1)[None])
    np.testing.assert_allclose(behaviour.previous_token(pattern)[0, :3], [1, 0, 1 / 5])  # t = 1: both key 0
    np.testing.assert_allclose(behaviour.self_attention(pattern)[0, :3], [0, 1, 0])
    np.testing.assert_allclose(behaviour.first_token(pattern)[0, :3], [1 / 5, 0, 1])
    repeats = behaviour.duplicate_token(pattern, TOKENS)  # 4 queries repeat a token, 3 the first
    np.testing.assert_allclose(repeats[0, 1:], [0, 3 / 4, 1])
    # The duplicate head spreads over two copies in one row of ten.
    np.testing.assert_allclose(behaviour.confidence(pattern)[0], [1, 1, 1, 0.95], rtol=1e-6)


def test_scores_are_means_over_queries_and_sequences_by_a_plain_loop():
    pattern = random_patterns((2, 3, 4, T, T))
    A = np.asarray(pattern, np.float64)
    loop = {"previous_token": 0.0, "self_attention": 0.0, "first_token": 0.0, "confidence": 0.0}
    for b in range(3):
        for t in range(1, T):
            loop["previous_token"] += A[:, b, :, t, t - 1] / (3 * (T - 1))
            loop["self_attention"] += A[:, b, :, t, t] / (3 * (T - 1))
            loop["first_token"] += A[:, b, :, t, 0] / (3 * (T - 1))
            loop["confidence"] += A[:, b, :, t].max(-1) / (3 * (T - 1))
    for name, expected in loop.items():
        np.testing.assert_allclose(getattr(behaviour, name)(pattern), expected, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_uniform_values_are_those_of_a_uniform_head(window):
    values = behaviour.uniform_values(TOKENS, window)
    seen = [min(t + 1, window or T) for t in range(1, T)]
    mean = np.mean([1 / n for n in seen])
    for name in ("previous_token", "self", "confidence"):
        assert values[name] == pytest.approx(mean, rel=1e-6)
    assert values["first_token"] == pytest.approx(mean if window is None else (1 / 2 + 1 / 3) / 5, rel=1e-6)
    # Earlier copies: row 0 at t=2 one (2 back), t=3 one (2 back), t=5 two (3 and 5 back); row 1 at t=1 one.
    hand = [1 / 3, 1 / 4, 2 / 6, 1 / 2] if window is None else [1 / 3, 1 / 3, 0, 1 / 2]
    assert values["duplicate_token"] == pytest.approx(np.mean(hand), rel=1e-6)


def test_entropy_is_one_for_uniform_zero_for_sharp_at_any_length_and_window():
    sharp = np.eye(T, dtype=np.float32)
    for window in (None, 3):
        pattern = jnp.asarray(np.stack([induction.uniform_pattern(T, window), sharp])[None, None])
        allowed = induction.allowed_counts(T, window)
        np.testing.assert_allclose(behaviour.entropy(pattern, allowed), [[1.0, 0.0]], rtol=1e-6)


def test_entropy_is_a_ratio_of_sums():
    pattern = np.zeros((3, 3), np.float32)
    pattern[0, 0] = pattern[1, 1] = 1
    pattern[2] = 1 / 3
    value = behaviour.entropy(jnp.asarray(pattern)[None, None, None], np.array([1, 2, 3]))[0, 0]
    assert value == pytest.approx(np.log(3) / (np.log(2) + np.log(3)), rel=1e-6)


def test_sink_mass_is_one_more_outcome():
    allowed = np.arange(1, T + 1)
    uniform = (np.tri(T) / (allowed[:, None] + 1)).astype(np.float32)  # equal shares, one of them to the sink
    resting = np.zeros((T, T), np.float32)  # everything to the sink
    pattern = jnp.asarray(np.stack([uniform, resting])[None, None])
    np.testing.assert_allclose(behaviour.entropy(pattern, allowed, sink=True), [[1.0, 0.0]], atol=1e-6)
    # One head all on the sink, one with none: nothing in common, which the keys alone would not show.
    full = jnp.asarray(np.stack([np.eye(T, dtype=np.float32), resting])[None, None])
    assert behaviour.disagreement_js(full, sink=True).all_L[0] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("heads", [2, 3, 5])
@pytest.mark.parametrize("length", [6, 33])
def test_identical_heads_disagree_exactly_zero(heads, length):
    one = random_patterns((2, 3, 1, length, length), seed=heads)
    pattern = jnp.broadcast_to(one, (2, 3, heads, length, length))
    for measure in (behaviour.disagreement_cosine, behaviour.disagreement_js):
        np.testing.assert_array_equal(jax.jit(measure)(pattern).all_L, [0.0, 0.0])


def test_heads_with_nothing_in_common_disagree_by_one():
    eye, previous = np.eye(T, dtype=np.float32), np.eye(T, k=-1, dtype=np.float32)
    previous[0, 0] = 1  # row 0 agrees, as in every causal model, and must not count
    pattern = jnp.asarray(np.stack([eye, previous])[None, None])
    np.testing.assert_allclose(behaviour.disagreement_cosine(pattern).all_L, [1.0], rtol=1e-6)
    np.testing.assert_allclose(behaviour.disagreement_js(pattern).all_L, [1.0], rtol=1e-6)


def test_disagreement_is_per_sequence_never_of_averaged_patterns():
    a, b = np.eye(T, dtype=np.float32), np.eye(T, k=-1, dtype=np.float32)
    pattern = jnp.asarray(np.stack([[a, b], [b, a]])[None])  # swapped in the second sequence
    averaged = pattern.mean(1, keepdims=True)
    assert behaviour.disagreement_cosine(averaged).all_L[0] == 0.0
    assert behaviour.disagreement_cosine(pattern).all_L[0] == pytest.approx(1.0, rel=1e-6)


def test_pairs_inside_and_across_groups_are_told_apart():
    eye, previous = np.eye(T, dtype=np.float32), np.eye(T, k=-1, dtype=np.float32)
    pattern = jnp.asarray(np.stack([eye, eye, previous, previous])[None, None])  # groups (0, 1) and (2, 3)
    for measure in (behaviour.disagreement_cosine, behaviour.disagreement_js):
        gqa, mha, mqa = measure(pattern, 2), measure(pattern, 1), measure(pattern, 4)
        np.testing.assert_allclose([gqa.all_L[0], gqa.inside_L[0], gqa.across_L[0]], [4 / 6, 0, 1], rtol=1e-6)
        assert np.isnan(mha.inside_L[0]) and mha.across_L[0] == mha.all_L[0]
        assert np.isnan(mqa.across_L[0]) and mqa.inside_L[0] == mqa.all_L[0]


def test_one_head_has_no_disagreement():
    pattern = random_patterns((2, 3, 1, T, T))
    for measure in (behaviour.disagreement_cosine, behaviour.disagreement_js):
        for part in jax.jit(measure)(pattern):
            assert part.shape == (2,) and np.isnan(part).all()


def test_removed_heads_are_nan_and_leave_the_others_alone():
    pattern = random_patterns((2, 3, 4, T, T))
    removed = pattern.at[1, :, 2].set(jnp.nan)
    allowed = np.arange(1, T + 1)
    scores = {
        "previous": behaviour.previous_token,
        "self": behaviour.self_attention,
        "first": behaviour.first_token,
        "confidence": behaviour.confidence,
        "duplicate": lambda p: behaviour.duplicate_token(p, np.resize(TOKENS, (3, T))),
        "entropy": lambda p: behaviour.entropy(p, allowed),
        "sink": lambda p: behaviour.entropy(p, allowed, sink=True),
    }
    for score in scores.values():
        before, after = np.array(score(pattern)), np.array(score(removed))
        assert np.isnan(after[1, 2])
        before[1, 2] = after[1, 2]
        np.testing.assert_array_equal(after, before)
    kept = pattern[:, :, jnp.array([0, 1, 3])]
    for measure in (behaviour.disagreement_cosine, behaviour.disagreement_js):
        after = measure(removed).all_L
        np.testing.assert_allclose(after, [measure(pattern).all_L[0], measure(kept).all_L[1]], rtol=1e-6)


def samples(vocab, tokens, rows, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(vocab)[:tokens] for _ in range(rows)])


def test_copying_of_a_copier_an_anticopier_and_random_heads():
    rng = np.random.default_rng(0)
    vocab, width = 40, 64
    basis = np.linalg.qr(rng.normal(size=(width, width)))[0][:vocab]  # orthonormal token directions [V, D]
    tokens = samples(vocab, 10, 16)
    source = basis[tokens]  # [B, S, D]
    random_maps = rng.normal(size=(300, width, width))
    result = np.stack([source, -source, *(source @ m for m in random_maps)], axis=1)  # [B, N, S, D]
    score = np.asarray(behaviour.copying(jnp.asarray(result)[None], jnp.asarray(basis.T), tokens))[0]
    assert score[0] == pytest.approx(1.0, abs=1e-5)
    # An anti-copier lowers its own token and raises the others alike: nothing of the raise is its own.
    assert score[1] == pytest.approx(0.0, abs=1e-6)
    chance, sd = behaviour.copying_chance(tokens)
    assert chance == 0.1
    assert score[2:].mean() == pytest.approx(chance, abs=4 * sd / np.sqrt(300))
    assert score[2:].std() == pytest.approx(sd, rel=0.15)


def test_copying_by_a_plain_loop_over_the_full_vocabulary():
    rng = np.random.default_rng(3)
    L, B, N, S, D, V = 2, 3, 2, 4, 5, 11
    result, unembed, tokens = rng.normal(size=(L, B, N, S, D)), rng.normal(size=(D, V)) + 1, samples(V, S, B)
    expected = np.zeros((L, N))
    for b in range(B):
        for s in range(S):
            logits = result[:, b, :, s] @ unembed
            raised = np.maximum(logits - logits.mean(-1, keepdims=True), 0)
            own, total = raised[..., tokens[b, s]], raised[..., tokens[b]].sum(-1)
            expected += np.where(total > 0, own / np.where(total > 0, total, 1), 0) / (B * S)
    score = behaviour.copying(jnp.asarray(result), jnp.asarray(unembed), tokens)
    np.testing.assert_allclose(score, expected, rtol=1e-4)


def test_copying_of_a_removed_head_is_nan_and_of_a_silent_head_zero():
    rng = np.random.default_rng(0)
    result = jnp.asarray(rng.normal(size=(1, 2, 3, 4, 5))).at[:, :, 1].set(jnp.nan).at[:, :, 2].set(0.0)
    score = behaviour.copying(result, jnp.asarray(rng.normal(size=(5, 11))), samples(11, 4, 2))[0]
    assert np.isfinite(score[0]) and np.isnan(score[1]) and score[2] == 0.0


@pytest.mark.parametrize("centred", [True, False])
def test_folded_norm_equals_the_frozen_norm_up_to_its_size(centred):
    rng = np.random.default_rng(0)
    x, gain, unembed = rng.normal(size=(7, 5)) + 1, rng.normal(size=5), rng.normal(size=(5, 11))
    normed = (x - x.mean(-1, keepdims=True) if centred else x) * gain
    folded = behaviour.fold_final_norm(gain, unembed, centred)
    np.testing.assert_allclose(x @ folded, normed @ unembed, rtol=1e-10)
    assert behaviour.fold_final_norm(None, unembed, False) is unembed


def test_olsson_scale_has_their_ends():
    scale = behaviour.olsson_scale(np.array([0.0, 1 / 3, 1.0]))
    np.testing.assert_allclose(scale, [-1.0, 0.0, 1.0], atol=1e-12)
