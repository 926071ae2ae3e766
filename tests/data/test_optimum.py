"""The exact predictors against hand-worked rows, enumeration of the latents, and published means."""

from fractions import Fraction
from itertools import pairwise, permutations, product
from math import factorial, log

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from mha_jax.data import optimum


def repeat_losses(tokens_BU, vocab_size, low, high, distinct):
    with np.errstate(invalid="ignore"):
        return -np.diff(optimum.repeat_log_evidence(np.array(tokens_BU), vocab_size, low, high, distinct))


@pytest.mark.parametrize(
    ("distinct", "row", "expected"),
    [
        (False, [0, 1, 0, 1, 0], [log(4), log(8 / 5), log(5 / 4), 0.0]),
        (False, [0, 0, 0, 0, 0], [log(4), log(8 / 5), 0.0, 0.0]),
        (True, [0, 1, 0, 1, 0], [log(3), log(2), 0.0, 0.0]),
        (True, [0, 1, 2, 0, 1], [log(3), log(4), 0.0, 0.0]),
    ],
)
def test_repeat_worked_rows(distinct, row, expected):
    np.testing.assert_allclose(repeat_losses([row], 4, 2, 3, distinct)[0], expected, rtol=0, atol=1e-12)


def enumerate_repeat(vocab_size, length, low, high, distinct):
    """Probability of every prefix, by running over every period and block."""
    total = {}
    for period in range(low, high + 1):
        if distinct:
            blocks = list(permutations(range(vocab_size), period))
        else:
            blocks = list(product(range(vocab_size), repeat=period))
        for block in blocks:
            row = tuple(block[t % period] for t in range(length + 1))
            for t in range(1, length + 2):
                share = Fraction(1, (high - low + 1) * len(blocks))
                total[row[:t]] = total.get(row[:t], 0) + share
    return total


def check_against_prefixes(total, loss_of_rows, length):
    """Every loss and every row's sum against the enumerated prefix probabilities, on every possible row."""
    rows = [prefix for prefix, z in total.items() if len(prefix) == length + 1 and z > 0]
    assert len(rows) > 10
    loss_BT = loss_of_rows(np.array(rows))
    log_z_BU = np.array([[log(total[row[:t]]) for t in range(1, length + 2)] for row in rows])
    np.testing.assert_allclose(loss_BT, -np.diff(log_z_BU), rtol=0, atol=1e-9)
    np.testing.assert_allclose(loss_BT.sum(1), log_z_BU[:, 0] - log_z_BU[:, -1], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("vocab_size", "length", "low", "high", "distinct"),
    [
        (3, 7, 1, 4, False),
        (2, 9, 2, 5, False),
        (3, 2, 1, 5, False),  # periods longer than the row
        (4, 7, 1, 4, True),
        (5, 3, 2, 5, True),  # periods longer than the row
    ],
)
def test_repeat_equals_enumeration(vocab_size, length, low, high, distinct):
    total = enumerate_repeat(vocab_size, length, low, high, distinct)
    check_against_prefixes(total, lambda x: repeat_losses(x, vocab_size, low, high, distinct), length)


def distinct_row(period, length=64):
    return np.arange(length + 1) % period


def test_repeat_distinct_total_and_mean():
    """Row total ln n + sum ln(V - t), depending on P alone, hence the exact mean over rows: 1.2238."""
    rows = np.array([distinct_row(period) for period in range(8, 33)])
    total_B = repeat_losses(rows, 64, 8, 32, True).sum(1)
    expected = [log(25) + sum(log(64 - t) for t in range(1, period)) for period in range(8, 33)]
    np.testing.assert_allclose(total_B, expected, rtol=0, atol=1e-9)
    assert round(total_B.mean() / 64, 4) == 1.2238


def test_one_token_induction_on_distinct_blocks():
    rows = np.array([distinct_row(period) for period in range(8, 33)])
    loss_BT = optimum.one_token_induction(rows, 64)
    expected_BT = np.where(np.arange(1, 65) <= np.arange(8, 33)[:, None], log(64), 0.0)
    np.testing.assert_allclose(loss_BT, expected_BT, rtol=0, atol=1e-12)
    assert round(loss_BT.mean(), 4) == 1.2997


