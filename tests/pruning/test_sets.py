"""Sets of heads by name, and their random controls, counted by hand."""
import pytest

from mha_jax.pruning import sets
from tests.pruning.test_ablation import subject


def names(found):
    return {n.name: n.heads for n in found}


@pytest.mark.parametrize("K", [4, 2, 1])
def test_heads_groups_layers_and_all_but_one(K):
    s = subject(K, num_layers=2)
    assert list(names(sets.single_heads(s))) == [f"L{i}H{n}" for i in range(2) for n in range(4)]
    groups = names(sets.groups(s))
    if K == 4:
        assert groups == {}  # a group of one head is that head
    else:
        assert groups["L1K0"] == tuple((1, n) for n in range(4 // K)) and len(groups) == 2 * K
    assert names(sets.layers(s))["layer 1"] == ((1, 0), (1, 1), (1, 2), (1, 3))
    assert names(sets.all_but_one(s))["only L0H2"] == ((0, 0), (0, 1), (0, 3))


def test_only_heads_that_exist():
    s = subject(2, kept_heads=((1,), (), (0, 3)))
    assert names(sets.single_heads(s)) == {"L0H1": ((0, 1),), "L2H0": ((2, 0),), "L2H3": ((2, 3),)}
    assert names(sets.groups(s)) == {"L0K0": ((0, 1),), "L2K0": ((2, 0),), "L2K1": ((2, 3),)}
    assert list(names(sets.all_but_one(s))) == ["only L2H0", "only L2H3"]
    assert sets.mask(s, [((2, 3),)])[0].tolist() == [[False] * 4, [False] * 4, [False, False, False, True]]


@pytest.mark.parametrize("head", [(0, 0), (1, 2), (0, -3), (-1, 3), (3, 0), (0, 4)])
def test_a_head_that_is_not_there_is_an_error(head):
    """Gone, counted from the end (which NumPy would read as a head that is there), or beyond the model."""
    with pytest.raises(ValueError, match=r"is not in this model"):
        sets.mask(subject(2, kept_heads=((1,), (), (0, 3))), [((0, 1), head)])


def test_controls_by_hand():
    """Of layer 1 heads 0 and 1 induce, the set takes 2: only 3 is left. Of layer 0 the set takes 0 and 1: 2 and 3."""
    s = subject(2)
    found, reason = sets.controls(s, ((0, 0), (0, 1), (1, 2)), [(1, 0), (1, 1)], seed=0)
    assert found == [((0, 2), (0, 3), (1, 3))] and reason is None
    found, reason = sets.controls(s, ((1, 0), (1, 1)), [(1, 0), (1, 1), (1, 2)], seed=0)
    assert (found, reason) == ([], "layer 1 has 1 spare head(s), the set takes 2")


def test_many_controls_are_drawn_once_each_and_the_same_again():
    s = subject(2, num_heads=8, d_model=32)
    wanted, never = ((0, 0), (1, 0)), [(0, 1)]
    every, _ = sets.controls(s, wanted, never, seed=0)
    assert len(every) == len(set(every)) == 6 * 7
    few, _ = sets.controls(s, wanted, never, seed=0, most=10)
    assert len(set(few)) == 10 and set(few) <= set(every)
    assert few == sets.controls(s, wanted, never, seed=0, most=10)[0]
    assert few != sets.controls(s, wanted, never, seed=1, most=10)[0]
