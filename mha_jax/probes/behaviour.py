"""What each head does besides induction: where it looks, how sharply, what it copies, how heads differ.

B batch, T query, S key, J sample token, D model, V vocabulary, L layers, N query heads. Scores read the
pattern of a causal model and use queries t >= 1, since query 0 has only itself to look at. A causal model has
no next-token heads. `uniform_values` gives each score for the head that attends equally to all it may see. A
removed head is NaN, stays NaN and is left out of the comparison of heads.
"""
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.probes.induction import duplicate_targets, target_mass, uniform_pattern

# Scores of a head besides prefix matching, in the order of tables and pictures.
HEAD_SCORES = ("previous_token", "duplicate_token", "first_token", "self", "copying", "entropy", "confidence")


def previous_token(pattern_LBNTS):
    """[L, N]: mean attention to the token before, A[t, t-1] (Olsson et al. 2022; on training-like text)."""
    return _diagonal(pattern_LBNTS, 1).mean((1, 3))


def self_attention(pattern_LBNTS):
    """[L, N]: mean attention to the query's own place, A[t, t]."""
    return _diagonal(pattern_LBNTS, 0)[..., 1:].mean((1, 3))


def first_token(pattern_LBNTS):
    """[L, N]: mean attention to the first token, A[t, 0]; high also in heads that only rest there."""
    return pattern_LBNTS[..., 1:, 0].astype(jnp.float32).mean((1, 3))


def confidence(pattern_LBNTS):
    """[L, N]: mean over queries of the largest weight (Voita et al. 2019)."""
    pattern_LBNTS = pattern_LBNTS[..., 1:, :].astype(jnp.float32)
    # Compiled for CPU, a maximum can lose a NaN: a removed head must stay one.
    return jnp.where(jnp.isnan(pattern_LBNTS[..., 0]), jnp.nan, pattern_LBNTS.max(-1)).mean((1, 3))


def duplicate_token(pattern_LBNTS, tokens_BT):
    """[L, N]: attention on earlier copies of the query's token, over the queries that have one."""
    return target_mass(pattern_LBNTS, duplicate_targets(tokens_BT))


def _diagonal(pattern_LBNTS, back):
    return jnp.diagonal(pattern_LBNTS, offset=-back, axis1=-2, axis2=-1).astype(jnp.float32)


def uniform_values(tokens_BT, window=None):
    """The scores above for the uniform causal head, by name: chance on the same tokens and window."""
    pattern_111TS = jnp.asarray(uniform_pattern(tokens_BT.shape[1], window))[None, None, None]
    values = {
        "previous_token": previous_token(pattern_111TS),
        "self": self_attention(pattern_111TS),
        "first_token": first_token(pattern_111TS),
        "confidence": confidence(pattern_111TS),
        "duplicate_token": duplicate_token(pattern_111TS, tokens_BT),
    }
    return {name: value[0, 0] for name, value in values.items()}


def with_sink(pattern):
    """Adds the mass that a sink logit took, 1 - row sum, as one more key [..., S + 1]."""
    pattern = pattern.astype(jnp.float32)
    rest = jnp.maximum(1.0 - pattern.sum(-1, keepdims=True), 0.0)  # rounding may leave -1e-7
    return jnp.concatenate([pattern, rest], axis=-1)


def row_entropy(pattern):
    """Entropy in nats of each row of [..., T, S]; 0 ln 0 = 0."""
    return jax.scipy.special.entr(pattern.astype(jnp.float32)).sum(-1)


