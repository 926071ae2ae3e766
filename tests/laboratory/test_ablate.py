"""What breaks without heads: every set in every way once, numbers that NumPy finds too, and nothing left behind."""
import dataclasses
import itertools

import jax
import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.laboratory import ablate
from mha_jax.pruning.ablation import DOWNSTREAM, REPLACEMENTS
from tests.laboratory import small

WAYS = list(itertools.product(REPLACEMENTS, DOWNSTREAM))
KINDS = {"head": [f"L{i}H{n}" for i, n in small.ALL], "group": ["L0K0", "L0K1", "L1K0", "L1K1"],
         "layer": ["layer 0", "layer 1"], "only": [f"only L{i}H{n}" for i, n in small.ALL]}  # fmt: skip


def rows(**wanted):
    """{set: row} of those with these values."""
    table = small.ablated().tables["sets"]
    return {r["set"]: r for r in table if all(r[k] == v for k, v in wanted.items())}


def test_every_set_stands_in_every_way_once():
    table = small.ablated().tables["sets"]
    for kind, names in KINDS.items():
        wanted = {(name, *way) for name in names for way in WAYS if way[0] != "tie" or kind == "head"}
        found = [(r["set"], r["replacement"], r["downstream"]) for r in table if r["kind"] == kind]
        assert len(found) == len(wanted) and set(found) == wanted
    named = {r["set"] for r in table if r["kind"] == "named"}
    assert "best previous-token head" in named  # the model has none above the limit
    assert {r["kind"] for r in table} == {*KINDS, "named"}
    assert len({tuple(r) for r in table}) == 1
    assert set(small.ablated().facts["ways"]) == {" x ".join(way) for way in WAYS}
    assert rows(set="L0K1", replacement="zero", downstream="live")["L0K1"]["heads"] == "L0H2 L0H3"
    assert rows(set="only L1H2", replacement="mean", downstream="live")["only L1H2"]["heads"] == "L1H0 L1H1 L1H3"


@pytest.mark.parametrize("name", ["L0H1", "L1H2", "L0K0", "layer 1", "only L0H3"])
def test_zero_live_is_the_model_without_the_heads_output(name):
    e = small.snapshot().panel.evaluation
    row = rows(replacement="zero", downstream="live")[name]
    loss_RT, whole_RT = small.loss_without(small.parse(row["heads"])), small.loss_without([])
    early, late = loss_RT[e.early_RT].mean(), loss_RT[e.late_RT].mean()
    whole = whole_RT[e.late_RT].mean() - whole_RT[e.early_RT].mean()
    wanted = {"loss": loss_RT.mean(), "loss_change": loss_RT.mean() - whole_RT.mean(), "early_loss": early,
              "late_loss": late, "icl": late - early, "icl_removed": 1 - (late - early) / whole}  # fmt: skip
    for key, value in wanted.items():
        assert row[key] == pytest.approx(value, abs=2e-5), key
    assert row["loss_change_low"] <= row["loss_change"] <= row["loss_change_high"]
    assert row["off_distribution"] == (late > np.log(32)), "the line that knows nothing of the row is uniform"


def test_every_way_changes_something_and_above_the_last_layer_nothing_can_freeze():
    for how in REPLACEMENTS:
        live, frozen = (rows(kind="head", replacement=how, downstream=what) for what in DOWNSTREAM)
        for name, row in live.items():
            assert row["loss_change"] != 0 and frozen[name]["loss_change"] != 0, (how, name)
            same = row["loss"] == pytest.approx(frozen[name]["loss"], abs=1e-6)
            assert same == (name[:2] == "L1"), (how, name)


