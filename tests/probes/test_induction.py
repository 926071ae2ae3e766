"""Prefix matching on patterns made by hand."""
import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.probes import induction


def look_back(length, back, start=0):
    """[T, S]: query t attends t - back from t = start + back on, before that to key 0."""
    pattern = np.zeros((length, length), np.float32)
    for t in range(length):
        pattern[t, t - back if t >= start + back else 0] = 1.0
    return pattern


def heads(*patterns, batch=1):
    """pattern_LBNTS of one layer from patterns [T, S] or [B, T, S]."""
    full = [np.broadcast_to(p, (batch, *p.shape[-2:])) for p in patterns]
    return jnp.asarray(np.stack(full, axis=1)[None])


@pytest.mark.parametrize("bos", [None, 63])
@pytest.mark.parametrize("period", [8, 16])
def test_fc_29_hand_made_heads(period, bos):
    extra = bos is not None
    length = 2 * period + extra
    tokens = induction.repeated_blocks(0, 64, period, length, 3, bos=bos)
    targets = induction.prefix_targets(tokens)
    resting = look_back(length, length)  # always on key 0: the BOS where there is one
    pattern = heads(
        look_back(length, period - 1), look_back(length, 1), look_back(length, period),
        induction.uniform_pattern(length), resting, batch=3,
    )  # fmt: skip
    scores = induction.target_mass(pattern, targets)[0]
    uniform = np.mean([1 / (t + 1) for t in range(period + extra, length)])
    np.testing.assert_array_equal(scores[jnp.array([0, 1, 2, 4])], [1.0, 0.0, 0.0, 0.0])
    assert scores[3] == pytest.approx(uniform, rel=1e-6)
    assert induction.chance(targets) == pytest.approx(uniform, rel=1e-6)
    assert induction.ceiling(targets) == 1.0
    if period == 8 and not extra:
        assert scores[3] == pytest.approx(0.0829, abs=5e-5)
        # The whole diagonal, with its one query from the first copy, is the trap: 0.889 for a perfect head.
        perfect = np.where(np.arange(16)[:, None] >= 8, look_back(16, 7), np.eye(16, dtype=np.float32))
        assert np.diagonal(perfect, -7).mean() == pytest.approx(0.889, abs=5e-4)
        assert induction.target_mass(heads(perfect, batch=3), targets)[0, 0] == 1.0


def test_fc_29_different_sequences_score_as_the_mean_of_single_ones():
    tokens = induction.repeated_blocks(1, 64, 8, 20, 4)
    assert len({tuple(row) for row in tokens}) == 4
    rng = np.random.default_rng(0)
    pattern = jnp.asarray(rng.dirichlet(np.ones(20), (2, 4, 3, 20)), jnp.float32)
    targets = induction.prefix_targets(tokens)
    single = [induction.target_mass(pattern[:, b : b + 1], targets[b : b + 1]) for b in range(4)]
    np.testing.assert_allclose(induction.target_mass(pattern, targets), np.mean(single, axis=0), atol=1e-6)


@pytest.mark.parametrize("bos", [None, 2])
def test_fc_29_special_ids_never_appear_and_bos_is_exactly_where_asked(bos):
    tokens = induction.repeated_blocks(0, 20, 10, 21, 200, exclude=(0, 7), bos=bos)
    assert tokens.shape == (200, 21) and tokens.dtype == np.int32
    body = tokens if bos is None else tokens[:, 1:]
    if bos is not None:
        assert (tokens[:, 0] == bos).all()
    assert set(np.unique(body)) == set(range(20)) - {0, 7} - {bos}
    assert all(len(set(row[:10])) == 10 for row in body)
    np.testing.assert_array_equal(body[:, 10:], body[:, : body.shape[1] - 10])


def test_blocks_depend_on_the_seed_only():
    first, again, other = (induction.repeated_blocks(s, 30, 8, 16, 5) for s in (3, 3, 4))
    assert (first == again).all() and (first != other).any()


@pytest.mark.parametrize(
    ("vocab", "period", "length", "bos"),
    [(64, 2, 16, None), (64, 9, 17, None), (64, 8, 16, 0), (8, 8, 17, 0)],
)
def test_blocks_that_cannot_be_are_refused(vocab, period, length, bos):
    with pytest.raises(ConfigError, match=f"has {period}: allowed is 3 to"):
        induction.repeated_blocks(0, vocab, period, length, 2, bos=bos)


def test_repeat_to_cuts_the_last_copy_and_keeps_bos_inside_the_length():
    np.testing.assert_array_equal(induction.repeat_to([[5, 6, 6]], 8, bos=1), [[1, 5, 6, 6, 5, 6, 6, 5]])
    np.testing.assert_array_equal(induction.repeat_to([[5, 6, 6]], 4), [[5, 6, 6, 5]])