def entropy(pattern_LBNTS, allowed_T, sink=False):
    """[L, N] in [0, 1]: sum over t >= 1 of H_t over the sum of ln(number of allowed keys at t).

    A ratio of sums: 1 for uniform attention at any length (dividing by ln T would call a uniform causal head
    focused). allowed_T: keys each query may see, [T] or [B, T]. sink: the model has a sink logit, whose mass
    is then one more outcome, in H_t and in the count.
    """
    if sink:
        pattern_LBNTS, allowed_T = with_sink(pattern_LBNTS), jnp.asarray(allowed_T) + 1
    B, T = pattern_LBNTS.shape[1], pattern_LBNTS.shape[3]
    most_BT = jnp.log(jnp.broadcast_to(jnp.maximum(jnp.asarray(allowed_T, jnp.float32), 1.0), (B, T)))
    return row_entropy(pattern_LBNTS[..., 1:, :]).sum((1, 3)) / most_BT[:, 1:].sum()


class Disagreement(NamedTuple):
    """Mean over pairs of heads, then over sequences: all pairs, pairs inside a KV group, pairs across groups.

    Each [L]; NaN where there is no such pair (one head, MHA inside, MQA across).
    """

    all_L: jax.Array
    inside_L: jax.Array
    across_L: jax.Array


def disagreement_cosine(pattern_LBNTS, group_size=1):
    """`Disagreement`, each 1 - cos(vec A_a, vec A_b) per sequence, rows t >= 1: 0 identical, 1 disjoint.

    group_size: query heads of one KV head. Patterns are never averaged over the batch first: heads that
    differ on every sequence can agree on average.
    """
    return _over_pairs(cosine_distances(pattern_LBNTS[..., 1:, :]), group_size)


def disagreement_js(pattern_LBNTS, group_size=1, sink=False):
    """`Disagreement`, each the mean over rows t >= 1 of the Jensen-Shannon divergence over ln 2: 0 to 1.

    sink: the model has a sink logit; its mass counts as one more key.
    """
    pattern_LBNTS = pattern_LBNTS[..., 1:, :]
    return _over_pairs(js_distances(with_sink(pattern_LBNTS) if sink else pattern_LBNTS), group_size)


def cosine_distances(pattern_LBNTS):
    """[P, L, B] over the P = N(N-1)/2 pairs of heads, as np.triu_indices orders them: 1 - cos of patterns.

    All rows given count. From |a - b|^2 rather than a.b: identical heads give exactly 0, near ones keep their
    digits.
    """

    def distance(a_LBTS, b_LBTS):
        norm_a_LB, norm_b_LB = (jnp.sqrt(jnp.square(x_LBTS).sum((-2, -1))) for x_LBTS in (a_LBTS, b_LBTS))
        apart_LB = jnp.square(a_LBTS - b_LBTS).sum((-2, -1)) - jnp.square(norm_a_LB - norm_b_LB)
        return jnp.maximum(apart_LB, 0.0) / (2 * norm_a_LB * norm_b_LB)

    return _each_pair(distance, pattern_LBNTS)


def js_distances(pattern_LBNTS):
    """[P, L, B] over pairs of heads: mean over rows of the Jensen-Shannon divergence in units of ln 2."""

    def distance(p_LBTS, q_LBTS):
        # With d = (p - q) / (p + q) a key adds (p + q) / 4 [(1 + d) ln(1 + d) + (1 - d) ln(1 - d)]:
        # exactly 0 at p = q. The clip is for devices whose p / p is not quite 1.
        total_LBTS = p_LBTS + q_LBTS
        d_LBTS = jnp.clip((p_LBTS - q_LBTS) / jnp.where(total_LBTS == 0, 1.0, total_LBTS), -1.0, 1.0)
        xlog1py = jax.scipy.special.xlog1py
        js_LBTS = total_LBTS / 4 * (xlog1py(1 + d_LBTS, d_LBTS) + xlog1py(1 - d_LBTS, -d_LBTS))
        return js_LBTS.sum(-1).mean(-1) / np.log(2)

    return _each_pair(distance, pattern_LBNTS)


def _each_pair(distance, pattern_LBNTS):
    """One pair at a time: all of them at once would take N/2 times the memory of the pattern."""
    pattern_NLBTS = jnp.moveaxis(pattern_LBNTS, 2, 0).astype(jnp.float32)
    pairs = tuple(jnp.asarray(i) for i in np.triu_indices(pattern_NLBTS.shape[0], 1))
    return jax.lax.map(lambda ab: distance(pattern_NLBTS[ab[0]], pattern_NLBTS[ab[1]]), pairs)


