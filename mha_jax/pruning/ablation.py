"""Take heads away during the forward pass and see what it costs: the sweep over sets of heads.

C sets of one chunk, S sets, R rows, U = T + 1 tokens of a row, P permutations or repeat lengths; other letters as in
model/attention.py. A set is a bool [L, N] over the original query heads. Two choices are named with every number:

  replacement   zero      z = 0 (Michel et al. 2019; Olsson et al. 2022); the value bias goes with it
                mean      z = its mean per head and position over other sequences
                resample  z of another sequence at the same position, the same one for all heads of the set
                uniform   the pattern becomes uniform over the keys that may be seen (Kovaleva et al. 2019)
                tie       every head of a layer takes the pattern of the one head in the set; each keeps its own values
  downstream    live      later layers see the change and attend as they then would
                frozen    every pattern is held at that of the whole model, so only what heads *move* changes
                          (the pattern-preserving ablation of Olsson et al. 2022)

Below the lowest layer of a set nothing changes, so a set starts from the stored residual stream there: a sweep over
all heads of L layers runs (L + 1) / 2 L of their layers.
"""
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.model import transformer
from mha_jax.model.interventions import Interventions
from mha_jax.probes import icl, induction
from mha_jax.probes.subject import Subject
from mha_jax.pruning import sets

REPLACEMENTS = ("zero", "mean", "resample", "uniform", "tie")
DOWNSTREAM = ("live", "frozen")
BYTES = 2**28  # of patterns and logits held at once by the sets that run side by side


@dataclasses.dataclass(frozen=True)
class Way:
    """How heads are ablated. value_PLRTNH: what z becomes, for `mean` (P = 1) and `resample`, else None."""

    replacement: str
    downstream: str
    value_PLRTNH: np.ndarray | None = None

    @property
    def needs_pattern(self) -> bool:
        """Whether the patterns of the whole model are used."""
        return self.downstream == "frozen" or self.replacement == "tie"

    @property
    def forces_pattern(self) -> bool:
        """Whether some pattern is told instead of computed."""
        return self.needs_pattern or self.replacement == "uniform"


def interventions(way: Way, set_LN, value_LBTNH, pattern_LBNTS, uniform_TS) -> Interventions:
    """The arrays that ablate `set_LN`; patterns and values of the whole model, absent heads already 0."""
    if way.replacement == "zero":
        change = {"gate_LN": 1.0 - set_LN}
    elif way.replacement in ("mean", "resample"):
        change = {"replace_LN": set_LN, "value_LBTNH": value_LBTNH}
    else:
        change = {}
    if not way.forces_pattern:
        return Interventions(**change)
    if way.replacement == "uniform":
        touched_LN, own = set_LN, uniform_TS
    elif way.replacement == "tie":
        touched_LN = jnp.broadcast_to(set_LN.any(1, keepdims=True), set_LN.shape)
        own = jnp.einsum("LN,LBNTS->LBTS", set_LN.astype(jnp.float32), pattern_LBNTS)[:, :, None]
    else:
        touched_LN, own = jnp.zeros_like(set_LN), jnp.float32(0)
    if pattern_LBNTS is None:  # live and uniform: nothing of the whole model's is needed
        shape = (len(set_LN), 1, set_LN.shape[1], *uniform_TS.shape)
        return Interventions(force_LN=touched_LN, pattern_LBNTS=jnp.broadcast_to(own, shape), **change)
    pattern_LBNTS = jnp.where(touched_LN[:, None, :, None, None], own, pattern_LBNTS)
    force_LN = jnp.ones_like(set_LN) if way.downstream == "frozen" else touched_LN
    return Interventions(force_LN=force_LN, pattern_LBNTS=pattern_LBNTS, **change)


@functools.partial(jax.jit, static_argnums=0, static_argnames="capture")
def _clean(graph, params, inputs_BT, capture):
    """What the whole model does, 0 where a head is absent: a value of it is never read, but 0 x NaN would spread."""
    aux = transformer.forward(graph, params, inputs_BT, capture=capture)[1]
    return jax.tree.map(lambda x: jnp.nan_to_num(x, nan=0.0), aux)


