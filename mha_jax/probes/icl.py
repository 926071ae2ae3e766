"""In-context learning: how much lower the loss is late in a sequence than early in it.

B batch, T prediction, U = T + 1 tokens of a row, V vocabulary. A row is x_0..x_T; column t - 1 of a loss
array is L_t, the loss in nats of predicting x_t from x_0..x_{t-1}, t = 1..T. Every score is late minus early:
**negative is learning in context**.
"""
import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.config import ConfigError


def token_loss(logits_BTV, targets_BT):
    """Cross-entropy of each token in nats, float32 [B, T].

    The logits are cast before the softmax, not after: a loss taken in bfloat16 moves in steps of 1/16 nat.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT


def icl_score(loss_BT, early_BT, late_BT):
    """(score, standard error over sequences) in nats: mean loss in the late window minus in the early one.

    loss_BT float, early_BT and late_BT bool, or [T] when the windows are the same in every row. Each mean is
    over all tokens of its window, pooled over rows (a ratio of sums), so the score exists when rows have
    windows of different sizes or, some of them, none; with equal windows it is the mean of the rows' own
    scores. The standard error is that of the ratios linearised (delta method), rows being the independent
    units; with equal windows it is the usual s.e. of a mean. Rows with neither window do not count as
    sequences. Padding must be outside the masks. NaN when a window has no tokens; s.e. NaN for fewer than two
    sequences.
    """
    early_BT, late_BT = (jnp.broadcast_to(jnp.asarray(m, bool), loss_BT.shape) for m in (early_BT, late_BT))

    def window(mask_BT):
        """Mean over the window, and each row's first-order pull on that mean."""
        count_B = mask_BT.sum(1)
        sum_B = jnp.where(mask_BT, loss_BT.astype(jnp.float32), 0.0).sum(1)
        mean = sum_B.sum() / count_B.sum()
        return mean, (sum_B - mean * count_B) / count_B.sum()

    early, early_pull_B = window(early_BT)
    late, late_pull_B = window(late_BT)
    n = (early_BT | late_BT).any(1).sum()
    variance = n / (n - 1) * jnp.square(late_pull_B - early_pull_B).sum()
    return late - early, jnp.sqrt(variance)


def check_windows(early_BT, late_BT, key: str = "config.data.eval_rows"):
    """ConfigError when the frozen rows have no ICL score: in `trigger` the windows are where the triggers fell.

    Host function, masks bool [B, T]; `key` set their number. A score takes a token in each window, its standard
    error two rows with one.
    """
    early, late, rows = int(early_BT.sum()), int(late_BT.sum()), int((early_BT | late_BT).any(1).sum())
    if not early or not late or rows < 2:
        raise ConfigError(f"{key} = {len(early_BT)}, config.data.length = {early_BT.shape[1]}: the "
                          f"evaluation rows have {early} tokens in the early ICL window and {late} in the late one, in "
                          f"{rows} rows; allowed is 1 in each, in 2 rows: raise one or the other")  # fmt: skip


def olsson(loss_BT):
    """L_500 - L_50 in nats, the single indices of Olsson et al. 2022 (512 tokens); None when T < 500."""
    if loss_BT.shape[1] < 500:
        return None
    return (loss_BT[:, 499] - loss_BT[:, 49]).astype(jnp.float32).mean()


def copyable(tokens_BU):
    """bool [B, T], column t - 1: x_t is copyable, some j < t has x_{j-1} = x_{t-1} and x_j = x_t.

    What an induction head can predict. Each row must be one document: nothing here stops at a boundary.
    """
    context_BT, next_BT = tokens_BU[:, :-1], tokens_BU[:, 1:]
    same_BTS = context_BT[:, :, None] == context_BT[:, None, :]
    same_BTS &= next_BT[:, :, None] == next_BT[:, None, :]
    T = next_BT.shape[1]
    return (same_BTS & np.tri(T, k=-1, dtype=bool)).any(-1)


def windows_text(early_BT, late_BT):
    """The windows for the summary: {'early': [first t, last t], 'late': [...], 'same_in_every_row': bool}.

    Host function, masks [B, T] or [T]. t counts from 1. Where rows differ the range covers all of them; an
    empty window is None.
    """
    masks = {"early": np.atleast_2d(early_BT), "late": np.atleast_2d(late_BT)}
    text = {}
    for name, mask_BT in masks.items():
        t = np.flatnonzero(mask_BT.any(0)) + 1
        text[name] = [int(t[0]), int(t[-1])] if len(t) else None
    text["same_in_every_row"] = all(bool((m == m[0]).all()) for m in masks.values())
    return text