def _over_pairs(distance_PLB, group_size):
    """Means over the pairs of heads that exist, then over sequences."""
    N = round((1 + np.sqrt(1 + 8 * distance_PLB.shape[0])) / 2)
    a_P, b_P = np.triu_indices(N, 1)
    inside_P = a_P // group_size == b_P // group_size

    def mean(chosen_P):
        used_PLB = chosen_P[:, None, None] & ~jnp.isnan(distance_PLB)
        return (jnp.where(used_PLB, distance_PLB, 0.0).sum(0) / used_PLB.sum(0)).mean(1)

    return Disagreement(mean(np.ones_like(inside_P)), mean(inside_P), mean(~inside_P))


def fold_final_norm(gain_D, unembedding_DV, centred):
    """The map from a head's output to logits, final norm frozen: gain folded in, and centring when LayerNorm.

    gain_D: the norm's scale, or None. centred: True for LayerNorm, False for RMSNorm or none. The frozen
    norm's division by a size is left out: copying is a ratio within one source, where it cancels.
    """
    if gain_D is not None:
        unembedding_DV = gain_D[:, None] * unembedding_DV
    return unembedding_DV - unembedding_DV.mean(0) if centred else unembedding_DV


def copying(result_LBNSD, unembedding_DV, tokens_BS):
    """Copying score [L, N] in [0, 1], logit form (Olsson et al. 2022): does attending a token raise it?

    result_LBNSD: what head n would write if it attended source s alone, the OV output of the normed residual
    at s. unembedding_DV: to logits, final norm folded in (`fold_final_norm`). tokens_BS: the sample,
    different tokens in each row, no BOS. u = logits of the result minus their mean over the vocabulary; p_s =
    relu(u[x_s]) over the sum of relu(u) over the row's tokens, 0 where none is raised; the score is the mean
    of p_s. Chance is 1/S (`copying_chance`), the ceiling 1. Only the sample's columns are ever multiplied,
    never [.., S, V].
    """
    unembedding_DV = unembedding_DV.astype(jnp.float32)
    columns_DBJ = (unembedding_DV - unembedding_DV.mean(1, keepdims=True))[:, tokens_BS]
    result_LBNSD = result_LBNSD.astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST  # the default rounds to bf16 on TPU
    logits_LBNSJ = jnp.einsum("LBNSD,DBJ->LBNSJ", result_LBNSD, columns_DBJ, precision=exact)
    raise_LBNSJ = jax.nn.relu(logits_LBNSJ)
    own_LBNS = jnp.diagonal(raise_LBNSJ, axis1=-2, axis2=-1)
    total_LBNS = raise_LBNSJ.sum(-1)
    share_LBNS = own_LBNS / jnp.where(total_LBNS == 0, 1.0, total_LBNS)
    return share_LBNS.mean((1, 3))


def copying_chance(tokens_BS):
    """(chance, sd) of `copying` for random heads on the sample tokens_BS. Host function.

    For logits independent normal over tokens a share has mean 1/S and variance close to (pi - 1) / S^2. A
    token gives nearly the same share wherever it stands, so the mean over the sample has as many independent
    terms as there are different tokens. (Random low-rank heads, simulated: sd within 12 %.)
    """
    S = tokens_BS.shape[1]
    return 1.0 / S, float(np.sqrt((np.pi - 1) / len(np.unique(tokens_BS))) / S)


def olsson_scale(p):
    """4p / (1 + p) - 1 in [-1, 1]: `copying` on the scale of Olsson et al. 2022, as we read it.

    They give the ratio of the raise of the token to that of all tokens of the sample as lying in 0 to 0.5,
    which holds when the token is counted twice below the line, p / (1 + p); four times that less one is their
    range.
    """
    return 4 * p / (1 + p) - 1
