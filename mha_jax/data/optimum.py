"""Exact optima and plateau strategies of the synthetic tasks, on the host in float64.

A row is x_0..x_T, U = T + 1 tokens, without a begin-of-sequence token; column t - 1 of every *_BT result
is the loss, in nats, of predicting x_t from x_0..x_{t-1}. Z_t is the probability of the first t tokens
under the generator with its latents summed out, so the Bayes loss at t is ln Z_t - ln Z_{t+1} and a row's
losses sum to ln Z_1 - ln Z_{T+1}. Sums over latents are log-sum-exps: Z_t underflows within a few hundred
tokens. Shape letters: B rows, U tokens of a row, T predictions, V vocabulary, K triggers.
"""

import numpy as np


def earlier_count(codes_BT):
    """How many earlier entries of the same row equal this one: integers (B, T), any integer codes.

    The rank of an entry inside its group under a stable sort, so the cost does not depend on the range of
    the codes (token pairs of a large vocabulary included).
    """
    order_BT = np.argsort(codes_BT, axis=1, kind="stable")
    sorted_BT = np.take_along_axis(codes_BT, order_BT, axis=1)
    index_BT = np.broadcast_to(np.arange(codes_BT.shape[1]), codes_BT.shape)
    is_start_BT = np.ones(codes_BT.shape, bool)
    is_start_BT[:, 1:] = sorted_BT[:, 1:] != sorted_BT[:, :-1]
    start_BT = np.maximum.accumulate(np.where(is_start_BT, index_BT, 0), axis=1)
    count_BT = np.empty(codes_BT.shape, np.int64)
    np.put_along_axis(count_BT, order_BT, index_BT - start_BT, axis=1)
    return count_BT


def pair_counts(tokens_BU, vocab_size):
    """Counts before each prediction, two integer arrays (B, T): n_ij, n_i.

    n_ij is how often x_{t-1} was followed by x_t, n_i how often x_{t-1} was followed by anything; the
    current x_{t-1} has no successor yet and is not counted.
    """
    codes_BT = tokens_BU[:, :-1].astype(np.int64) * vocab_size + tokens_BU[:, 1:]
    return earlier_count(codes_BT), earlier_count(tokens_BU)[:, :-1]


def add_constant_unigram(tokens_BU, vocab_size, constant):
    """In-context unigram: p(x_t = j) = (c_j + b) / (t + b V), c_j counted over x_0..x_{t-1}. Loss (B, T)."""
    count_BT = earlier_count(tokens_BU)[:, 1:]
    total_T = np.arange(1, tokens_BU.shape[1])
    return np.log(total_T + constant * vocab_size) - np.log(count_BT + constant)


def best_unigram(tokens_BU, vocab_size):
    """In-context unigram with the constant b that is best on these very rows. Loss (B, T)."""
    count_BT = earlier_count(tokens_BU)[:, 1:]
    total_BT = np.broadcast_to(np.arange(1, tokens_BU.shape[1]), count_BT.shape)
    # The loss depends on (count, total) alone: few distinct pairs, whatever the number of rows.
    both_P2 = np.stack([count_BT.ravel(), total_BT.ravel()], axis=1)
    pairs_P2, weight_P = np.unique(both_P2, axis=0, return_counts=True)
    count_P, total_P = pairs_P2.T

    def mean_loss(constant):
        return weight_P @ (np.log(total_P + constant * vocab_size) - np.log(count_P + constant))

    low, high = np.log(1e-9), np.log(1e9)
    for _ in range(8):  # each round keeps the two cells around the best of 33 points: 1/16 of the range
        grid = np.linspace(low, high, 33)
        best = int(np.argmin([mean_loss(constant) for constant in np.exp(grid)]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 32)]
    return add_constant_unigram(tokens_BU, vocab_size, np.exp(0.5 * (low + high)))


def repeat_log_evidence(tokens_BU, vocab_size, period_min, period_max, distinct):
    """ln Z_1..ln Z_{T+1} of rows that repeat a random block, (B, U); -inf where the generator cannot go.

    The period P is uniform on period_min..period_max and the block uniform over the V tokens, with
    (`distinct`) or without the condition that its tokens all differ. Given P, the first t tokens have the
    probability of a block prefix of min(P, t) tokens if x_s = x_{s-P} for all P <= s < t, else 0; a period
    longer than the row, a short block and an internally periodic one need no special case.
    """
    num_tokens = tokens_BU.shape[1]
    factor_P = vocab_size - (np.arange(period_max) if distinct else np.zeros(period_max))
    log_block_P = np.concatenate([[0.0], -np.cumsum(np.log(factor_P))])
    length_U = np.arange(1, num_tokens + 1)
    seen_BU = earlier_count(tokens_BU) > 0
    log_sum_BU = np.full(tokens_BU.shape, -np.inf)
    for period in range(period_min, period_max + 1):
        broken_BU = np.zeros(tokens_BU.shape, bool)
        if distinct:
            broken_BU[:, :period] = seen_BU[:, :period]
        if period < num_tokens:
            broken_BU[:, period:] = tokens_BU[:, period:] != tokens_BU[:, :-period]
        broken_BU = np.logical_or.accumulate(broken_BU, axis=1)
        log_prefix_U = log_block_P[np.minimum(period, length_U)]
        log_sum_BU = np.logaddexp(log_sum_BU, np.where(broken_BU, -np.inf, log_prefix_U))
    return log_sum_BU - np.log(period_max - period_min + 1)


