"""Pruning curves: chosen on rows that are not reported on, equal to NumPy's, and counted right."""
import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.laboratory import prune
from tests.laboratory import small

NAMED = [order for order in prune.ORDERS if order != "random"]
RANDOM = [f"random_{i}" for i in range(5)]
PAIRS = ("L0H0 L0H1", "L0H2 L0H3", "L1H0 L1H1", "L1H2 L1H3")  # heads that read one KV head


def of_order(found, table, name):
    return [r for r in found.tables[table] if r["order"] == name]


@pytest.fixture(scope="module")
def groups():
    """Every order of KV groups, with what was printed."""
    said = []
    return prune.prune(small.snapshot(), unit="group", score_rows=8, say=said.append), said


def test_every_order_takes_every_head_once():
    found = small.pruned()
    assert len(found.tables["removable"]) == 13
    for name in [*NAMED, *RANDOM]:
        order = of_order(found, "orders", name)
        assert sorted(r["heads"] for r in order) == [f"L{i}H{n}" for i, n in small.ALL]
        assert [r["place"] for r in order] == list(range(8))
        curve = of_order(found, "curves", name)
        assert [r["units_removed"] for r in curve] == [r["heads_removed"] for r in curve] == list(range(9))
        assert [r["share_removed"] for r in curve] == [n / 8 for n in range(9)]
        assert [r["induction_strength"] is None for r in curve] == [False] * 8 + [True]


@pytest.mark.parametrize(("name", "count"), [("example", 0), ("greedy", 2), ("magnitude", 3), ("random_4", 5),
                                             ("single", 8)])  # fmt: skip
def test_a_curve_is_the_model_without_the_first_heads_of_its_order(name, count):
    found, e = small.pruned(), small.snapshot().panel.evaluation
    gone = small.parse(" ".join(r["heads"] for r in of_order(found, "orders", name)[:count]))
    row, loss_RT = of_order(found, "curves", name)[count], small.loss_without(gone)
    assert row["loss"] == pytest.approx(loss_RT.mean(), abs=1e-5)
    assert row["icl"] == pytest.approx(loss_RT[e.late_RT].mean() - loss_RT[e.early_RT].mean(), abs=2e-5)
    if count == 0:
        assert row["loss"] == pytest.approx(small.snapshot().reading.values["eval/loss"], abs=1e-6)


def test_removable_is_what_the_curve_says():
    found = small.pruned()
    for row in found.tables["removable"]:
        curve = of_order(found, "curves", row["order"])
        for nats in (0.01, 0.05):
            fine = [r["loss"] <= curve[0]["loss"] + nats for r in curve]
            until = fine.index(False) if False in fine else len(fine)
            assert row[f"removable_at_{nats}"] == curve[until - 1]["heads_removed"]
    assert len({row["removable_at_0.05"] for row in found.tables["removable"]}) > 1


def test_single_and_greedy_are_chosen_by_the_loss_on_the_calibration_rows(groups):
    rows = small.snapshot().panel.source.calibration(8)
    single, greedy = ([r["heads"] for r in of_order(groups[0], "orders", name)] for name in ("single", "greedy"))
    loss = lambda *gone: small.loss_without(small.parse(" ".join(gone)), rows).mean()  # noqa: E731
    assert single == sorted(PAIRS, key=loss)
    assert greedy[0] == single[0]
    assert greedy[1] == min(single[1:], key=lambda unit: loss(greedy[0], unit))
    assert greedy[2] == min(set(PAIRS) - set(greedy[:2]), key=lambda unit: loss(*greedy[:2], unit))


def test_orders_are_chosen_on_rows_that_are_not_reported_on(monkeypatch):
    snapshot, seen = small.snapshot(), []
    find, curve = prune.find_orders, prune.curves.curve
    monkeypatch.setattr(prune, "find_orders", lambda s, rows, *rest: (seen.append(rows), find(s, rows, *rest))[1])
    monkeypatch.setattr(prune.curves, "curve", lambda s, rows, *rest: (seen.append(rows), curve(s, rows, *rest))[1])
    found = prune.prune(snapshot, orders=("magnitude",))
    chosen, reported = ({tuple(row) for row in rows.tolist()} for rows in seen)
    assert (len(chosen), len(reported)) == (prune.SCORE_ROWS, small.ROWS)
    assert reported == {tuple(row) for row in snapshot.panel.evaluation.tokens_RU.tolist()}
    assert not chosen & {tuple(row) for row in snapshot.panel.evaluation.tokens_RU.tolist()}
    assert (found.facts["sequences"], found.facts["calibration_sequences"]) == (small.ROWS, prune.SCORE_ROWS)


def test_five_random_orders_by_the_seed():
    draw = lambda seed: prune.find_orders(small.snapshot(), None, "head", ("random",), seed, None)  # noqa: E731
    assert list(draw(0)) == RANDOM and len({tuple(order) for order in draw(0).values()}) == 5
    assert draw(0) == draw(0) != draw(1)


def test_a_kv_group_goes_at_once(groups):
    found, said = groups
    for name in [*NAMED, *RANDOM]:
        assert {r["heads"] for r in of_order(found, "orders", name)} == set(PAIRS)
        curve = of_order(found, "curves", name)
        assert [(r["units_removed"], r["heads_removed"]) for r in curve] == [(n, 2 * n) for n in range(5)]
    first = of_order(found, "orders", "example")[0]["heads"]
    assert of_order(found, "curves", "example")[1]["loss"] == pytest.approx(
        small.loss_without(small.parse(first)).mean(), abs=1e-5)  # fmt: skip
    assert found.facts["unit"] == "group" and {r["heads"] for r in found.tables["removable"]} == {8}
    (greedy,) = said
    assert greedy.startswith("greedy elimination of 4 units on 8 sequences: about ") and greedy.endswith(
        " minutes, and compilation")


def test_the_raw_order_is_that_of_the_gradient():
    """Michel et al. 2019, equation 2, by finite differences of NumPy's loss: |mean over rows of |dL / dxi||."""
    rows, snapshot = small.snapshot().panel.source.calibration(8), small.snapshot()
    found = prune.find_orders(snapshot, rows, "head", ("example_raw",), 0, None)["example_raw"]
    score = {}
    for head in small.ALL:
        up, down = (loss_with_gate(head, gate, rows).mean(1) for gate in (1.01, 0.99))
        score[head] = np.abs((up - down) / 0.02).mean()
    assert [head for (head,) in found] == sorted(small.ALL, key=score.get)


def loss_with_gate(head, gate, rows):
    """loss_RT with one head's output times `gate`: its output kernel is."""
    layer, n = head
    kernel = small.snapshot().params["layers"][f"layer_{layer:02d}"]["attention"]["wo_NHD"]
    return small.loss_without([], rows, {head: gate * np.asarray(kernel[n])})


@pytest.mark.parametrize(("options", "message"), [
    ({"orders": ("example", "gredy")}, f"--orders=gredy: allowed are {', '.join(prune.ORDERS)}"),
    ({"unit": "layer"}, "--unit=layer: allowed are head, group"),
    ({"rows": 99}, "--rows=99: allowed are 2 to config.data.eval_rows = 16"),
])  # fmt: skip
def test_what_cannot_be_pruned(options, message):
    with pytest.raises(ConfigError) as error:
        prune.prune(small.snapshot(), **options)
    assert str(error.value) == message
