"""The generators: their law, their purity, and what the task objects report about rows."""

import dataclasses
import os
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest

from mha_jax.config import DataConfig
from mha_jax.data.tasks import Markov, Repeat, Trigger, default_windows, make_task, rows

REPEAT = Repeat(64, 64, 8, 32, "distinct")
REPEAT_IID = Repeat(64, 64, 8, 32, "iid")
TRIGGER = Trigger(64, 128, 5, 0.25, 0.1, 0, False, 0.5)
RANDOM_TRIGGER = Trigger(64, 128, 5, 0.25, 0.1, 0, True, 0.5)
MARKOV = Markov(3, 100)
ALL = [REPEAT, REPEAT_IID, TRIGGER, RANDOM_TRIGGER, MARKOV]
NUM_ROWS = 4096
make = jax.jit(rows, static_argnums=0)  # static: a task must be hashable


@pytest.fixture(scope="module")
def many():
    """4096 rows of every task, made once."""
    return {task: np.asarray(make(task, 0, np.arange(NUM_ROWS))) for task in ALL}


def chi_square_is_plausible(observed, expected):
    """Within 5 standard deviations of its mean; cells expected fewer than 5 times are pooled."""
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    return freedom > 0 and abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("task", ALL, ids=str)
def test_rows_are_int32_tokens_of_length_plus_one(task, many):
    assert many[task].dtype == np.int32
    assert many[task].shape == (NUM_ROWS, task.length + 1)
    assert many[task].min() == 0
    assert many[task].max() == task.vocab_size - 1


@pytest.mark.parametrize("task", ALL, ids=str)
def test_a_row_is_a_function_of_seed_and_item(task, many):
    """Alone, without vmap, or among 4096: the same row; and hardly any row is met twice."""
    single = jax.jit(task.row)(jax.random.fold_in(jax.random.key(0), 17))
    np.testing.assert_array_equal(single, many[task][17])
    np.testing.assert_array_equal(make(task, 0, np.arange(NUM_ROWS)[::-1]), many[task][::-1])
    other = np.asarray(make(task, 1, np.arange(NUM_ROWS)))
    assert (other != many[task]).any(axis=1).mean() > 0.999
    assert len(np.unique(many[task], axis=0)) > 0.999 * NUM_ROWS