def test_targets_agree_with_a_loop_over_the_definition():
    x = np.random.default_rng(2).integers(0, 4, (3, 12))
    prefix, duplicate = np.zeros((3, 12, 12), bool), np.zeros((3, 12, 12), bool)
    for b in range(3):
        for t in range(12):
            for j in range(t):
                if x[b, j] == x[b, t]:
                    duplicate[b, t, j] = True
                    if j + 1 < t:
                        prefix[b, t, j + 1] = True
    assert (x[:, 1:] == x[:, :-1]).any()  # the case j + 1 = t, which must not be a target, is there
    np.testing.assert_array_equal(induction.prefix_targets(x), prefix)
    np.testing.assert_array_equal(induction.duplicate_targets(x), duplicate)


def test_mass_sums_over_targets_and_averages_only_queries_with_one():
    tokens = jnp.array([[7, 1, 7, 2, 7]])  # only queries 2 (key 1) and 4 (keys 1 and 3) have targets
    pattern = np.zeros((5, 5), np.float32)
    pattern[2, :3] = 0.2, 0.5, 0.3
    pattern[4] = 0.1, 0.4, 0.1, 0.3, 0.1
    score = induction.target_mass(heads(pattern), induction.prefix_targets(tokens))
    assert score[0, 0] == pytest.approx((0.5 + 0.7) / 2)


def test_window_limits_chance_and_ceiling():
    tokens = induction.repeated_blocks(0, 64, 8, 24, 2)
    targets = induction.prefix_targets(tokens)
    assert induction.ceiling(targets, window=8) == 1.0  # itself and 7 before: just enough
    assert induction.chance(targets, window=8) == pytest.approx(1 / 8)
    assert induction.ceiling(targets, window=7) == 0.0 and induction.chance(targets, window=7) == 0.0
    by_hand = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]]
    np.testing.assert_allclose(induction.uniform_pattern(4, 2), by_hand)
    np.testing.assert_array_equal(induction.allowed_counts(4, 2), [1, 2, 2, 2])


@pytest.mark.parametrize(
    ("length", "vocab", "expected"),
    [
        (64, 64, (8, 16, 32)),
        (64, 16, (4, 8, 16)),
        (17, 64, (4, 8)),
        (12, 6, (3, 6)),
        (512, 50_000, (64, 128, 256)),
    ],
)
def test_default_periods_fit_two_copies_and_the_vocabulary(length, vocab, expected):
    assert induction.default_periods(length, vocab) == expected


def test_default_periods_refuse_what_is_too_small():
    with pytest.raises(ConfigError, match=r"config\.data\.length = 11,"):
        induction.default_periods(11, 64)


def test_a_positional_head_passes_one_period_and_fails_the_minimum():
    periods = induction.default_periods(64, 64)
    scores, chance = [], []
    for period in periods:
        targets = induction.prefix_targets(induction.repeated_blocks(0, 64, period, 64, 2))
        perfect = np.asarray(targets, np.float32)
        perfect /= np.maximum(perfect.sum(-1, keepdims=True), 1)
        removed = np.full((64, 64), np.nan)
        pattern = heads(look_back(64, 15), perfect, induction.uniform_pattern(64), removed, batch=2)
        scores.append(induction.target_mass(pattern, targets))
        chance.append(induction.chance(targets))
    positional, perfect, uniform = (np.stack(scores)[:, 0, n] for n in range(3))
    assert positional[1] == 1.0 and positional.min() < 0.05
    np.testing.assert_allclose(perfect, 1.0, rtol=1e-6)
    match = induction.prefix_matching(jnp.stack(scores), jnp.stack(chance))
    np.testing.assert_allclose(match.score_LN[0], [positional.min(), 1.0, uniform.min(), np.nan], rtol=1e-6)
    np.testing.assert_allclose(match.mean_LN[0, :2], [positional.mean(), 1.0], rtol=1e-6)
    np.testing.assert_allclose(match.strength_LN[0, 1:3], [1.0, 0.0], atol=1e-6)
    assert match.strength_LN[0, 0] < 0 and np.isnan(match.strength_LN[0, 3])
    assert [int(i) for i in induction.best_head(match.strength_LN)] == [0, 1]


def test_strength_is_the_minimum_over_periods_with_the_chance_that_set_it():
    scores = jnp.array([[[0.40, 0.9]], [[0.45, 0.6]]])  # PLN: two periods, two heads
    match = induction.prefix_matching(scores, jnp.array([0.1, 0.25]))
    np.testing.assert_allclose(match.score_LN, [[0.40, 0.6]], rtol=1e-6)
    np.testing.assert_allclose(match.strength_LN, [[0.20 / 0.75, 0.35 / 0.75]], rtol=1e-6)
    np.testing.assert_allclose(match.chance_LN, [[0.25, 0.25]])


def test_best_head_ignores_removed_heads():
    nan = jnp.nan
    best = induction.best_head
    assert [int(i) for i in best(jnp.array([[nan, -0.5, nan], [nan, -0.2, -0.3]]))] == [1, 1]
    assert [int(i) for i in best(jnp.full((2, 3), nan))] == [-1, -1]


def test_an_induction_head_matches_and_copies():
    strength, copying = jnp.array([[0.5, 0.49, 0.9, jnp.nan]]), jnp.array([[0.2, 0.9, 0.069, 0.9]])
    is_one = induction.is_induction_head(strength, copying, 0.04, 0.01)
    assert is_one.tolist() == [[True, False, False, False]]
