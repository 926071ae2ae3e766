"""Orders of removal and their curves, against brute force."""
import numpy as np
import pytest

from mha_jax.model.interventions import ablate
from mha_jax.probes import induction
from mha_jax.pruning import ablation, curves, sets
from tests.pruning.test_ablation import rows, subject

pytestmark = pytest.mark.usefixtures("quick_module")


def losses(s, tokens, chosen):
    found = ablation.sweep(s, tokens, sets.mask(s, chosen), curves.ZERO)
    return found.loss_PSRT[0].mean((1, 2), dtype=np.float64)


def test_units_are_heads_or_groups_that_exist():
    s = subject(2, kept_heads=((0, 1), (), (1, 2, 3)))
    assert curves.units(s, "head") == [((0, 0),), ((0, 1),), ((2, 1),), ((2, 2),), ((2, 3),)]
    assert curves.units(s, "group") == [((0, 0), (0, 1)), ((2, 1),), ((2, 2), (2, 3))]


def test_lowest_score_goes_first():
    s = subject(2)
    score_LN = np.arange(12.0)[::-1].reshape(3, 4)
    assert curves.ascending(score_LN, curves.units(s, "head"), "head", 2)[:2] == [((2, 3),), ((2, 2),)]
    score_LK = np.array([[3, 1], [2, 9], [7, 8]])
    order = curves.ascending(score_LK, curves.units(s, "group"), "group", 2)
    assert order[0] == ((0, 2), (0, 3)) and order[1] == ((1, 0), (1, 1))


def test_scores_are_taken_again_after_every_cut():
    """A head counts for more once its left neighbour has gone: the second cut is another than the first score's."""
    s, seen = subject(4, num_layers=1), []

    def score(mask_LN):
        seen.append(mask_LN.copy())
        return np.array([[0.0, 1.0 if mask_LN[0, 0] else 5.0, 2.0, 3.0]])

    assert curves.rescored(score, s, "head", cuts=4) == [((0, 0),), ((0, 2),), ((0, 3),), ((0, 1),)]
    assert [int(m.sum()) for m in seen] == [4, 3, 2, 1]
    assert curves.rescored(score, s, "head", cuts=2)[:2] == [((0, 0),), ((0, 1),)]


@pytest.mark.parametrize("unit", ["head", "group"])
def test_greedy_and_single_orders_by_brute_force(unit):
    s = subject(2, num_layers=2)
    tokens, gone = rows(s), ()
    alone = losses(s, tokens, curves.units(s, unit))
    assert curves.by_single_loss(s, tokens, unit) == [curves.units(s, unit)[i] for i in np.argsort(alone)]
    for picked in curves.greedy(s, tokens, unit):
        left = [u for u in curves.units(s, unit) if not set(u) <= set(gone)]
        assert picked == left[int(losses(s, tokens, [gone + u for u in left]).argmin())]
        gone += picked


def test_a_curve_goes_from_the_whole_model_to_none_of_its_heads():
    s = subject(1)
    tokens, order = rows(s), curves.units(s, "head")[::-1]
    blocks = np.tile(rows(s, 5, 2)[:, :3], (1, 2))[None]
    found = curves.curve(s, tokens, order, blocks, np.array([0.1]))
    assert found.count_C.tolist() == list(range(13)) and found.heads_C[-1] == 12
    np.testing.assert_allclose(found.loss_CRT[0], ablation.whole_losses(s, tokens), atol=1e-6)
    assert found.loss_C[-1] == pytest.approx(losses(s, tokens, [tuple(s.heads)])[0])
    assert np.isnan(found.strength_C[-1]) and np.isfinite(found.strength_C[:-1]).all()
    assert found.loss_C[3] == pytest.approx(losses(s, tokens, [((2, 3), (2, 2), (2, 1))])[0])


def test_strength_on_the_way_is_the_best_of_the_heads_that_are_left():
    """From the patterns of a forward pass without the first heads of the order."""
    s = subject(2)
    blocks, order = np.tile(rows(s, 5, 2)[:, :3], (1, 2)), [((0, 1),), ((2, 3),), ((1, 0),)]
    found = curves.curve(s, rows(s), order, blocks[None], np.array([0.1]))
    for count, strength in enumerate(found.strength_C):
        gone = {h for heads in order[:count] for h in heads}
        cut = s.forward(blocks, capture=("pattern",), interventions=ablate(3, 4, gone))[1].pattern_LBNTS
        score_LN = np.asarray(induction.target_mass(cut, induction.prefix_targets(blocks)))
        best = max(score_LN[h] for h in s.heads if h not in gone)
        assert strength == pytest.approx((best - 0.1) / 0.9, abs=1e-5)


def test_a_model_whose_last_layer_is_empty_has_a_curve():
    s = subject(2, kept_heads=((0, 1), (2,), ()))
    blocks = np.tile(rows(s, 5, 2)[:, :3], (1, 2))[None]
    found = curves.curve(s, rows(s), curves.units(s, "head"), blocks, np.array([0.1]))
    assert np.isfinite(found.loss_CRT).all() and np.isfinite(found.strength_C[:-1]).all()


def test_removable_is_what_goes_before_the_loss_first_rises():
    loss = np.array([1.0, 1.005, 1.04, 1.0, 1.2])
    found = curves.Curve(np.arange(5), np.array([0, 2, 4, 6, 8]), np.broadcast_to(loss[:, None, None], (5, 1, 1)), loss)
    assert [found.removable(x) for x in (0.001, 0.01, 0.05, 0.5)] == [0, 2, 6, 8]


def test_a_long_curve_is_measured_one_by_one_at_first_then_every_twentieth():
    counts = curves.cut_counts(100)
    assert counts[:11].tolist() == list(range(11)) and counts[11:13].tolist() == [15, 20] and counts[-1] == 100
    assert curves.cut_counts(5).tolist() == [0, 1, 2, 3, 4, 5]
