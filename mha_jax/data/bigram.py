"""The bigram line of text: what a model reaches that knows which token follows which, and no more context.

R rows, U tokens of a row, T predictions, V vocabulary.
"""
import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bigram:
    """A smoothed bigram model: p(b|a) = max(n_ab - d, 0) / n_a + d m_a / n_a p(b), absolute discounting
    interpolated with the unigram p(b) = (n_b + 1) / (n + V) (Ney, Essen and Kneser 1994); m_a = different
    successors of a. After an a never seen, p(b)."""

    codes: np.ndarray  # sorted a V + b of the pairs seen
    counts: np.ndarray
    discount: float
    vocab_size: int

    @functools.cached_property
    def _margins(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first, second = np.divmod(self.codes, self.vocab_size)
        total_V = np.bincount(first, self.counts, self.vocab_size)
        different_V = np.bincount(first, minlength=self.vocab_size)
        unigram_V = np.bincount(second, self.counts, self.vocab_size) + 1
        return total_V, different_V, unigram_V / unigram_V.sum()

    def loss(self, tokens_RU: np.ndarray) -> np.ndarray:
        """-ln p(x_t|x_{t-1}), [R, T] in nats."""
        total_V, different_V, unigram_V = self._margins
        first_RT, second_RT = tokens_RU[:, :-1].astype(np.int64), tokens_RU[:, 1:]
        code_RT = first_RT * self.vocab_size + second_RT
        place_RT = np.minimum(np.searchsorted(self.codes, code_RT), len(self.codes) - 1)
        count_RT = np.where(self.codes[place_RT] == code_RT, self.counts[place_RT], 0)
        total_RT = total_V[first_RT]
        seen_RT = (
            np.maximum(count_RT - self.discount, 0)
            + self.discount * different_V[first_RT] * unigram_V[second_RT]
        )
        return -np.log(np.where(total_RT > 0, seen_RT / np.maximum(total_RT, 1), unigram_V[second_RT]))


def fit(flat: np.ndarray, vocab_size: int) -> Bigram:
    """The bigram model of a token stream [n], n >= 2. Its discount (0.05, 0.10, .. 0.95) is the one that
    predicts the last twentieth best when the counts are of the rest; the counts are then taken of the whole.
    No validation token is used."""
    cut = len(flat) - max(1, len(flat) // 20)
    part = count_pairs(flat[:cut], vocab_size)
    candidates = (Bigram(*part, d / 100, vocab_size) for d in range(5, 100, 5))
    best = min(candidates, key=lambda bigram: bigram.loss(flat[None, cut - 1 :]).mean())
    return Bigram(*count_pairs(flat, vocab_size), best.discount, vocab_size)


def count_pairs(flat: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of a token stream [n] as sorted codes a V + b, and how often each occurs."""
    return np.unique(flat[:-1].astype(np.int64) * vocab_size + flat[1:], return_counts=True)