def test_one_token_induction_uses_the_best_lambda_of_each_position():
    rng = np.random.default_rng(3)
    block_BP = rng.integers(0, 5, (200, 4))
    rows = block_BP[:, np.arange(13) % 4]
    loss_BT = optimum.one_token_induction(rows, 5)
    for t in range(1, 13):
        share = []
        for row in rows:
            followers = [row[s + 1] for s in range(t - 1) if row[s] == row[t - 1]]
            share.append(np.mean([f == row[t] for f in followers]) if followers else 0.2)
        weight = np.linspace(0, 1, 2001)[:-1, None]
        best = (-np.log(weight * np.array(share) + (1 - weight) / 5)).mean(1).min()
        assert best - 1e-3 < loss_BT[:, t - 1].mean() <= best + 1e-12


TABLE = np.array([[1, 4, 1, 2], [4, 1, 1, 2], [1, 1, 4, 2], [2, 2, 2, 2]]) / 8


def test_trigger_worked_row():
    row = np.array([[0, 3, 1, 3, 1, 0]])
    bayes = optimum.trigger_bayes(row, TABLE, 1, 1.0)[0]
    np.testing.assert_allclose(bayes, [log(4), log(3), log(4), 0.0, log(2)], rtol=0, atol=1e-12)
    assert abs(bayes.sum() - log(96)) < 1e-12
    assert abs(optimum.trigger_no_icl(row, TABLE, 1, 1.0).sum() - log(288)) < 1e-12


def test_random_triggers_worked_row():
    """rho = 1/2, M = 2, pi = 1/4: a successor seen once returns with 3/4, seen twice with 11/12."""
    table = np.full((4, 4), 1 / 4)
    row = np.array([[0, 2, 1, 2, 1, 2, 1]])
    bayes = optimum.trigger_bayes(row, table, 2, 0.5)[0]
    first = 0.5 / 2 + 0.5 / 4
    expected = -np.log([1 / 4, first, 1 / 4, 3 / 4, 1 / 4, 11 / 12])
    np.testing.assert_allclose(bayes, expected, rtol=0, atol=1e-12)
    no_icl = optimum.trigger_no_icl(row, table, 2, 0.5)[0]
    np.testing.assert_allclose(no_icl, -np.log([1 / 4, first] * 3), rtol=0, atol=1e-12)


def test_random_trigger_shown_to_be_none():
    """Two different successors, or one that is no output: a candidate follows its bigrams from then on."""
    table = np.full((4, 4), 1 / 4)
    bayes = optimum.trigger_bayes(np.array([[0, 2, 1, 2, 0, 2, 0], [0, 2, 3, 2, 3, 2, 0]]), table, 2, 0.5)
    np.testing.assert_allclose(bayes[0, [3, 5]], [-log(1 / 3 / 4), log(4)], rtol=0, atol=1e-12)
    np.testing.assert_allclose(bayes[1, [1, 3, 5]], [log(8), log(4), log(4)], rtol=0, atol=1e-12)


def enumerate_trigger(table, num_triggers, prior, length):
    """Probability of every prefix, over every set of triggers and every choice of their outputs."""
    vocab_size = len(table)
    num_outputs = vocab_size - num_triggers
    total = {}
    for active in product([False, True], repeat=num_triggers):
        weight = np.prod([prior if a else 1 - prior for a in active])
        for outputs in product(range(num_outputs), repeat=num_triggers):
            kernel = np.array(table)
            for slot in range(num_triggers):
                if active[slot]:
                    kernel[num_outputs + slot] = np.eye(vocab_size)[outputs[slot]]
            start = weight / num_outputs**num_triggers / num_outputs
            layer = {(x,): start for x in range(num_outputs)}
            for _ in range(length + 1):
                for prefix, z in layer.items():
                    total[prefix] = total.get(prefix, 0) + z
                layer = {
                    (*prefix, x): z * kernel[prefix[-1], x]
                    for prefix, z in layer.items()
                    for x in range(vocab_size)
                    if z * kernel[prefix[-1], x] > 0
                }
    return total


@pytest.mark.parametrize(("num_triggers", "prior"), [(1, 1.0), (2, 1.0), (1, 0.3), (2, 0.5), (2, 0.0)])
def test_trigger_equals_enumeration(num_triggers, prior):
    table = np.random.default_rng(5).dirichlet(np.ones(4), size=4)
    total = enumerate_trigger(table, num_triggers, prior, 5)
    check_against_prefixes(total, lambda x: optimum.trigger_bayes(x, table, num_triggers, prior), 5)


def test_markov_worked_row():
    row = np.array([[0, 0, 1, 0, 0]])
    bayes = optimum.markov_bayes(row, 2)[0]
    np.testing.assert_allclose(np.exp(-bayes), [1 / 2, 1 / 3, 1 / 2, 1 / 2], rtol=1e-12)
    unigram = optimum.add_constant_unigram(row, 2, 1.0)[0]
    np.testing.assert_allclose(np.exp(-unigram), [2 / 3, 1 / 4, 3 / 5, 2 / 3], rtol=1e-12)