def test_the_other_heads_match_prefixes_as_before_where_nothing_below_them_went():
    snapshot = small.snapshot()
    found = snapshot.panel.prefix_matching(snapshot.reading.arrays)
    for name, row in rows(replacement="zero", downstream="live").items():
        if name[:2] == "L1":
            others = found.strength_LN.copy()
            others[tuple(zip(*small.parse(row["heads"]), strict=True))] = -1
            best = np.unravel_index(others.argmax(), others.shape)
            assert row["others_best_head"] == "L{}H{}".format(*best)
            assert row["others_prefix_matching"] == pytest.approx(found.score_LN[best], abs=1e-6)
            assert row["others_prefix_matching_change"] == pytest.approx(0, abs=1e-6), name
    change = {n: r["others_prefix_matching_change"] for n, r in rows(replacement="zero", downstream="live").items()}
    row, whole = rows(replacement="zero", downstream="live")["L0H1"], found.score_LN.copy()
    whole[0, 1] = -1
    best = np.unravel_index(np.where(whole < 0, -1, found.strength_LN).argmax(), whole.shape)
    assert change["L0H1"] == pytest.approx(row["others_prefix_matching"] - whole[best], abs=1e-6) != 0
    below = rows(replacement="zero", downstream="live", kind="only")
    assert len({r["others_prefix_matching"] for name, r in below.items() if "L0" in name}) == 4
    for what in DOWNSTREAM:  # frozen patterns are those of the whole model and say nothing
        found = {r["others_prefix_matching"] is None for r in rows(downstream=what, replacement="mean").values()}
        assert found == {what == "frozen"}


def test_controls_are_other_heads_of_the_same_layers():
    """A head alone has the three others of its layer; of a set without spare heads the reason is said."""
    live = rows(kind="head", replacement="zero", downstream="live")
    for name in live:
        others = [r["icl_removed"] for n, r in live.items() if n[:2] == name[:2] and n != name]
        low, middle, high = np.quantile(others, [0.05, 0.5, 0.95])
        row = live[name]
        assert row["controls"] == 3 and row["controls_missing"] is None
        assert (row["control_icl_removed"], row["control_icl_removed_low"], row["control_icl_removed_high"]) == (
            pytest.approx(middle), pytest.approx(low), pytest.approx(high))  # fmt: skip
    groups = rows(kind="group", replacement="zero", downstream="live")
    assert {r["controls"] for r in groups.values()} == {1}, "of four heads the two others"
    assert groups["L0K1"]["control_icl_removed"] == pytest.approx(groups["L0K0"]["icl_removed"], abs=1e-6)
    assert {r["controls_missing"] for r in rows(kind="layer", replacement="mean", downstream="live").values()} == {
        "layer 0 has 0 spare head(s), the set takes 4", "layer 1 has 0 spare head(s), the set takes 4"}  # fmt: skip
    tied = rows(replacement="tie", downstream="live").values()
    assert all(r["controls"] == 0 and r["controls_missing"] for r in tied)
    found = ablate.ablate(small.snapshot(), heads=[(1, 1), (0, 0), (1, 0), (1, 3)], replacements=("zero",),
                          downstream=("live",))  # fmt: skip
    own = found.tables["sets"][0]
    assert (own["set"], own["heads"], own["controls"]) == ("--heads", "L0H0 L1H0 L1H1 L1H3", 0)
    assert own["controls_missing"] == "layer 1 has 1 spare head(s), the set takes 3"
    assert own["control_icl_removed"] is None
    assert own["loss"] == pytest.approx(small.loss_without([(0, 0), (1, 0), (1, 1), (1, 3)]).mean(), abs=2e-5)


def test_sets_that_have_their_name_from_what_their_heads_do(monkeypatch):
    snapshot = small.snapshot()
    monkeypatch.setattr(type(snapshot.panel), "induction_heads", lambda *_: [(1, 0), (1, 3)])
    found = ablate.all_sets(snapshot.subject, ablate.special_heads(snapshot), [(0, 1), (1, 2)])
    named = {n.name: n.heads for n in found if n.kind == "named"}
    assert list(named)[:3] == ["--heads", "induction heads", "all other heads"]
    assert named["--heads"] == ((0, 1), (1, 2)) and named["induction heads"] == ((1, 0), (1, 3))
    assert set(named["all other heads"]) == set(small.ALL) - {(1, 0), (1, 3)}


