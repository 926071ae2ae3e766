"""Remove heads one after the other: in which order, and what is left of loss, ICL and induction on the way.

A unit is what goes at once: a tuple of (layer, query head), one head or all heads of a KV group. An order lists the
units, first to go first. Orders are chosen on rows that are not the ones they are reported on.
"""
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from mha_jax.probes import induction
from mha_jax.probes.subject import Subject
from mha_jax.pruning import ablation, sets

POINTS = 21  # of a curve: every 5 % of the units, or every unit where there are fewer
FIRST = 10  # units that are measured one by one
PADDED = 8  # the greedy order tries sets in multiples of so many
ZERO = ablation.Way("zero", "live")

Units = list[tuple[tuple[int, int], ...]]


def units(subject: Subject, unit: str) -> Units:
    """Every query head that exists (unit 'head'), or every KV group with its heads ('group')."""
    return [(head,) for head in subject.heads] if unit == "head" else list(sets.by_group(subject).values())


def ascending(score_LX, chosen: Units, unit: str, group: int) -> Units:
    """Units by ascending score [L, N] of heads or [L, K] of groups; equal ones in their natural order."""
    divide = 1 if unit == "head" else group
    return sorted(chosen, key=lambda heads: float(score_LX[heads[0][0], heads[0][1] // divide]))


def rescored(score: Callable[[np.ndarray], np.ndarray], subject: Subject, unit: str, cuts: int) -> Units:
    """The order by a score that is taken again after every cut of a `cuts`-th of the units.

    score: function of mask_LN (False for a head that is gone) giving [L, N] or [L, K].
    """
    left, order = units(subject, unit), []
    at_once = max(1, round(len(left) / cuts))
    while left:
        mask_LN = sets.mask(subject, [[h for heads in left for h in heads]])[0]
        gone = ascending(score(mask_LN), left, unit, subject.group)[:at_once]
        order += gone
        left = [u for u in left if u not in gone]
    return order


def by_single_loss(subject: Subject, tokens_RU, unit: str) -> Units:
    """The order by the measured change of loss when each unit goes alone (Michel et al. 2019, section 3.2)."""
    chosen = units(subject, unit)
    found = ablation.sweep(subject, tokens_RU, sets.mask(subject, chosen), ZERO)
    loss_S = found.loss_PSRT.mean((0, 2, 3), dtype=np.float64)
    return [chosen[i] for i in np.argsort(loss_S, kind="stable")]


def greedy(subject: Subject, tokens_RU, unit: str) -> Iterator[tuple[tuple[int, int], ...]]:
    """The units one by one: each time the one whose going costs the least, given what has gone. n (n + 1) / 2
    evaluations for n units: the honest reference for small models."""
    left, gone = units(subject, unit), ()
    while left:
        tried = [gone + u for u in left]
        tried += tried[-1:] * (-len(tried) % PADDED)  # few shapes, since each is compiled
        found = ablation.sweep(subject, tokens_RU, sets.mask(subject, tried), ZERO)
        cheapest = left.pop(int(found.loss_PSRT[:, : len(left)].mean((0, 2, 3), dtype=np.float64).argmin()))
        gone += cheapest
        yield cheapest


@dataclasses.dataclass(frozen=True)
class Curve:
    """What is left after the first count_C units have gone: losses [C, R, T] in nats, heads removed, and the best
    head's strength of prefix matching (NaN where no head is left)."""

    count_C: np.ndarray
    heads_C: np.ndarray
    loss_CRT: np.ndarray
    strength_C: np.ndarray

    @property
    def loss_C(self) -> np.ndarray:
        """Mean loss."""
        return self.loss_CRT.mean((1, 2), dtype=np.float64)

    def removable(self, nats: float) -> int:
        """How many heads go before the loss is first more than `nats` above that of the whole model."""
        above = np.flatnonzero(self.loss_C > self.loss_C[0] + nats)
        return int(self.heads_C[-1] if not len(above) else self.heads_C[above[0] - 1])


def curve(subject: Subject, tokens_RU, order: Units, repeats_QRT=None, chance_Q=None) -> Curve:
    """Zero-ablates the first units of an order together, downstream live, for growing counts."""
    counts = cut_counts(len(order))
    chosen = [tuple(h for heads in order[:count] for h in heads) for count in counts]
    found = ablation.sweep(subject, tokens_RU, sets.mask(subject, chosen), ZERO, repeats_QRT=repeats_QRT)
    strength_C = np.full(len(counts), np.nan)
    for i, gone in enumerate(chosen):
        if found.prefix_SQLN is not None and len(gone) < len(subject.heads):
            strength_C[i] = np.nanmax(matching_without(found.prefix_SQLN[i], chance_Q, gone).strength_LN)
    return Curve(counts, np.array([len(c) for c in chosen]), found.loss_PSRT[0], strength_C)


def matching_without(prefix_QLN, chance_Q, heads) -> induction.PrefixMatching:
    """Prefix matching from the scores at Q repeat lengths, the strength of `heads`, which have gone, NaN."""
    found = induction.prefix_matching(prefix_QLN, chance_Q)
    for head in heads:
        found.strength_LN[head] = np.nan
    return found


def cut_counts(n: int) -> np.ndarray:
    """The numbers of units at which a curve of n units is measured: 0 and n among them, and each of the first few,
    for it is there that heads go for next to nothing."""
    spread = np.round(np.linspace(0, n, min(n + 1, POINTS))).astype(int)
    return np.unique(np.concatenate([spread, np.arange(min(n, FIRST) + 1)]))