@pytest.mark.parametrize(("num_states", "length"), [(2, 7), (3, 5)])
def test_markov_equals_dirichlet_integrals(num_states, length):
    """Z_t from the integral of each transition row over the simplex: (k-1)! prod n_ij! / (n_i + k - 1)!."""
    total = {}
    for size in range(1, length + 2):
        for prefix in product(range(num_states), repeat=size):
            counts = np.zeros((num_states, num_states), int)
            np.add.at(counts, (prefix[:-1], prefix[1:]), 1)
            z = Fraction(1, num_states)
            for row in counts.tolist():
                z *= Fraction(factorial(num_states - 1), factorial(sum(row) + num_states - 1))
                for n in row:
                    z *= factorial(n)
            total[prefix] = z
    check_against_prefixes(total, lambda x: optimum.markov_bayes(x, num_states), length)


def test_markov_k2_equals_quadrature():
    """The same for one row by quadrature over the two unknown probabilities (exact for polynomials)."""
    node, weight = np.polynomial.legendre.leggauss(40)
    node, weight = 0.5 * (node + 1), 0.5 * weight
    row = np.array([0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0])

    def log_z(prefix):
        z = 0.5
        for state in (0, 1):
            successors = prefix[1:][prefix[:-1] == state]
            z *= weight @ (node ** (successors == 0).sum() * (1 - node) ** (successors == 1).sum())
        return log(z)

    expected = [log_z(row[:t]) - log_z(row[: t + 1]) for t in range(1, len(row))]
    np.testing.assert_allclose(optimum.markov_bayes(row[None], 2)[0], expected, rtol=0, atol=1e-9)


def predictors():
    table = np.random.default_rng(7).dirichlet(np.ones(5), size=5)
    return {
        "repeat iid": lambda x: repeat_losses(x, 5, 2, 4, False),
        "repeat distinct": lambda x: repeat_losses(x, 5, 2, 4, True),
        "trigger": lambda x: optimum.trigger_bayes(x, table, 2, 1.0),
        "random trigger": lambda x: optimum.trigger_bayes(x, table, 2, 0.4),
        "no icl": lambda x: optimum.trigger_no_icl(x, table, 2, 1.0),
        "no icl, random": lambda x: optimum.trigger_no_icl(x, table, 2, 0.4),
        "markov": lambda x: optimum.markov_bayes(x, 5),
        "unigram": lambda x: optimum.add_constant_unigram(x, 5, 0.3),
    }


@pytest.mark.parametrize("name", predictors())
@pytest.mark.parametrize("row", [[0, 3, 1, 0, 3, 1, 0, 3], [4, 0, 4, 0, 4, 0, 4, 0]])
def test_next_token_probabilities_sum_to_one(name, row):
    """Both rows are possible under every one of the laws (the period may be 2 or 3; triggers 3 and 4)."""
    for t in range(1, len(row)):
        continuations = np.array([[*row[:t], token] for token in range(5)])
        p_V = np.exp(-predictors()[name](continuations)[:, -1])
        assert (p_V >= 0).all()
        assert abs(p_V.sum() - 1) < 1e-12


def test_earlier_count_and_pair_counts():
    rows = np.random.default_rng(2).integers(0, 4, (6, 30))
    count = [[(row[:t] == row[t]).sum() for t in range(30)] for row in rows]
    np.testing.assert_array_equal(optimum.earlier_count(rows), count)
    n_ij, n_i = optimum.pair_counts(rows, 4)
    for b, row in enumerate(rows):
        for t in range(1, 30):
            pairs = list(pairwise(row[:t]))
            assert n_ij[b, t - 1] == pairs.count((row[t - 1], row[t]))
            assert n_i[b, t - 1] == sum(a == row[t - 1] for a, _ in pairs)


@pytest.mark.parametrize("vocab_size", [3, 40])
def test_best_unigram_is_the_minimum(vocab_size):
    rows = np.random.default_rng(2).zipf(1.5, (50, 60)) % vocab_size

    def mean_loss(log_constant):
        return optimum.add_constant_unigram(rows, vocab_size, np.exp(log_constant)).mean()

    oracle = minimize_scalar(mean_loss, bounds=(-12, 12), method="bounded", options={"xatol": 1e-10})
    assert -11 < oracle.x < 11
    assert abs(optimum.best_unigram(rows, vocab_size).mean() - oracle.fun) < 1e-12