def test_fc_30_the_same_numbers_twice_and_after_an_error_half_way():
    snapshot, first = small.snapshot(), small.ablated()
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(snapshot.params)]
    told = []

    def broken(done, total):
        told.append(done)
        if len(told) == 9:
            raise RuntimeError("the power went")

    with pytest.raises(RuntimeError, match="the power went"):
        ablate.ablate(snapshot, progress=broken)
    counted = []
    again = ablate.ablate(snapshot, progress=lambda done, total: counted.append((done, total)))
    assert small.comparable(again.tables["sets"]) == small.comparable(first.tables["sets"])
    assert small.comparable(again.tables["edges"]) == small.comparable(first.tables["edges"])
    assert before == [np.asarray(x).tobytes() for x in jax.tree.leaves(snapshot.params)]
    assert sum(done for done, _ in counted) == counted[0][1], "the bar ends where it said it would"


@pytest.mark.parametrize(("options", "message"), [
    ({"replacements": ("zero", "one")}, "--replacement=one: allowed are zero, mean, resample, uniform, tie"),
    ({"downstream": ("alive",)}, "--downstream=alive: allowed are live, frozen"),
    ({"rows": 17}, "--rows=17: allowed are 2 to config.data.eval_rows = 16"),
    ({"rows": 1}, "--rows=1: allowed are 2 to config.data.eval_rows = 16"),
])  # fmt: skip
def test_what_cannot_be_ablated(options, message):
    with pytest.raises(ConfigError) as error:
        ablate.ablate(small.snapshot(), **options)
    assert str(error.value) == message


def test_a_head_that_is_gone_is_an_error_and_not_a_change_of_nothing():
    snapshot = small.snapshot()
    cfg = dataclasses.replace(snapshot.subject.cfg, kept_heads=((0, 1, 2, 3), (0, 1, 3)))
    left = dataclasses.replace(snapshot, subject=dataclasses.replace(snapshot.subject, cfg=cfg))
    with pytest.raises(ConfigError, match="--heads: L1H2 is not in this model, or was removed"):
        ablate.ablate(left, heads=[(0, 1), (1, 2)])


def test_a_head_named_twice_is_one_head():
    twice = ablate.ablate(small.snapshot(), heads=[(1, 0), (1, 0)], replacements=("zero",), downstream=("live",))
    assert (twice.tables["sets"][0]["heads"], twice.tables["sets"][0]["controls"]) == ("L1H0", 3)


def test_the_score_that_shares_are_of_is_that_of_the_rows():
    found = ablate.ablate(small.snapshot(), rows=6, replacements=("zero",), downstream=("live",))
    e = small.snapshot().panel.evaluation
    loss_RT = small.loss_without([], e.tokens_RU[:6])
    score = loss_RT[e.late_RT[:6]].mean() - loss_RT[e.early_RT[:6]].mean()
    assert found.facts["icl_score"] == pytest.approx(score, abs=1e-5)
    assert found.facts["loss"] == pytest.approx(loss_RT.mean(), abs=1e-5)
    row = next(r for r in found.tables["sets"] if r["set"] == "L0H0")
    assert row["icl_removed"] == pytest.approx(1 - row["icl"] / score, abs=1e-4)


def test_few_rows_on_many_devices():
    """Three rows do not divide over two devices; they lie on each."""
    run = small.run()
    devices = np.array([*jax.devices(), jax.local_devices()[1]]).reshape(2, 1, 1)
    mesh = jax.sharding.Mesh(devices, run.mesh.axis_names, axis_types=run.mesh.axis_types)
    subject = dataclasses.replace(small.snapshot().subject, mesh=mesh)
    placed = [subject.place(small.snapshot().panel.evaluation.tokens_RU[:n]) for n in (3, 4)]
    assert [x.sharding.is_fully_replicated for x in placed] == [True, False]
    np.testing.assert_array_equal(placed[0], small.snapshot().panel.evaluation.tokens_RU[:3])
