"""When the induction heads formed, and when the loss fell, from the probed steps of one run. Host code.

The threshold is absolute. Half-way to the final value, the usual choice, moves with the length of the run and
finds a crossing in noise when nothing formed.
"""
import dataclasses

import numpy as np

from mha_jax.config import ConfigError
from mha_jax.probes.induction import FORMED

LOST = 0.4  # below FORMED, so that noise around the threshold does not count as losing the head


@dataclasses.dataclass(frozen=True)
class Formation:
    """When the strongest head's strength first reached 0.5, in optimizer steps.

    step: the crossing, interpolated between probed steps; None if never.
    bracket: the probed steps around it; equal when the first probe is already there, formed then or earlier.
    rise: the steps at 10 and at 90 % of the rise; None when never formed or when the rise was not seen.
    censored_at: the last probed step of a run in which it never formed, else None.
    unstable: a later probe is below 0.4.
    """

    step: float | None
    bracket: tuple[int, int] | None
    rise: tuple[float, float] | None
    censored_at: int | None
    unstable: bool

    @property
    def width(self) -> float | None:
        """Steps from 10 to 90 % of the rise."""
        return None if self.rise is None else self.rise[1] - self.rise[0]


def formation(steps, strength):
    """`Formation` from strictly increasing probed steps and, at each, the maximum over heads of strength.

    The rise goes from the first probe to the highest strength so far. Its 90 % point is the first crossing,
    its 10 % point the last upward crossing before that, so an early flicker does not widen a sharp rise. NaN
    strengths are probes that say nothing and are skipped. ConfigError when steps and strengths do not match
    or steps do not increase.
    """
    steps, strength = _series(steps, strength)
    reached = np.flatnonzero(strength >= FORMED)
    if not len(reached):
        return Formation(None, None, None, int(steps[-1]) if len(steps) else None, False)
    i = reached[0]
    bracket = (int(steps[max(i - 1, 0)]), int(steps[i]))
    return Formation(
        step=_crossing(steps, strength, i, FORMED),
        bracket=bracket,
        rise=_rise(steps, strength) if i > 0 else None,
        censored_at=None,
        unstable=bool((strength[i:] < LOST).any()),
    )


def _series(steps, values):
    steps, values = np.asarray(steps), np.asarray(values, np.float64)
    if steps.shape != values.shape or steps.ndim != 1:
        raise ConfigError(f"formation: {steps.size} steps, {values.size} values: allowed is one value a step")
    if (np.diff(steps) <= 0).any():
        k = int(np.flatnonzero(np.diff(steps) <= 0)[0])
        raise ConfigError(f"formation: step {steps[k + 1]} follows {steps[k]}: allowed are increasing steps")
    known = ~np.isnan(values)
    return steps[known], values[known]


def _crossing(steps, values, i, level):
    """The step at which the line from probe i - 1 to probe i meets `level`; probe 0 itself when i = 0."""
    if i == 0:
        return float(steps[0])
    share = (level - values[i - 1]) / (values[i] - values[i - 1])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def _rise(steps, values):
    start, top = values[0], values.max()
    low, high = start + 0.1 * (top - start), start + 0.9 * (top - start)
    last = np.flatnonzero(values >= high)[0]
    first = np.flatnonzero(values[:last] < low)[-1] + 1
    return _crossing(steps, values, first, low), _crossing(steps, values, last, high)


def loss_midpoint(steps, eval_loss, plateau, bayes):
    """(step, bracket): the first probed step with an evaluation loss below the mean of the plateau and Bayes lines,
    and the probed steps around the fall; (None, None) if never.

    All in nats on the same sequences. (None, None) also when a line is None (text has no known optimum).
    """
    if plateau is None or bayes is None:
        return None, None
    steps, eval_loss = _series(steps, eval_loss)
    below = np.flatnonzero(eval_loss < (plateau + bayes) / 2)
    if not len(below):
        return None, None
    return int(steps[below[0]]), (int(steps[max(below[0] - 1, 0)]), int(steps[below[0]]))


def midpoint_gap(loss_midpoint_step, formed):
    """loss_midpoint_step - formation step: negative when the loss fell first. None when either is missing, or the head
    had formed at the first probe, of a run that begins with a trained model, say."""
    if loss_midpoint_step is None or formed.step is None or formed.bracket[0] == formed.bracket[1]:
        return None
    return loss_midpoint_step - formed.step


def describe(formed, midpoint_step=None, midpoint_bracket=None):
    """One line to print: the formation with its bracket, and the gap to the loss midpoint if there is one.

    Which came first is said only where the two brackets do not overlap.
    """
    if formed.step is None:
        if formed.censored_at is None:
            return "induction: not probed"
        line = f"induction: not formed by step {formed.censored_at} (strength never reached {FORMED})"
    elif formed.bracket[0] == formed.bracket[1]:
        line = f"induction: formed at or before the first probe, step {formed.bracket[0]}"
    else:
        low, high = formed.bracket
        line = f"induction: formed at step {formed.step:.0f} (between probes {low} and {high}, "
        line += f"10-90 % of the rise in {formed.width:.0f} steps)"
    if formed.unstable:
        line += f", later below {LOST}"
    if midpoint_step is None:
        return line
    low, high = midpoint_bracket
    if low == high:
        return line + f"; the loss midpoint at or before the first evaluation, step {high}"
    line += f"; loss midpoint at step {midpoint_step} (between evaluations {low} and {high})"
    gap = midpoint_gap(midpoint_step, formed)
    if gap is None:
        return line
    if low < formed.bracket[1] and formed.bracket[0] < high:
        return line + f", gap {gap:+.0f} steps: too close to tell which came first (and not an order of cause)"
    return line + f", gap {gap:+.0f} steps (not an order of cause)"
