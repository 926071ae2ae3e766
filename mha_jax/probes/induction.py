"""Prefix matching: does a head look at the token that followed the current token earlier in the sequence?

B batch, T query, S key, L layers, N query heads, P repeat lengths, V vocabulary. Olsson et al. 2022, with
their printed definition made exact in two places: the targets are the tokens that *followed* (their erratum),
and the attention on all targets of a query is summed before queries are averaged, so that a perfect head
scores 1. A removed head is NaN and stays NaN; nothing here lets it reach another head.
"""
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mha_jax.config import ConfigError

FORMED = 0.5  # strength from which a head counts as an induction head


def default_periods(length, vocab_size):
    """Three repeat lengths, each with two copies or more inside `length` tokens and at most `vocab_size`.

    A quarter, a half and all of the longest possible, from 3 up: (8, 16, 32) for 64 tokens. Several, because
    a head that always looks S - 1 back passes one of them. vocab_size: tokens that may be drawn, special ids
    not counted. ConfigError when fewer than two fit.
    """
    longest = min(length // 2, vocab_size)
    periods = tuple(s for s in (longest // 4, longest // 2, longest) if s >= 3)
    if len(periods) < 2:
        raise ConfigError(f"config.data.length = {length}, config.data.vocab_size = {vocab_size}: too small "
                          "for two repeat lengths of 3 or more: allowed are 12 or more and 6 or more")
    return periods


def repeated_blocks(rng_seed, vocab_size, period, length, num, exclude=(), bos=None):
    """int32 tokens [num, length]: in each row a block of `period` distinct tokens, repeated.

    exclude: token ids never drawn. bos: id put once in front, inside `length`, and never drawn; None for no
    BOS (a probe must have one exactly when the training rows do). ConfigError when the period is below 3 (1
    and 2 are the token itself and the one before), when two copies do not fit, or when there are too few
    tokens for the block.
    """
    allowed = np.setdiff1d(np.arange(vocab_size), [*exclude, *([] if bos is None else [bos])])
    room = length - (bos is not None)
    longest = min(room // 2, len(allowed))
    if not 3 <= period <= longest:
        raise ConfigError(f"config.probes.periods has {period}: allowed is 3 to {longest}, two copies in "
                          f"{room} places of a block drawn from {len(allowed)} tokens")
    rng = np.random.default_rng(rng_seed)
    blocks_BS = rng.permuted(np.tile(allowed, (num, 1)), axis=1)[:, :period]
    return repeat_to(blocks_BS, length, bos)


def repeat_to(blocks_BS, length, bos=None):
    """int32 tokens [B, length]: each block (random tokens, or a span of a corpus) repeated to fill a row."""
    blocks_BS = np.asarray(blocks_BS)
    room = length - (bos is not None)
    tokens_BT = blocks_BS[:, np.arange(room) % blocks_BS.shape[1]]
    if bos is not None:
        tokens_BT = np.concatenate([np.full_like(tokens_BT[:, :1], bos), tokens_BT], axis=1)
    return tokens_BT.astype(np.int32)


def prefix_targets(tokens_BT):
    """bool [B, T, S]: key s = j + 1 follows an earlier copy j < t of the query's token, and s < t.

    The query's own place is never a target: with x_{t-1} = x_t the follower is the query itself.
    """
    same_BTS = tokens_BT[:, :, None] == tokens_BT[:, None, :]
    follows_BTS = jnp.pad(same_BTS, ((0, 0), (0, 0), (1, 0)))[:, :, :-1]
    return follows_BTS & np.tri(tokens_BT.shape[1], k=-1, dtype=bool)


def duplicate_targets(tokens_BT):
    """bool [B, T, S]: key s < t holds the same token as the query."""
    same_BTS = tokens_BT[:, :, None] == tokens_BT[:, None, :]
    return same_BTS & np.tri(tokens_BT.shape[1], k=-1, dtype=bool)


def target_mass(pattern_LBNTS, targets_BTS):
    """Score [L, N] in [0, 1]: attention summed over a query's targets, averaged over queries that have any.

    Queries of all rows count alike. The pattern's B may be 1: one pattern for every row. NaN without targets.
    """
    pattern_LBNTS = pattern_LBNTS.astype(jnp.float32)
    mass_LBNT = jnp.where(targets_BTS[None, :, None], pattern_LBNTS, 0.0).sum(-1)
    return mass_LBNT.sum((1, 3)) / targets_BTS.any(-1).sum()


def allowed_counts(length, window=None):
    """int [T]: keys a causal query sees, itself included; `window` is the most it may see."""
    return np.minimum(np.arange(1, length + 1), length if window is None else window)


def uniform_pattern(length, window=None):
    """float32 [T, S]: the head that attends equally to every key it may see, which sets the chance levels."""
    ahead_TS = np.arange(length)[:, None] - np.arange(length)
    seen_TS = (ahead_TS >= 0) & (ahead_TS < allowed_counts(length, window)[:, None])
    return (seen_TS / allowed_counts(length, window)[:, None]).astype(np.float32)


def chance(targets_BTS, window=None):
    """`target_mass` of the uniform causal head on the same targets: what a head scores that knows nothing."""
    pattern_TS = jnp.asarray(uniform_pattern(targets_BTS.shape[1], window))
    return target_mass(pattern_TS[None, None, None], targets_BTS)[0, 0]


def ceiling(targets_BTS, window=None):
    """The highest possible `target_mass`: 1, or with a window the share of queries that see a target."""
    seen_TS = uniform_pattern(targets_BTS.shape[1], window) > 0
    return (targets_BTS & seen_TS).any(-1).sum() / targets_BTS.any(-1).sum()


def strength(score, chance):
    """(score - chance) / (1 - chance): 0 at chance, 1 for a perfect head, negative below chance."""
    return (score - chance) / (1.0 - chance)


class PrefixMatching(NamedTuple):
    """A head over all repeat lengths. score: the minimum over them (a positional head passes one, not all).

    strength_LN is the minimum over repeat lengths of each length's own strength, and chance_LN the chance
    level of the length that sets it. Lowest score and lowest strength can fall on different lengths, because
    short repeats have the higher chance; then strength is the lower of the two readings, and it never jumps
    during training.
    """

    score_LN: np.ndarray
    mean_LN: np.ndarray
    strength_LN: np.ndarray
    chance_LN: np.ndarray


def prefix_matching(scores_PLN, chance_P):
    """`PrefixMatching` from the scores at P repeat lengths and the chance level on the tokens of each (host)."""
    scores_PLN, chance_P = np.asarray(scores_PLN), np.asarray(chance_P)
    strength_PLN = strength(scores_PLN, chance_P[:, None, None])
    strength_LN = strength_PLN.min(0)
    chance_LN = np.where(np.isnan(strength_LN), np.nan, chance_P[strength_PLN.argmin(0)])
    return PrefixMatching(scores_PLN.min(0), scores_PLN.mean(0), strength_LN, chance_LN)


def best_head(strength_LN):
    """(layer, head) of the strongest head that exists; (-1, -1) when there is none. Host function."""
    if np.isnan(strength_LN).all():
        return -1, -1
    return tuple(int(i) for i in np.unravel_index(np.nanargmax(strength_LN), np.shape(strength_LN)))


def is_induction_head(strength_LN, copying_LN, copying_chance, copying_sd):
    """bool [L, N]: strength of 0.5 or more, and copying more than three sd above chance.

    Where that threshold is above 1, the most copying can be (fewer than five tokens to draw from), copying cannot
    be told from chance and matching alone decides.

    Both, as in Olsson et al. 2022. Matching alone is not enough: large models have heads that match the
    prefix and *lower* what followed. A removed head is False.
    """
    threshold = copying_chance + 3 * copying_sd
    return (strength_LN >= FORMED) & ((copying_LN > threshold) | (threshold >= 1))
