"""Effects of an ablation on losses made by hand."""
import numpy as np
import pytest

from mha_jax.pruning.effects import DRAWS, effects

EARLY, LATE = (np.tile(np.array(w, bool), (4, 1)) for w in ([1, 1, 0, 0], [0, 0, 1, 1]))
WHOLE = np.tile(np.float32([4, 4, 1, 1]), (4, 1))  # ICL score -3
LINE = np.full((4, 4), 3.0)


def test_share_of_icl_removed_by_hand():
    """Late loss 1 -> 2.5 removes half of the 3 nats; early loss 4 -> 5 besides gives 1 - 2.5/3; late 4 is broken."""
    half, worse, broken = (np.tile(np.float32(x), (4, 1)) for x in ([4, 4, 2.5, 2.5], [5, 5, 2.5, 2.5], [4, 4, 4, 4]))
    found = effects(WHOLE, np.stack([half, worse, broken])[None], EARLY, LATE, LINE)
    np.testing.assert_allclose(found.icl_removed_S, [0.5, 1 - 2.5 / 3, 1])
    np.testing.assert_allclose(found.change_S, [0.75, 1.25, 1.5])
    np.testing.assert_allclose(found.icl_S, [-1.5, -2.5, 0])
    assert found.off_distribution_S.tolist() == [False, False, True]
    assert np.isnan(found.spread_S).all()
    np.testing.assert_allclose(found.icl_removed_S2[0], [0.5, 0.5])  # rows that are alike leave no doubt


def test_windows_are_ratios_of_sums():
    """Two rows with early windows of 1 and 3 tokens: their mean is over 4 tokens, not over two rows."""
    early, late = np.array([[1, 0, 0, 0, 0], [1, 1, 1, 0, 0]], bool), np.array([[0, 0, 0, 0, 1]] * 2, bool)
    loss = np.float32([[8, 0, 0, 0, 1], [4, 4, 4, 0, 1]])
    found = effects(loss, loss[None, None], early, late, np.zeros((2, 5)))
    assert found.early_S[0] == pytest.approx(5) and found.icl_removed_S[0] == pytest.approx(0)


def test_permutations_are_averaged_and_their_spread_said():
    a, b = np.tile(np.float32([4, 4, 1, 1]), (4, 1)), np.tile(np.float32([4, 4, 4, 4]), (4, 1))
    found = effects(WHOLE, np.stack([a, b])[:, None], EARLY, LATE, LINE)
    assert found.icl_removed_S[0] == pytest.approx(0.5)
    assert found.spread_S[0] == pytest.approx(np.std([0, 1], ddof=1) / np.sqrt(2))


def test_intervals_are_those_of_a_plain_bootstrap_loop():
    rng = np.random.default_rng(1)
    whole = rng.uniform(1, 3, (4, 4)).astype(np.float32) + 3 * EARLY
    cut = whole + rng.uniform(0, 1, (4, 4)).astype(np.float32)
    found = effects(whole, cut[None, None], EARLY, LATE, LINE, seed=7)
    draws = np.random.default_rng(7).multinomial(4, np.full(4, 0.25), size=DRAWS)
    change, removed = [], []
    for counts in draws:
        w, c = (np.repeat(x, counts, 0) for x in (whole.astype(np.float64), cut.astype(np.float64)))
        change.append(c.mean() - w.mean())
        removed.append(1 - (c[:, 2:].mean() - c[:, :2].mean()) / (w[:, 2:].mean() - w[:, :2].mean()))
    np.testing.assert_allclose(found.change_S2[0], np.quantile(change, [0.025, 0.975]), rtol=1e-9)
    np.testing.assert_allclose(found.icl_removed_S2[0], np.quantile(removed, [0.025, 0.975]), rtol=1e-9)
    assert found.change_S2[0, 0] < found.change_S[0] < found.change_S2[0, 1]


def test_more_rows_say_more():
    """Sixteen times the rows, drawn alike: a quarter of the width, and the estimate inside."""
    rng, width = np.random.default_rng(2), []
    for R in (25, 400):
        early, late = (np.tile(w[0], (R, 1)) for w in (EARLY, LATE))
        whole = rng.uniform(1, 3, (R, 4)).astype(np.float32) + 3 * early
        cut = whole + rng.uniform(0, 2, (2, R, 4)).astype(np.float32)
        found = effects(whole, cut[None], early, late, np.full((R, 4), 3.0))
        for value_S, interval_S2 in ((found.change_S, found.change_S2), (found.icl_removed_S, found.icl_removed_S2)):
            assert (interval_S2[:, 0] < value_S).all() and (value_S < interval_S2[:, 1]).all()
            width.append(interval_S2[:, 1] - interval_S2[:, 0])
    ratio = np.array(width[2:]) / np.array(width[:2])
    assert ratio.min() > 0.15 and ratio.max() < 0.4


def test_a_model_without_icl_has_no_share_to_lose():
    flat = np.ones((4, 4), np.float32)
    found = effects(flat, flat[None, None] + 1, EARLY, LATE, LINE)
    assert found.change_S[0] == pytest.approx(1) and found.icl_S[0] == 0 and np.isnan(found.icl_removed_S[0])
