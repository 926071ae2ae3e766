"""Synthetic tasks whose optimal loss is known exactly: repeated blocks, trigger bigrams, Markov chains.

Each task is a hashable frozen dataclass. `row` is pure JAX and makes one row x_0..x_T of U = T + 1 tokens,
without a begin-of-sequence token, from one key: a row is a function of (seed, item) alone, whatever the
sharding. No draw depends on a rounded device sum, so batch size and platform cannot flip a token either.
`lines` gives, on the host in float64, the loss of the Bayes-optimal predictor and of the strategies a model
passes on its way there, on the very rows the model is evaluated on.
Losses are in nats; column t - 1 of a *_BT array belongs to the prediction of x_t.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.data import optimum


def rows(task, seed, items_B):
    """Rows of the items: int32 (B, U). Row of item i is `task.row(fold_in(key(seed), i))`.

    seed may be traced. The generator is named and every draw has an explicit type, so that neither
    jax_default_prng_impl nor jax_enable_x64 changes the data.
    """
    root = jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(lambda item: task.row(jax.random.fold_in(root, item)))(jnp.asarray(items_B))


def default_windows(length):
    """Early and late windows over predictions t = 1..T, bool (T,) each: [0.05 T, 0.15 T] and [0.9 T, T].

    Not the single indices 50 and 500 of Olsson et al. (2022), whose standard error is several times
    larger. Raises ValueError when no t lies in the early window.
    """
    t_T = np.arange(1, length + 1)
    # In integers: 0.15 * length can round below an index that belongs to the window.
    early_T = (100 * t_T >= 5 * length) & (100 * t_T <= 15 * length)
    _require(early_T.any(), f"length: {length} leaves the window 0.05 T..0.15 T empty, at least 7 needed")
    return early_T, 10 * t_T >= 9 * length


@dataclass(frozen=True)
class Repeat:
    """A random block of P tokens repeated to the end: x_t = block[t mod P], P uniform on period_min..max.

    P is drawn per row and never shown; it may exceed the row. block 'distinct': the block's tokens all
    differ (needs vocab_size >= period_max), so the previous token settles the next one; 'iid': uniform draws.
    Periods vary because at one fixed period a positional shortcut does as well as an induction head.
    """

    vocab_size: int
    length: int
    period_min: int
    period_max: int
    block: str
    plateau: ClassVar[str] = "unigram"

    def __post_init__(self):
        low, high = self.period_min, self.period_max
        _require(1 <= low <= high, f"period_min..period_max: {low}..{high} is empty or below 1")
        _require(self.block in ("distinct", "iid"), f"block: {self.block!r} is not 'distinct' or 'iid'")
        fits = self.block == "iid" or self.vocab_size >= high
        _require(fits, f"vocab_size: {self.vocab_size} < period_max {high}, no distinct blocks")

    def row(self, key):
        """One row, int32 (U,), from one key."""
        period_key, block_key = jax.random.split(key)
        period = jax.random.randint(period_key, (), self.period_min, self.period_max + 1, jnp.int32)
        if self.block == "distinct":
            block = jax.random.permutation(block_key, self.vocab_size)
        else:
            block = jax.random.randint(block_key, (self.period_max,), 0, self.vocab_size, jnp.int32)
        return block[jnp.arange(self.length + 1) % period].astype(jnp.int32)

    def lines(self, tokens_BU):
        """Losses (B, T): bayes, uniform, unigram (best add-b counts), induction (one-token match).

        Raises ValueError on rows that this task cannot make.
        """
        tokens_BU = np.asarray(tokens_BU)
        law = (self.vocab_size, self.period_min, self.period_max, self.block == "distinct")
        log_evidence_BU = optimum.repeat_log_evidence(tokens_BU, *law)
        _require_possible(log_evidence_BU)
        return {
            "bayes": -np.diff(log_evidence_BU, axis=1),
            "uniform": _uniform(tokens_BU, self.vocab_size),
            "unigram": optimum.best_unigram(tokens_BU, self.vocab_size),
            "induction": optimum.one_token_induction(tokens_BU, self.vocab_size),
        }

    def parts(self, tokens_BU):
        """No named parts."""
        return {}

    def icl_windows(self, tokens_BU):
        """Early t < period_min, late t > period_max: bool (B, T) each. ValueError when either is empty."""
        t_T = np.arange(1, self.length + 1)
        early_T, late_T = t_T < self.period_min, t_T > self.period_max
        _require(early_T.any(), f"period_min: {self.period_min} leaves no t below it, at least 2 needed")
        _require(late_T.any(), f"period_max: {self.period_max} leaves no t above it in length {self.length}")
        return _for_each_row(early_T, late_T, tokens_BU)


@dataclass(frozen=True)
class Trigger:
    """Bigrams of a fixed table, except that a trigger is always followed by its row's own output token.

    After Bietti et al. (2023, Birth of a Transformer). The last num_triggers (K) tokens are the triggers,
    the other M = V - K the outputs, so no trigger leads to a trigger. The table depends on table_seed
    alone: each row gives trigger_rate / K to every trigger and (1 - trigger_rate) * Dirichlet(alpha) to the
    outputs. x_0 and each trigger's output are uniform over the outputs, drawn per row.
    With random_triggers every one of the K is a trigger of the row with probability trigger_prior,
    independently, and otherwise follows the table like any other token.
    """

    vocab_size: int
    length: int
    num_triggers: int
    trigger_rate: float
    dirichlet_alpha: float
    table_seed: int
    random_triggers: bool
    trigger_prior: float
    plateau: ClassVar[str] = "no_icl"

    def __post_init__(self):
        most = self.vocab_size - 1
        _require(1 <= self.num_triggers <= most, f"num_triggers: {self.num_triggers} is not in 1..{most}")
        _require(0 < self.trigger_rate < 1, f"trigger_rate: {self.trigger_rate} is not between 0 and 1")
        _require(self.dirichlet_alpha > 0, f"dirichlet_alpha: {self.dirichlet_alpha} is not positive")
        _require(0 <= self.trigger_prior <= 1, f"trigger_prior: {self.trigger_prior} is not in 0..1")

    @property
    def num_outputs(self):
        """M = V - K; tokens below it are outputs, the others triggers."""
        return self.vocab_size - self.num_triggers

    @property
    def prior(self):
        """Probability that a candidate is a trigger: 1 with fixed triggers."""
        return self.trigger_prior if self.random_triggers else 1.0

    @property
    def table_VV(self):
        """Transition probabilities, float64 (V, V); the rows of tokens that are triggers play no part."""
        law = (self.num_triggers, self.trigger_rate, self.dirichlet_alpha, self.table_seed)
        return _bigram_table(self.vocab_size, *law)

    def row(self, key):
        """One row, int32 (U,), from one key."""
        start_key, output_key, active_key, chain_key = jax.random.split(key, 4)
        start = jax.random.randint(start_key, (), 0, self.num_outputs, jnp.int32)
        output_K = jax.random.randint(output_key, (self.num_triggers,), 0, self.num_outputs, jnp.int32)
        active_K = jax.random.uniform(active_key, (self.num_triggers,), jnp.float32) < self.prior
        # Without the last edge, which rounding may leave below 1: no draw can exceed V - 1.
        edges_VE = jnp.asarray(np.cumsum(self.table_VV, axis=1)[:, :-1], jnp.float32)

        def next_token(token, uniform):
            slot = jnp.maximum(token - self.num_outputs, 0)
            is_trigger = (token >= self.num_outputs) & active_K[slot]
            return jnp.where(is_trigger, output_K[slot], _inverse_cdf(edges_VE[token], uniform))

        return _walk(next_token, start, chain_key, self.length)

    def lines(self, tokens_BU):
        """Losses (B, T): bayes, uniform, unigram (best add-b counts), no_icl (the table and no context).

        Raises ValueError on rows that this task cannot make.
        """
        tokens_BU = np.asarray(tokens_BU)
        bayes_BT = optimum.trigger_bayes(tokens_BU, self.table_VV, self.num_triggers, self.prior)
        _require_possible(bayes_BT)
        return {
            "bayes": bayes_BT,
            "uniform": _uniform(tokens_BU, self.vocab_size),
            "unigram": optimum.best_unigram(tokens_BU, self.vocab_size),
            "no_icl": optimum.trigger_no_icl(tokens_BU, self.table_VV, self.num_triggers, self.prior),
        }

    def parts(self, tokens_BU):
        """Predictions after a non-trigger, of triggers' first and of their later outputs, bool (B, T) each.

        Empty with random triggers: which tokens were triggers is not in the row.
        """
        if self.random_triggers:
            return {}
        source_BT = np.asarray(tokens_BU)[:, :-1]
        after_trigger_BT = source_BT >= self.num_outputs
        is_first_BT = optimum.earlier_count(source_BT) == 0
        return {
            "bigram": ~after_trigger_BT,
            "first_outputs": after_trigger_BT & is_first_BT,
            "later_outputs": after_trigger_BT & ~is_first_BT,
        }

    def icl_windows(self, tokens_BU):
        """First and later trigger outputs, bool (B, T) each; with random triggers the default windows."""
        if self.random_triggers:
            return _for_each_row(*default_windows(self.length), tokens_BU)
        parts = self.parts(tokens_BU)
        return parts["first_outputs"], parts["later_outputs"]


@dataclass(frozen=True)
class Markov:
    """A fresh Markov chain per row, transition rows Dirichlet(1), over vocab_size (k) states.

    Edelman et al. (2024), with a uniform first state independent of the chain, which makes
    (n_ij + 1) / (n_i + k) exactly optimal.
    """

    vocab_size: int
    length: int
    plateau: ClassVar[str] = "unigram"

    def row(self, key):
        """One row, int32 (U,), from one key."""
        start_key, table_key, chain_key = jax.random.split(key, 3)
        start = jax.random.randint(start_key, (), 0, self.vocab_size, jnp.int32)
        # The gaps that k - 1 uniform points cut into [0, 1] are Dirichlet(1), so the sorted points are the
        # edges of the cumulative distribution: no gamma sampler and no sum to round.
        points_VE = jax.random.uniform(table_key, (self.vocab_size, self.vocab_size - 1), jnp.float32)
        edges_VE = jnp.sort(points_VE, axis=1)
        return _walk(lambda token, u: _inverse_cdf(edges_VE[token], u), start, chain_key, self.length)

    def lines(self, tokens_BU):
        """Losses (B, T): bayes, uniform, unigram ((c_j + 1) / (t + k))."""
        tokens_BU = np.asarray(tokens_BU)
        return {
            "bayes": optimum.markov_bayes(tokens_BU, self.vocab_size),
            "uniform": _uniform(tokens_BU, self.vocab_size),
            "unigram": optimum.add_constant_unigram(tokens_BU, self.vocab_size, 1.0),
        }

    def parts(self, tokens_BU):
        """No named parts."""
        return {}

    def icl_windows(self, tokens_BU):
        """The windows of `default_windows` for every row: bool (B, T) each."""
        return _for_each_row(*default_windows(self.length), tokens_BU)


def make_task(data):
    """The synthetic task that a data config names. Raises ValueError for any other name."""
    match data.task:
        case "repeat":
            return Repeat(data.vocab_size, data.length, data.period_min, data.period_max, data.block)
        case "trigger":
            table = (data.num_triggers, data.trigger_rate, data.dirichlet_alpha, data.table_seed)
            return Trigger(data.vocab_size, data.length, *table, data.random_triggers, data.trigger_prior)
        case "markov":
            return Markov(data.vocab_size, data.length)
        case other:
            raise ValueError(f"data.task: {other!r} is not a synthetic task (repeat, trigger, markov)")


@lru_cache(maxsize=8)
def _bigram_table(vocab_size, num_triggers, trigger_rate, dirichlet_alpha, table_seed):
    num_outputs = vocab_size - num_triggers
    rng = np.random.default_rng(table_seed)
    table_VV = np.full((vocab_size, vocab_size), trigger_rate / num_triggers)
    outputs_VM = rng.dirichlet(np.full(num_outputs, dirichlet_alpha), size=vocab_size)
    table_VV[:, :num_outputs] = (1 - trigger_rate) * outputs_VM
    table_VV.flags.writeable = False  # the cache hands the same array to every caller
    return table_VV


def _inverse_cdf(edges_E, uniform):
    return jnp.sum(uniform >= edges_E, dtype=jnp.int32)


def _walk(next_token, start, key, length):
    # All draws come before the scan, whose body is then one gather and one comparison.
    uniform_T = jax.random.uniform(key, (length,), jnp.float32)
    _, rest_T = jax.lax.scan(lambda token, u: (next_token(token, u),) * 2, start, uniform_T)
    return jnp.concatenate([start[None], rest_T])


def _uniform(tokens_BU, vocab_size):
    return np.full((tokens_BU.shape[0], tokens_BU.shape[1] - 1), np.log(vocab_size))


def _for_each_row(early_T, late_T, tokens_BU):
    return np.tile(early_T, (len(tokens_BU), 1)), np.tile(late_T, (len(tokens_BU), 1))


def _require(condition, message):
    if not condition:
        raise ValueError(message)


def _require_possible(values_BT):
    bad_B = ~np.isfinite(values_BT).all(axis=1)
    if bad_B.any():
        raise ValueError(f"row {np.argmax(bad_B)} cannot come from this task: its probability is 0")
