"""The schedule grammar, by hand and against the list of all due steps."""
import pytest

from mha_jax.schedule import Schedule


def due(text, last, upto=None):
    schedule = Schedule.parse(text)
    return [step for step in range((upto or last) + 1) if schedule.is_due(step, last)]


@pytest.mark.parametrize(("text", "last", "steps"), [
    ("5", 20, [0, 5, 10, 15, 20]),
    ("5", 18, [0, 5, 10, 15, 18]),
    ("1", 3, [0, 1, 2, 3]),
    ("50", 20, [0, 20]),
    ("log:10", 35, [0, 1, 2, 4, 8, 10, 20, 30, 35]),
    ("log:16", 50, [0, 1, 2, 4, 8, 16, 32, 48, 50]),
    ("log:1", 3, [0, 1, 2, 3]),
    ("log:500", 2, [0, 1, 2]),
    ("at:0,3,7", 9, [0, 3, 7, 9]),
    ("at:7,3,3", 9, [3, 7, 9]),
    ("at:5,100", 9, [5, 9]),
    ("at:4", 4, [4]),
    ("never", 9, []),
    ("7", 0, [0]),
])  # fmt: skip
def test_due_steps_by_hand(text, last, steps):
    assert due(text, last) == steps


def test_documented_log_schedule():
    """0, 1, 2, 4, ... up to 500, then every 500."""
    assert due("log:500", 1700) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 500, 1000, 1500, 1700]


@pytest.mark.parametrize("text", ["1", "7", "log:1", "log:6", "log:8", "at:0,3,4,11", "at:90", "never"])
@pytest.mark.parametrize("last", [1, 5, 12, 14])
def test_next_due_is_the_first_due_step_after(text, last):
    """Where nothing more is due it is the last step: steps are run up to it in one call."""
    schedule = Schedule.parse(text)
    for step in range(last):
        later = [s for s in due(text, last) if s > step]
        assert schedule.next_due(step, last) == (later[0] if later else last)


@pytest.mark.parametrize("text", [
    "", "0", "-5", "ten", "3.5", "every:5", "log", "log:", "log:0", "log:-2", "log:x", "at:", "at", "at:1,,2",
    "at:-1,5", "at:1;2", "never:5", "Never", "all",
])  # fmt: skip
def test_what_is_not_a_schedule(text):
    with pytest.raises(ValueError, match=r"'N' .*'log:N'.*'at:A,B,C'.*'never'") as error:
        Schedule.parse(text)
    assert repr(text) in str(error.value) and "\n" not in str(error.value)


def test_equal_texts_are_equal_schedules():
    assert Schedule.parse("at:3,1") == Schedule.parse("at:1,3") and Schedule.parse("5") != Schedule.parse("log:5")
    assert len({Schedule.parse("5"), Schedule.parse("5")}) == 1
