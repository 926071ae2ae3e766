"""Tables for people and as CSV."""
import numpy as np

from mha_jax.report import tables

ROWS = [{"head": "L0H0", "score": 0.25, "n": 3, "broken": True},
        {"head": "L10H2", "score": None, "n": 12, "more": "x,y"}]  # fmt: skip


def test_words_left_numbers_right_and_a_dash_for_what_is_not_known():
    assert tables.text(ROWS, ["head", "score", "n", "broken"]) == [
        "head   score   n  broken", "L0H0   0.250   3     yes", "L10H2      -  12       -"]  # fmt: skip


def test_csv_has_every_column_and_keeps_the_digits():
    rows = [*ROWS, {"head": "L1H1", "score": float("nan"), "n": 1 / 3}]
    assert tables.csv_text(rows).splitlines() == [
        "head,score,n,broken,more", "L0H0,0.25,3,True,", 'L10H2,,12,,"x,y"', f"L1H1,,{1 / 3},,"]  # fmt: skip


def test_numbers_of_numpy_are_numbers():
    row = {"share_removed": np.float32(0.5), "n": np.int64(7), "off": np.bool_(False), "none": np.float64("nan")}
    assert tables.text([row]) == ["share removed  n  off  none", "        0.500  7   no     -"]
    assert tables.csv_text([row]).splitlines() == ["share_removed,n,off,none", "0.5,7,False,"]
