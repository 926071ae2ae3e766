"""The bigram line: a distribution, worked by hand, and as good as a Markov chain allows."""
import math

import numpy as np
import pytest

from mha_jax.data import bigram


@pytest.mark.parametrize("discount", [0.05, 0.5, 0.95])
def test_bigram_is_a_distribution_after_every_token(discount):
    flat = np.random.default_rng(0).integers(0, 6, 40)
    model = bigram.Bigram(*bigram.count_pairs(flat, 9), discount, 9)  # tokens 6, 7, 8 never occur
    for a in range(9):
        rows = np.array([[a, b] for b in range(9)])
        assert np.exp(-model.loss(rows)).sum() == pytest.approx(1, abs=1e-12)


def test_bigram_by_hand():
    # 0 1 0 1 0 2: pairs 01 twice, 10 twice, 02 once; second tokens 1 1 0 0 2, V = 4, p(b) = (n_b + 1) / 9.
    model = bigram.Bigram(*bigram.count_pairs(np.array([0, 1, 0, 1, 0, 2]), 4), 0.5, 4)
    expected = {
        (0, 1): 1.5 / 3 + 0.5 * 2 / 3 * 3 / 9,
        (0, 2): 0.5 / 3 + 0.5 * 2 / 3 * 2 / 9,
        (0, 3): 0.5 * 2 / 3 * 1 / 9,
        (1, 0): 1.5 / 2 + 0.5 / 2 * 3 / 9,
        (3, 0): 3 / 9,
    }
    for pair, p in expected.items():
        assert model.loss(np.array([pair]))[0, 0] == pytest.approx(-math.log(p), abs=1e-12)


def test_bigram_reaches_the_entropy_rate_of_a_markov_chain():
    rng = np.random.default_rng(0)
    table = rng.dirichlet([0.3] * 8, 8)
    chain = [0]
    for u in rng.random(60_000):
        chain.append(min(int(np.searchsorted(np.cumsum(table[chain[-1]]), u)), 7))
    train, test = np.array(chain[:40_000], np.uint16), np.array(chain[40_000:])[None]
    exact = -np.log(table[test[0, :-1], test[0, 1:]]).mean()
    assert bigram.fit(train, 8).loss(test).mean() == pytest.approx(exact, abs=0.003)


def test_bigram_discount_is_the_best_on_held_out_training_tokens():
    flat = np.random.default_rng(1).integers(0, 30, 2_000) // 2 * 2
    cut = len(flat) - 100
    part = bigram.count_pairs(flat[:cut], 40)
    candidates = {d: bigram.Bigram(*part, d / 100, 40) for d in range(5, 100, 5)}
    held_out = {d: model.loss(flat[None, cut - 1 :]).mean() for d, model in candidates.items()}
    assert bigram.fit(flat, 40).discount == min(held_out, key=held_out.get) / 100