def test_rows_are_the_same_under_any_sharding(many, tmp_path):
    script = """
import sys, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from mha_jax.data.tasks import Markov, Repeat, Trigger, rows
assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
tasks = [Repeat(64, 64, 8, 32, "distinct"), Trigger(64, 128, 5, 0.25, 0.1, 0, True, 0.5), Markov(3, 100)]
spread = NamedSharding(mesh, PartitionSpec("data"))
make = jax.jit(rows, static_argnums=0, out_shardings=spread)
made = [make(task, 0, np.arange(32)) for task in tasks]
assert all(len(x.sharding.device_set) == 4 for x in made)
np.savez(sys.argv[1], *[np.asarray(x) for x in made])
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    file = tmp_path / "rows.npz"
    subprocess.run([sys.executable, "-c", script, file], check=True, env={**os.environ, **flags}, timeout=120)
    for task, made in zip([REPEAT, RANDOM_TRIGGER, MARKOV], np.load(file).values(), strict=True):
        np.testing.assert_array_equal(made, many[task][:32])


@pytest.mark.parametrize(
    "task",
    [
        Repeat(4, 3, 2, 4, "distinct"),  # one period leaves no repeat in the row
        Repeat(3, 4, 1, 3, "iid"),
        Trigger(4, 4, 2, 0.4, 1.0, 3, False, 0.5),
        Trigger(4, 3, 2, 0.4, 1.0, 3, True, 0.3),
        Markov(2, 5),
        Markov(3, 3),
    ],
    ids=str,
)
def test_whole_rows_have_the_probability_the_predictor_gives_them(task):
    """Z_{T+1} of every row seen, against its frequency: the generator follows the law the optimum assumes."""
    num_rows = 40_000
    seen, count = np.unique(make(task, 0, np.arange(num_rows)), axis=0, return_counts=True)
    starts = task.num_outputs if isinstance(task, Trigger) else task.vocab_size
    probability = np.exp(-task.lines(seen)["bayes"].sum(1)) / starts
    assert probability.sum() > 0.99  # nearly all the law's mass is on rows that were seen
    unseen = 1 - probability.sum()
    assert chi_square_is_plausible(np.append(count, 0), num_rows * np.append(probability, max(unseen, 0)))


def test_repeat_periods_are_uniform_and_blocks_distinct(many):
    tokens = many[REPEAT]
    period_B = (tokens[:, 1:] == tokens[:, :1]).argmax(1) + 1
    assert set(period_B) == set(range(8, 33))
    observed = np.bincount(period_B, minlength=33)[8:]
    assert chi_square_is_plausible(observed, np.full(25, NUM_ROWS / 25))
    for row, period in zip(tokens[:500], period_B[:500], strict=True):
        assert len(set(row[:period])) == period
        np.testing.assert_array_equal(row[period:], row[:-period])
    assert chi_square_is_plausible(np.bincount(tokens[:, 3], minlength=64), np.full(64, NUM_ROWS / 64))


def test_repeat_iid_blocks_hold_equal_tokens(many):
    """The first 8 tokens (no period is shorter) all differ with probability prod (1 - j/64)."""
    differ = np.mean([len(set(row[:8])) == 8 for row in many[REPEAT_IID]])
    expected = np.prod(1 - np.arange(8) / 64)
    assert abs(differ - expected) < 4 * np.sqrt(expected * (1 - expected) / NUM_ROWS)


def test_trigger_table():
    table = TRIGGER.table_VV
    np.testing.assert_allclose(table.sum(1), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(table[:, 59:], 0.05, rtol=0, atol=1e-15)
    assert (table[0, :59].max() / 0.75) > 0.1  # alpha = 0.1 is peaked: uniform would be 0.017
    np.testing.assert_array_equal(table, RANDOM_TRIGGER.table_VV)
    other = dataclasses.replace(TRIGGER, table_seed=1).table_VV
    assert abs(other - table).max() > 0.1
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0] = 1.0


def test_trigger_rows_follow_table_and_outputs(many):
    tokens = many[TRIGGER]
    source, target = tokens[:, :-1], tokens[:, 1:]
    assert tokens[:, 0].max() < 59
    assert target[source >= 59].max() < 59
    first_outputs = []
    for row_source, row_target in zip(source, target, strict=True):
        for trigger in range(59, 64):
            outputs = row_target[row_source == trigger]
            assert len(set(outputs)) <= 1
            first_outputs.extend(outputs[:1])
    share = len(first_outputs) / 59
    assert chi_square_is_plausible(np.bincount(first_outputs, minlength=59), np.full(59, share))
    counts_VV = np.zeros((64, 64))
    np.add.at(counts_VV, (source, target), 1)
    for token in range(59):
        assert chi_square_is_plausible(counts_VV[token], counts_VV[token].sum() * TRIGGER.table_VV[token])


def test_random_triggers_are_triggers_with_the_prior(many):
    """A candidate's first successor is itself a candidate only when it is no trigger: (1 - rho) tau."""
    tokens = many[RANDOM_TRIGGER]
    first = []
    for row in tokens:
        for candidate in range(59, 64):
            at = np.flatnonzero(row[:-1] == candidate)
            first.extend(row[at[:1] + 1] >= 59)
    assert abs(np.mean(first) - 0.5 * 0.25) < 4 * np.sqrt(0.125 * 0.875 / len(first))


def within(loss_BT, published, tolerance):
    """Whether the mean over rows is within 3 of its own standard errors plus what is known of the figure."""
    row_B = loss_BT.mean(1)
    return abs(row_B.mean() - published) < 3 * row_B.std() / np.sqrt(len(row_B)) + tolerance