def one_token_induction(tokens_BU, vocab_size):
    """What matching the previous token alone can reach on these rows. Loss (B, T).

    Without an earlier occurrence of x_{t-1} the prediction is uniform; with one it is
    lambda_t * (shares of the tokens that followed) + (1 - lambda_t) / V, lambda_t the best on these rows for
    position t (an induction head whose confidence is calibrated by position). Where every match is right,
    as with blocks of distinct tokens, lambda_t = 1 and the loss is exactly ln V or 0.
    """
    n_ij_BT, n_i_BT = pair_counts(tokens_BU, vocab_size)
    # Rows without a match get the uniform share, so that lambda has no effect on them.
    share_BT = np.where(n_i_BT > 0, n_ij_BT / np.maximum(n_i_BT, 1), 1 / vocab_size)
    low_T, high_T = np.zeros(share_BT.shape[1]), np.ones(share_BT.shape[1])
    for _ in range(60):  # bisection: the mean loss is convex in lambda, 60 halvings reach 1.0 itself
        middle_T = 0.5 * (low_T + high_T)
        slope_T = ((1 / vocab_size - share_BT) / (middle_T * share_BT + (1 - middle_T) / vocab_size)).sum(0)
        low_T, high_T = np.where(slope_T < 0, middle_T, low_T), np.where(slope_T < 0, high_T, middle_T)
    return -np.log(low_T * share_BT + (1 - low_T) / vocab_size)


def trigger_bayes(tokens_BU, table_VV, num_triggers, prior):
    """Bayes loss (B, T) of trigger bigrams; nan or inf where the generator cannot go.

    The last K tokens are candidates, each a trigger of its row with probability `prior`, independently; the
    other M = V - K tokens are the outputs. Successors of a trigger are one output, uniform over the M;
    successors of any other token a are draws from table_VV[a]. For a candidate with successors b_1..b_m the
    evidence is prior/M * [all equal and an output] + (1 - prior) * prod table[a, b_i], 1 for m = 0, and the
    loss is the log ratio of the evidence before and after. With prior = 1 (fixed triggers) this is ln M
    for a trigger's first output and 0 for its later ones.
    """
    vocab_size = table_VV.shape[0]
    num_outputs = vocab_size - num_triggers
    source_BT, target_BT = tokens_BU[:, :-1], tokens_BU[:, 1:]
    row_B = np.arange(len(tokens_BU))
    with np.errstate(divide="ignore", invalid="ignore"):
        log_bigram_BT = np.log(table_VV)[source_BT, target_BT]
        log_prior, log_other = np.log(prior), np.log1p(-prior)
        loss_BT = -log_bigram_BT
        for candidate in range(num_outputs, vocab_size):
            here_BT = source_BT == candidate
            first_B = target_BT[row_B, np.argmax(here_BT, axis=1)]
            is_other_BT = here_BT & ((target_BT != first_B[:, None]) | (target_BT >= num_outputs))
            is_other_BT = np.logical_or.accumulate(is_other_BT, axis=1)
            as_trigger_BT = np.where(is_other_BT, -np.inf, log_prior - np.log(num_outputs))
            as_other_BT = log_other + np.cumsum(np.where(here_BT, log_bigram_BT, 0.0), axis=1)
            started_BT = np.logical_or.accumulate(here_BT, axis=1)
            after_BT = np.where(started_BT, np.logaddexp(as_trigger_BT, as_other_BT), 0.0)
            before_BT = np.concatenate([np.zeros((len(row_B), 1)), after_BT[:, :-1]], axis=1)
            loss_BT = np.where(here_BT, before_BT - after_BT, loss_BT)
    return loss_BT


def trigger_no_icl(tokens_BU, table_VV, num_triggers, prior):
    """Loss (B, T) of the trigger task's best predictor that sees x_{t-1} alone: what was learned, no context.

    After a candidate: prior/M for an output plus (1 - prior) * table; after any other token: the table.
    With fixed triggers (prior = 1) every trigger output costs ln M.
    """
    num_outputs = table_VV.shape[0] - num_triggers
    marginal_VV = np.array(table_VV)
    marginal_VV[num_outputs:] *= 1 - prior
    marginal_VV[num_outputs:, :num_outputs] += prior / num_outputs
    with np.errstate(divide="ignore"):
        return -np.log(marginal_VV)[tokens_BU[:, :-1], tokens_BU[:, 1:]]


def markov_bayes(tokens_BU, num_states):
    """Bayes loss (B, T) of a Markov chain with Dirichlet(1) rows: p = (n_ij + 1) / (n_i + k).

    Exact because the first state is independent of the chain (Edelman et al. 2024, The Evolution of
    Statistical Induction Heads; a stationary start would add a factor to the posterior).
    """
    n_ij_BT, n_i_BT = pair_counts(tokens_BU, num_states)
    return np.log(n_i_BT + num_states) - np.log(n_ij_BT + 1)
