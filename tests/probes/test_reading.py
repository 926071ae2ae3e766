"""Readings of heads whose scores are written by hand."""
import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.probes import reading
from mha_jax.probes.behaviour import HEAD_SCORES

CHANCE = {"previous_token": 0.06, "duplicate_token": 0.1, "first_token": 0.06, "self": 0.06, "confidence": 0.07,
          "entropy": 1.0, "copying": 0.04}  # fmt: skip
COPYING_SD = 0.007
QUIET = {"induction": 0.0, "copying": 0.04, "previous_token": 0.1, "duplicate_token": 0.1, "first_token": 0.1,
         "self": 0.1, "confidence": 0.4, "entropy": 0.5}  # fmt: skip


def scores_of(*heads):
    """Scores [1, N] of heads that differ from QUIET in what is named; None is a head that is gone."""
    gone = dict.fromkeys(QUIET, np.nan)
    return {name: np.array([[gone[name] if h is None else (QUIET | h)[name] for h in heads]]) for name in QUIET}


def read(*heads, effect=None):
    effect_LN = None if effect is None else np.array([effect])
    return reading.readings(scores_of(*heads), CHANCE, COPYING_SD, effect_LN)


HEADS = {
    "induction": dict(induction=0.8, copying=0.5), "previous-token": dict(previous_token=0.9),
    "duplicate": dict(duplicate_token=0.7), "sink": dict(first_token=0.6), "broad": dict(entropy=0.9), "none": {},
}  # fmt: skip


def test_each_reading_has_its_head_and_says_the_rule_with_its_numbers():
    rows = read(*HEADS.values())
    assert [row.reading for row in rows] == list(HEADS)
    assert [row.head for row in rows] == [f"L0H{i}" for i in range(6)]
    assert set(HEADS) | {"idle"} == set(reading.ORDER)
    assert "strength 0.80, at least 0.5" in rows[0].rule and "copying 0.500" in rows[0].rule
    assert rows[1].value == pytest.approx((0.9 - 0.06) / 0.94) and "Clark et al. 2019" in rows[1].rule
    assert rows[3].value == pytest.approx(0.54 / 0.94)
    assert reading.share_without_reading(rows) == pytest.approx(1 / 6)


def test_the_panel_gives_every_score_that_is_needed():
    assert set(reading.NEEDED) - {"induction"} <= set(HEAD_SCORES)


def test_a_head_has_one_reading_the_first_in_order():
    everything = dict.fromkeys(QUIET, 0.99)
    for i, name in enumerate(("induction", "previous_token", "duplicate_token")):
        assert read(everything, effect=[0.0])[0].reading == reading.ORDER[i]
        everything[name] = 0.0
    assert read(everything, effect=[0.0])[0].reading == "idle"
    assert read(everything, effect=[0.5])[0].reading == "sink"
    assert read(everything | {"first_token": 0.0}, effect=[0.5])[0].reading == "broad"


def test_idle_needs_an_effect_small_in_both_directions_and_its_absence_is_said():
    rows = read({}, {}, {}, HEADS["sink"], effect=[0.009, 0.011, -0.2, -0.001])
    assert [row.reading for row in rows] == ["idle", "none", "none", "idle"]
    assert "+0.0090 nats" in rows[0].rule and rows[0].value == 0.009
    assert not any("not tested" in row.rule for row in rows)
    for row in read({}, HEADS["sink"], HEADS["broad"]):
        assert row.rule.endswith("idle not tested: no effect of zeroing given")


def test_matching_without_copying_is_not_induction_and_says_so():
    (row,) = read(dict(induction=0.9, copying=0.055))  # chance + 3 sd = 0.061
    assert row.reading == "none" and row.rule.startswith("matches the prefix without copying")
    assert read(dict(induction=0.9, copying=0.065))[0].reading == "induction"


def test_no_reading_names_the_nearest_rule():
    (row,) = read(dict(first_token=0.3, duplicate_token=np.nan))
    assert row.reading == "none" and "nearest sink, strength 0.26 of 0.3" in row.rule


def test_a_head_at_chance_has_no_reading_however_high_chance_is():
    high = CHANCE | {"previous_token": 0.55, "first_token": 0.55, "duplicate_token": 0.55}
    scores = scores_of(dict(previous_token=0.56, first_token=0.56, duplicate_token=0.56))
    assert reading.readings(scores, high, COPYING_SD)[0].reading == "none"


def test_heads_that_are_gone_are_not_counted():
    rows = read(None, HEADS["induction"], None, {})
    assert [row.head for row in rows] == ["L0H1", "L0H3"]
    assert reading.share_without_reading(rows) == 0.5
    assert np.isnan(reading.share_without_reading([]))


def test_a_missing_score_is_named():
    scores = scores_of({})
    del scores["entropy"]
    with pytest.raises(ConfigError, match="scores has no 'entropy': allowed is a dict with all of induction, "):
        reading.readings(scores, CHANCE, COPYING_SD)


def test_drawn_heads_exist_differ_and_depend_on_the_seed_alone():
    exists_LN = np.ones((3, 4), bool)
    exists_LN[1] = False
    drawn = reading.drawn_heads(0, 5, exists_LN)
    assert drawn == reading.drawn_heads(0, 5, exists_LN) and len(set(drawn)) == 5
    assert all(exists_LN[head] for head in drawn)
    assert len({tuple(reading.drawn_heads(seed, 2, exists_LN)) for seed in range(20)}) > 5
    for n in (0, 9):
        with pytest.raises(ConfigError, match=f"n = {n}: allowed is 1 to 8"):
            reading.drawn_heads(0, n, exists_LN)