def test_published_means_repeat(many):
    lines = REPEAT.lines(many[REPEAT])
    assert within(lines["bayes"], 1.2238, 0)
    assert within(lines["induction"], 1.2997, 0)
    iid = REPEAT_IID.lines(many[REPEAT_IID])
    assert within(iid["bayes"], 1.286, 0.007)
    assert within(iid["induction"], 1.535, 0.007)


@pytest.mark.parametrize(("num_states", "bayes", "unigram"), [(2, 0.5112, 0.5818), (3, 0.8861, 1.0079)])
def test_published_means_markov(num_states, bayes, unigram):
    task = Markov(num_states, 100)
    lines = task.lines(np.asarray(make(task, 0, np.arange(NUM_ROWS))))
    assert within(lines["bayes"], bayes, 0)
    assert within(lines["unigram"], unigram, 0)


def test_published_means_trigger(many):
    lines, parts = TRIGGER.lines(many[TRIGGER]), TRIGGER.parts(many[TRIGGER])
    outputs_BT = parts["first_outputs"] | parts["later_outputs"]
    assert abs(lines["bayes"].mean() - 2.31) < 0.1  # both depend on the drawn table
    assert abs(lines["no_icl"].mean() - 2.96) < 0.1
    assert abs(outputs_BT.sum(1).mean() - 25) < 1
    first, later = (lines["bayes"][parts[key]] for key in ("first_outputs", "later_outputs"))
    np.testing.assert_allclose(first, np.log(59), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(later, 0.0)
    np.testing.assert_allclose(lines["no_icl"][outputs_BT], np.log(59), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(lines["no_icl"][parts["bigram"]], lines["bayes"][parts["bigram"]])


@pytest.mark.parametrize("task", ALL, ids=str)
def test_lines_are_named_ordered_and_end_at_bayes(task, many):
    lines = task.lines(many[task])
    extra = {Repeat: {"induction"}, Trigger: {"no_icl"}, Markov: set()}[type(task)]
    assert task.plateau == {Repeat: "unigram", Trigger: "no_icl", Markov: "unigram"}[type(task)]
    assert set(lines) == {"bayes", "uniform", "unigram"} | extra
    for loss_BT in lines.values():
        assert loss_BT.dtype == np.float64
        assert loss_BT.shape == (NUM_ROWS, task.length)
        assert loss_BT.mean() > lines["bayes"].mean() - 1e-12
    np.testing.assert_array_equal(lines["uniform"], np.log(task.vocab_size))
    assert lines["bayes"].mean() < lines[task.plateau].mean() < lines["uniform"].mean()


@pytest.mark.parametrize(
    ("task", "row"),
    [
        (Repeat(4, 4, 2, 3, "distinct"), [0, 0, 1, 0, 0]),
        (Repeat(4, 4, 2, 3, "iid"), [0, 1, 2, 3, 0]),
        (Trigger(4, 4, 1, 0.4, 1.0, 3, False, 0.5), [0, 3, 1, 3, 2]),
        (Trigger(4, 4, 1, 0.4, 1.0, 3, False, 0.5), [0, 3, 3, 1, 2]),
    ],
    ids=str,
)
def test_rows_of_another_task_are_refused(task, row):
    possible = [0, 1, 0, 1, 0]
    task.lines(np.array([possible]))
    with pytest.raises(ValueError, match="row 1 cannot come from this task"):
        task.lines(np.array([possible, row]))


def test_trigger_parts_and_windows_by_hand():
    task = Trigger(5, 8, 2, 0.4, 1.0, 3, False, 0.5)
    tokens = np.array([[0, 3, 1, 4, 2, 3, 1, 3, 1]])  # triggers 3 and 4
    parts = task.parts(tokens)
    assert set(parts) == {"bigram", "first_outputs", "later_outputs"}
    np.testing.assert_array_equal(parts["bigram"][0].nonzero()[0] + 1, [1, 3, 5, 7])
    np.testing.assert_array_equal(parts["first_outputs"][0].nonzero()[0] + 1, [2, 4])
    np.testing.assert_array_equal(parts["later_outputs"][0].nonzero()[0] + 1, [6, 8])
    early, late = task.icl_windows(tokens)
    np.testing.assert_array_equal(early, parts["first_outputs"])
    np.testing.assert_array_equal(late, parts["later_outputs"])


def window_limits(window_BT):
    assert (window_BT == window_BT[0]).all()
    inside = window_BT[0].nonzero()[0] + 1
    np.testing.assert_array_equal(inside, np.arange(inside[0], inside[-1] + 1))
    return int(inside[0]), int(inside[-1])


@pytest.mark.parametrize(
    ("task", "early", "late"),
    [(REPEAT, (1, 7), (33, 64)), (MARKOV, (5, 15), (90, 100)), (RANDOM_TRIGGER, (7, 19), (116, 128))],
    ids=str,
)
def test_icl_windows_of_tasks_without_parts(task, early, late, many):
    early_BT, late_BT = task.icl_windows(many[task])
    assert early_BT.shape == late_BT.shape == (NUM_ROWS, task.length)
    assert (window_limits(early_BT), window_limits(late_BT)) == (early, late)
    assert task.parts(many[task]) == {}


@pytest.mark.parametrize(("low", "high"), [(1, 5), (3, 12)])
def test_empty_repeat_windows_are_refused(low, high):
    with pytest.raises(ValueError, match="period_m"):
        Repeat(16, 12, low, high, "distinct").icl_windows(np.zeros((2, 13), int))


def test_default_windows():
    """Limits are inclusive also where 0.15 T is not a binary fraction."""
    expected = {7: ([1], [7]), 20: ([1, 2, 3], [18, 19, 20]), 64: (range(4, 10), range(58, 65))}
    for length, (early, late) in expected.items():
        early_T, late_T = default_windows(length)
        np.testing.assert_array_equal(early_T.nonzero()[0] + 1, early)
        np.testing.assert_array_equal(late_T.nonzero()[0] + 1, late)
    with pytest.raises(ValueError, match="at least 7"):
        default_windows(6)


def test_make_task():
    repeat = DataConfig(task="repeat", length=32, vocab_size=40, period_min=3, period_max=9, block="iid")
    assert make_task(repeat) == Repeat(40, 32, 3, 9, "iid")
    trigger = Trigger(40, 32, 4, 0.2, 0.3, 7, True, 0.6)
    assert make_task(DataConfig(task="trigger", **dataclasses.asdict(trigger))) == trigger
    assert make_task(DataConfig(task="markov", length=32, vocab_size=3)) == Markov(3, 32)
    with pytest.raises(ValueError, match=r"data\.task: 'text'"):
        make_task(DataConfig(task="text"))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (partial(Repeat, 64, 64, 9, 8, "iid"), "period_min"),
        (partial(Repeat, 64, 64, 0, 8, "iid"), "period_min"),
        (partial(Repeat, 16, 64, 8, 17, "distinct"), "vocab_size: 16"),
        (partial(Repeat, 16, 64, 8, 16, "other"), "block: 'other'"),
        (partial(Trigger, 8, 64, 8, 0.25, 0.1, 0, False, 0.5), "num_triggers: 8"),
        (partial(Trigger, 8, 64, 2, 1.0, 0.1, 0, False, 0.5), "trigger_rate: 1.0"),
        (partial(Trigger, 8, 64, 2, 0.5, 0.0, 0, False, 0.5), "dirichlet_alpha: 0.0"),
        (partial(Trigger, 8, 64, 2, 0.5, 0.1, 0, True, 1.5), "trigger_prior: 1.5"),
    ],
)
def test_impossible_tasks_are_refused(build, match):
    with pytest.raises(ValueError, match=match):
        build()
