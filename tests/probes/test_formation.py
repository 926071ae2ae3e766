"""Formation on series worked by hand."""
import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.probes.formation import Formation, describe, formation, loss_midpoint, midpoint_gap


def test_crossing_is_interpolated_and_bracketed():
    formed = formation([0, 100, 200, 300, 400], [0.0, 0.1, 0.3, 0.8, 1.0])
    assert formed.step == pytest.approx(240.0)  # 0.3 + 0.4 (0.8 - 0.3) = 0.5
    assert formed.bracket == (200, 300)
    # The rise is 0 to 1: 10 % is met at 100, 90 % half-way from 300 to 400.
    assert formed.width == pytest.approx(250.0)
    assert formed.censored_at is None and not formed.unstable


def test_a_probe_exactly_at_the_threshold_is_the_crossing():
    formed = formation([0, 10, 20], [0.0, 0.5, 0.6])
    assert formed.step == 10.0 and formed.bracket == (0, 10)


def test_never_formed_is_censored_at_the_last_probe():
    assert formation([0, 50, 100], [0.0, 0.3, 0.499]) == Formation(None, None, None, 100, False)
    assert formation([], []) == Formation(None, None, None, None, False)


def test_first_probe_already_above():
    formed = formation([10, 20, 30], [0.6, 0.8, 0.9])
    assert formed.step == 10.0 and formed.bracket == (10, 10) and formed.width is None
    assert "at or before the first probe, step 10" in describe(formed)


@pytest.mark.parametrize(("later", "unstable"), [(0.41, False), (0.4, False), (0.39, True)])
def test_unstable_when_it_later_falls_below_the_lower_threshold(later, unstable):
    formed = formation([0, 1, 2, 3], [0.1, 0.6, later, 0.9])
    assert formed.unstable is unstable and formed.bracket == (0, 1)


def test_low_strength_before_forming_is_not_unstable():
    assert not formation([0, 1, 2], [0.1, 0.2, 0.7]).unstable


def test_threshold_is_absolute_whatever_the_final_value():
    short, long = formation([0, 10, 20], [0.0, 0.4, 0.6]), formation([0, 10, 20, 900], [0.0, 0.4, 0.6, 1.0])
    assert short.step == long.step == 15.0


def test_width_ignores_an_early_flicker():
    # The rise is 0 to 1. A flicker to 0.2 falls back; the rise that counts crosses 0.1 at 31 and 0.9 at 39.
    formed = formation([0, 10, 20, 30, 40], [0.0, 0.2, 0.0, 0.0, 1.0])
    assert formed.width == pytest.approx(8.0)


def test_nan_probes_are_skipped_and_the_bracket_spans_them():
    formed = formation([0, 10, 20, 30], [0.1, 0.1, np.nan, 0.9])
    assert formed.bracket == (10, 30) and formed.step == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("steps", "strength", "message"),
    [([0, 10, 10], [0.0, 0.1, 0.2], "step 10 follows 10"), ([0, 10], [0.0], "2 steps, 1 values")],
)
def test_bad_series_are_refused(steps, strength, message):
    with pytest.raises(ConfigError, match=message):
        formation(steps, strength)


def test_loss_midpoint_is_the_first_probe_below_the_mean_of_the_lines():
    steps, loss = [0, 100, 200, 300], [4.2, 3.0, 1.9, 2.1]
    assert loss_midpoint(steps, loss, plateau=3.0, bayes=1.0) == (200, (100, 200))
    assert loss_midpoint(steps, loss, plateau=2.8, bayes=1.0) == (None, None)  # 1.9 is not below 1.9
    assert loss_midpoint(steps, loss, plateau=3.0, bayes=None) == (None, None)
    assert loss_midpoint(steps, loss, plateau=None, bayes=1.0) == (None, None)


def test_midpoint_gap_is_negative_when_the_loss_fell_first():
    formed = formation([0, 100, 200], [0.0, 0.0, 1.0])
    assert midpoint_gap(130, formed) == pytest.approx(-20.0)
    assert midpoint_gap(None, formed) is None
    assert midpoint_gap(130, formation([0, 100], [0.0, 0.0])) is None


def test_description_is_one_line_with_bracket_and_caution():
    line = describe(formation([0, 100, 200, 300], [0.0, 0.0, 1.0, 0.3]), 90, (80, 90))
    assert line == (
        "induction: formed at step 150 (between probes 100 and 200, 10-90 % of the rise in 80 steps), "
        "later below 0.4; loss midpoint at step 90 (between evaluations 80 and 90), gap -60 steps (not an order of "
        "cause)"
    )
    close = describe(formation([0, 100, 200], [0.0, 0.0, 1.0]), 130, (120, 130))
    assert close.endswith("gap -20 steps: too close to tell which came first (and not an order of cause)")
    assert describe(formation([0, 100], [0.0, 0.1]), 60, (50, 60)) == (
        "induction: not formed by step 100 (strength never reached 0.5); loss midpoint at step 60 "
        "(between evaluations 50 and 60)"
    )
    assert describe(formation([], [])) == "induction: not probed"