@functools.partial(jax.jit, static_argnums=0)
def _whole(graph, params, tokens_BU):
    """loss_BT of the whole model."""
    return icl.token_loss(transformer.forward(graph, params, tokens_BU[:, :-1])[0], tokens_BU[:, 1:])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _losses(graph, way, start, params, tokens_BU, x_BTD, sets_CLN, value_LBTNH, pattern_LBNTS, uniform_TS):
    """loss_CBT of the sets side by side, from layer `start` on."""

    def of_set(set_LN):
        change = interventions(way, set_LN, value_LBTNH, pattern_LBNTS, uniform_TS)
        logits_BTV, _, _ = transformer.forward(graph, params, tokens_BU[:, :-1], interventions=change, start=start,
                                               x_BTD=x_BTD if start else None)  # fmt: skip
        return icl.token_loss(logits_BTV, tokens_BU[:, 1:])

    return jax.vmap(of_set)(sets_CLN)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _scores(graph, way, start, params, inputs_BT, x_BTD, sets_CLN, value_LBTNH, pattern_LBNTS, uniform_TS):
    """Prefix matching [C, L - start, N] of all heads under each set."""
    targets_BTS = induction.prefix_targets(inputs_BT)

    def of_set(set_LN):
        change = interventions(way, set_LN, value_LBTNH, pattern_LBNTS, uniform_TS)
        _, aux, _ = transformer.forward(graph, params, inputs_BT, interventions=change, start=start,
                                        x_BTD=x_BTD if start else None, capture=("pattern",))  # fmt: skip
        return induction.target_mass(aux.pattern_LBNTS, targets_BTS)

    return jax.vmap(of_set)(sets_CLN)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Losses in nats: whole_RT of the whole model, loss_PSRT of every set (P permutations of `resample`, else 1).

    prefix_SQLN: prefix matching of all heads at Q repeat lengths; None where it was not asked, and under `frozen`,
    where patterns are held.
    ratio: seconds of the sweep over (number of sets x one evaluation of the whole model), compilation left out; None
    where there were too few rows to tell.
    """

    whole_RT: np.ndarray
    loss_PSRT: np.ndarray
    prefix_SQLN: np.ndarray | None
    ratio: float | None


def sweep(subject: Subject, tokens_RU, sets_SLN, way: Way, *, repeats_QRT=None, seed: int = 0,
          progress: Callable[[int], None] = lambda evaluations: None) -> Sweep:  # fmt: skip
    """Ablates every set on every row.

    tokens_RU int. repeats_QRT: repeated blocks, as long as the rows, for the prefix matching of all heads; `mean` is
    the same there, `resample` takes z of another of the blocks, by as many permutations of `seed`. progress is told
    after each chunk how many rows it evaluated. ValueError for `tie` on a set that is not a single head.
    """
    sets_SLN = np.asarray(sets_SLN, bool)
    if way.replacement == "tie" and (sets_SLN.sum((1, 2)) != 1).any():
        raise ValueError("replacement 'tie': a set is the one head whose pattern its layer takes")
    P = 1 if way.value_PLRTNH is None else len(way.value_PLRTNH)
    (R, U), graph, params = tokens_RU.shape, subject.graph, subject.params
    whole_RT = np.empty((R, U - 1), np.float32)
    loss_PSRT = np.empty((P, len(sets_SLN), R, U - 1), np.float32)
    uniform_TS = jnp.asarray(induction.uniform_pattern(U - 1, subject.cfg.window))
    capture = ("resid", "pattern") if way.needs_pattern else ("resid",)
    way, values_PLRTNH = dataclasses.replace(way, value_PLRTNH=None), way.value_PLRTNH  # static, without its arrays
    clock = []  # seconds of each chunk of rows: whole model, sets
    with jax.default_matmul_precision("highest"):
        for rows in subject.chunks(R):
            tokens_BU, seconds = subject.place(tokens_RU[rows]), [0.0, 0.0]
            with _timed(seconds, 0):
                whole_RT[rows] = np.asarray(_whole(graph, params, tokens_BU))
            aux = _clean(graph, params, tokens_BU[:, :-1], capture=capture)
            size = _side_by_side(tokens_BU.shape, sets_SLN.shape[2], subject.cfg.vocab_size)
            for p in range(P):
                value = None if values_PLRTNH is None else jnp.asarray(_of_rows(values_PLRTNH[p], rows))
                for start, chosen in by_start(sets_SLN, size):
                    real = np.unique(chosen)
                    with _timed(seconds, 1):
                        loss_CBT = np.asarray(_losses(
                            graph, way, start, params, tokens_BU, aux.resid_MBTD[start], sets_SLN[chosen], value,
                            aux.pattern_LBNTS, uniform_TS))  # fmt: skip
                    loss_PSRT[p, real, rows] = loss_CBT[: len(real)]
                    progress(len(real) * len(tokens_BU))
            clock.append(seconds)
        prefix = None
        if repeats_QRT is not None and way.downstream == "live":
            def values_of(tokens_BT):
                padded_BU = np.pad(tokens_BT, ((0, 0), (0, 1)))
                return resampled_values(subject, padded_BU, seed, P) if way.replacement == "resample" else values_PLRTNH

            prefix = np.stack([_prefix(subject, tokens_BT, sets_SLN, way, values_of(tokens_BT))
                               for tokens_BT in repeats_QRT], 1)  # fmt: skip
    whole, swept = np.median(clock[1:], axis=0) if len(clock) > 2 else (0.0, 0.0)
    return Sweep(whole_RT, loss_PSRT, prefix, float(swept / (P * len(sets_SLN) * whole)) if whole else None)


@contextlib.contextmanager
def _timed(seconds: list[float], i: int):
    begin = time.perf_counter()
    yield
    seconds[i] += time.perf_counter() - begin


def _prefix(subject: Subject, tokens_BT, sets_SLN, way: Way, value_PLRTNH=None):
    """prefix_SLN on one repeat length, mean over the P values; below a set's lowest layer the whole model's."""
    uniform_TS = jnp.asarray(induction.uniform_pattern(tokens_BT.shape[1], subject.cfg.window))
    values = [None] if value_PLRTNH is None else [jnp.asarray(value_LRTNH) for value_LRTNH in value_PLRTNH]
    tokens_BT = subject.place(tokens_BT)
    aux = _clean(subject.graph, subject.params, tokens_BT, capture=("resid", "pattern"))
    whole_LN = np.array(induction.target_mass(aux.pattern_LBNTS, induction.prefix_targets(tokens_BT)))
    whole_LN[~present(subject)] = np.nan
    out_SLN = np.repeat(whole_LN[None], len(sets_SLN), 0)
    touched = np.flatnonzero(sets_SLN.any((1, 2)))  # a set without heads has the whole model's, and maybe no layer
    for start, chosen in by_start(sets_SLN[touched], 8):
        found = [_scores(
            subject.graph, way, start, subject.params, tokens_BT, aux.resid_MBTD[start], sets_SLN[touched][chosen],
            value, aux.pattern_LBNTS if way.needs_pattern else None, uniform_TS) for value in values]  # fmt: skip
        out_SLN[touched[chosen], start:] = np.mean(found, axis=0)
    return out_SLN


def whole_losses(subject: Subject, tokens_RU) -> np.ndarray:
    """loss_RT of the whole model in nats."""
    with jax.default_matmul_precision("highest"):
        return np.concatenate([np.asarray(_whole(subject.graph, subject.params, subject.place(tokens_RU[rows])))
                               for rows in subject.chunks(len(tokens_RU))])  # fmt: skip


def present(subject: Subject) -> np.ndarray:
    """bool [L, N]: the heads that exist."""
    return sets.mask(subject, [subject.heads])[0]


def by_start(sets_SLN, size: int) -> list[tuple[int, np.ndarray]]:
    """(lowest layer touched, indices of sets) in chunks of `size`; the last chunk of a layer is filled up by repeating
    its last set, so that all have one shape. A set without heads goes with the last layer."""
    touched_SL = sets_SLN.any(2)
    L = sets_SLN.shape[1]
    start_S = np.where(touched_SL.any(1), touched_SL.argmax(1), L - 1)
    out = []
    for start in range(L):
        indices = np.flatnonzero(start_S == start)
        for i in range(0, len(indices), size):
            chunk = indices[i : i + size]
            out.append((start, np.pad(chunk, (0, min(size, len(indices)) - len(chunk)), mode="edge")))
    return out


def _of_rows(value_LRTNH, rows: slice):
    """Values of these rows; a mean is the same for every row and has one."""
    return value_LRTNH if value_LRTNH.shape[1] == 1 else value_LRTNH[:, rows]


def _side_by_side(shape_BU, N: int, V: int) -> int:
    """How many sets fit `BYTES`: the pattern of a layer some three times over, and the logits."""
    B, U = shape_BU
    return int(np.clip(BYTES // (4 * B * U * (3 * N * U + 2 * V)), 1, 32))


def mean_values(subject: Subject, tokens_RU) -> np.ndarray:
    """value_PLRTNH [1, L, 1, T, N, H]: z per head and position, averaged over the rows given."""
    total = sum(z_LBTNH.sum(1, keepdims=True, dtype=np.float64) for z_LBTNH in _all_z(subject, tokens_RU))
    return (total / len(tokens_RU)).astype(np.float32)[None]


def resampled_values(subject: Subject, tokens_RU, seed: int, permutations: int = 5) -> np.ndarray:
    """value_PLRTNH: z of another of the same rows, by permutations without fixed points."""
    z_LRTNH = np.concatenate(list(_all_z(subject, tokens_RU)), axis=1)
    rng = np.random.default_rng(seed)
    return np.stack([z_LRTNH[:, one_cycle(rng, len(tokens_RU))] for _ in range(permutations)])


def one_cycle(rng, n: int) -> np.ndarray:
    """A random permutation of n >= 2 that is one cycle, so that nothing keeps its place."""
    order = rng.permutation(n)
    source = np.empty(n, int)
    source[order] = np.roll(order, 1)
    return source


def _all_z(subject: Subject, tokens_RU):
    with jax.default_matmul_precision("highest"):
        for rows in subject.chunks(len(tokens_RU)):
            inputs_BT = subject.place(tokens_RU[rows, :-1])
            yield np.asarray(_clean(subject.graph, subject.params, inputs_BT, capture=("z",)).z_LBTNH)
