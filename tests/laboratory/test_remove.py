"""Heads gone for good: the new folder is a run like any other, by the original numbers, and computes the same."""
import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags

from mha_jax.config import ConfigError
from mha_jax.laboratory import icl, prune, remove
from mha_jax.laboratory.result import Result
from mha_jax.model.interventions import ablate
from mha_jax.model.surgery import remove_heads
from mha_jax.probes.subject import Subject
from mha_jax.report import evaluation
from mha_jax.run import load
from mha_jax.training.folder import read_config
from mha_jax.training.tracking import read_metrics
from mha_jax.validation import resolve
from tests.laboratory import small
from tests.model import oracle

GONE = [(1, 3), (0, 0), (0, 1)]  # a whole KV group of layer 0 and one head of layer 1


@pytest.fixture(scope="module")
def removed(tmp_path_factory):
    """(folder, result): cut half-way through training."""
    folder = tmp_path_factory.mktemp("removed").resolve() / "less"
    return folder, remove.remove(small.snapshot(small.HALF), GONE, folder)


@pytest.fixture(scope="module")
def opened(removed):
    return load(removed[0])


def test_masked_and_removed_agree(removed, opened):
    _, found = removed
    before, tokens = small.snapshot(small.HALF), small.snapshot().panel.evaluation.tokens_RU
    masked = before.forward(tokens[:, :-1], interventions=ablate(small.LAYERS, small.HEADS, GONE))[0]
    np.testing.assert_allclose(opened.forward(tokens[:, :-1])[0], masked, rtol=1e-5, atol=1e-5)
    f = found.facts
    assert f["largest_difference"] < 1e-5 * f["loss_masked"]
    assert f["loss_masked"] == pytest.approx(f["loss_removed"], rel=1e-6)
    assert opened.reading.values["eval/loss"] == pytest.approx(f["loss_removed"], rel=1e-6)
    whole = before.reading.values["eval/loss"]
    assert abs(f["loss_removed"] - whole) > 1e-4


@pytest.mark.parametrize(("K", "gone"), [(1, [(0, n) for n in range(4)]), (4, [(0, 2), (1, 0), (1, 3)])])
def test_masked_and_removed_agree_in_mqa_and_mha(K, gone):
    """Also where a layer loses all its heads."""
    cfg = dataclasses.replace(small.run().config.model, num_kv_heads=K)
    params = jax.tree.map(jax.numpy.asarray, oracle.random_params(cfg, K))
    before = dataclasses.replace(small.snapshot(), subject=Subject(cfg, params, small.run().mesh))
    params, cfg = remove_heads(params, cfg, gone)
    found = remove.compare(before, Subject(cfg, params, small.run().mesh), gone)
    assert found["largest_difference"] < 1e-5 * found["loss_masked"] and len(found["seconds"]) == 2
    whole = small.token_loss(np.asarray(before.forward(small.snapshot().panel.evaluation.tokens_RU[:, :-1])[0]),
                             small.snapshot().panel.evaluation.tokens_RU[:, 1:])  # fmt: skip
    assert abs(whole.mean() - found["loss_removed"]) > 0.01


def test_what_is_left_is_counted(removed, opened):
    table = {r["what"]: (r["before"], r["after"]) for r in removed[1].tables["before_after"]}
    size = lambda s: sum(x.size for x in jax.tree.leaves(s.params))  # noqa: E731
    assert table["heads"] == (8, 5) and table["KV heads"] == (4, 3)
    assert table["parameters"] == (size(small.snapshot()), size(opened))
    # Of a token and KV head: a key and a value of 8 numbers of 4 bytes.
    assert table["KV-cache bytes, 32 tokens in float32"] == (4 * 2 * 8 * 4 * 32, 3 * 2 * 8 * 4 * 32)
    assert all(r["share"] == r["after"] / r["before"] for r in removed[1].tables["before_after"])
    assert removed[1].facts["removed"] == ["L0H0", "L0H1", "L1H3"]
    assert removed[1].facts["kept_heads"] == [[2, 3], [0, 1, 2]]
    attention = opened.params["layers"]["layer_00"]["attention"]
    assert attention["wq_DNH"].shape == (32, 2, 8) and attention["wk_DKH"].shape == (32, 1, 8)
    assert opened.params["layers"]["layer_01"]["attention"]["wk_DKH"].shape == (32, 2, 8)


def test_the_folder_says_where_it_comes_from(removed, opened):
    folder, found = removed
    origin = json.loads((folder / "removed.json").read_text())
    assert origin == {"run": str(small.run().workdir), "step": small.HALF, "heads": ["L0H0", "L0H1", "L1H3"],
                      "hash": small.snapshot(small.HALF).meta["hash"]}  # fmt: skip
    assert opened.step == small.HALF and opened.meta["tokens"] == small.HALF * 8 * 32
    assert read_config(folder).model.kept_heads == ((2, 3), (0, 1, 2))
    assert opened.meta["config"] == json.loads((folder / "config.json").read_text())
    assert found.facts["hash"] == origin["hash"] and found.facts["folder"] == str(folder)


def test_it_prunes_and_measures_again(opened):
    found = prune.prune(opened, orders=("magnitude",))
    order = [r["heads"] for r in found.tables["orders"]]
    assert sorted(order) == ["L0H2", "L0H3", "L1H0", "L1H1", "L1H2"]
    curve = found.tables["curves"]
    assert [r["heads_removed"] for r in curve] == list(range(6))
    assert curve[0]["loss"] == pytest.approx(opened.reading.values["eval/loss"], abs=1e-6)
    assert icl.icl(opened).facts["icl_score"] == opened.reading.values["icl/score"]


def test_it_trains_on_through_its_own_config(removed, monkeypatch):
    """As the command in config.py says: optimizer moments cut alike, from the step it was cut at."""
    folder, _ = removed
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", flag_values=values)
    monkeypatch.setattr(sys, "argv", ["train.py", f"--config={folder}/config.py", "--config.name=again",
                                      f"--config.steps={small.STEPS}"])  # fmt: skip
    values(sys.argv)
    config = resolve(holder.value)
    assert config.name == "again" and config.model.kept_heads == ((2, 3), (0, 1, 2))
    old, new = (moments(run, small.HALF) for run in (small.run(), load(folder).run))
    for name in ("mu", "nu"):
        kept = old[name]["layers"]["layer_01"]["attention"]["wq_DNH"][:, :3]
        np.testing.assert_array_equal(new[name]["layers"]["layer_01"]["attention"]["wq_DNH"], kept)
        assert np.abs(kept).max() > 0
    summary = small.train(config, folder)
    assert summary["steps"] == small.STEPS and summary["tokens"] == small.STEPS * 8 * 32
    steps = [e["step"] for e in read_metrics(folder) if "train/loss" in e]
    assert steps == [20] and load(folder).step == small.STEPS  # one in ten is logged, and none from before
    assert summary["final_eval_loss"] < removed[1].facts["loss_removed"]
    own = (small.STEPS - small.HALF) * 8 * 32  # tokens that this model was trained on, and timed
    assert summary["tokens_per_second"] == pytest.approx(own / summary["seconds"], rel=1e-6)
    assert all(e["seconds"] <= summary["seconds"] for e in read_metrics(folder))


def moments(run, step):
    """{'mu': tree, 'nu': tree} of Adam in a checkpoint."""
    found, _ = run.checkpoints.restore(step, remove._abstract(run))
    adam = next(x for x in jax.tree.leaves(found["optimizer"], is_leaf=lambda x: isinstance(x, dict) and "mu" in x)
                if isinstance(x, dict))  # fmt: skip
    return jax.tree.map(np.asarray, {name: adam[name] for name in ("mu", "nu")})


def test_fc_24_one_after_the_other_is_both_at_once(tmp_path):
    """Numbers are the original model's: after head 0 has gone, head 1 is still head 1; what is gone is said."""
    whole, tokens, said = small.snapshot(), small.snapshot().panel.evaluation.tokens_RU[:4, :-1], []

    def without(at, *numbers):
        folder = tmp_path / f"{at.run.workdir.name}_{numbers}"
        remove.remove(at, [(1, n) for n in numbers], folder, said.append)
        return load(folder)

    first, second = without(whole, 0), without(whole, 1)
    assert second.run.config.model.kept_heads == ((0, 1, 2, 3), (0, 2, 3))
    logits = []
    for at in (without(whole, 0, 1), without(first, 1), without(second, 0), without(first, 0, 1)):
        assert at.run.config.model.kept_heads == ((0, 1, 2, 3), (2, 3))
        logits.append(np.asarray(at.forward(tokens)[0]))
    for other in logits[1:]:
        np.testing.assert_array_equal(other, logits[0])
    assert said == ["gone already: L1H0"]
    pattern = np.asarray(at.forward(tokens, capture=("pattern",))[1].pattern_LBNTS)
    assert np.isnan(pattern[1, :, :2]).all() and np.isfinite(pattern[1, :, 2:]).all()
    with pytest.raises(ConfigError, match="nothing to remove: all of them are gone already"):
        remove.remove(at, [(1, 1), (1, 0)], tmp_path / "no")
    with pytest.raises(ConfigError, match="'1.4' does not exist; .* layers 0 to 1, heads 0 to 3"):
        remove.remove(at, [(1, 4)], tmp_path / "no")
    with pytest.raises(ConfigError, match="'1.-1' does not exist"):
        remove.remove(at, [(1, -1)], tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_what_cannot_be_removed(tmp_path):
    for heads, out, message in (
        (small.ALL, tmp_path / "no", "nothing would remain"),
        ([], tmp_path / "no", "nothing to remove: no head is named"),
        ([(0, 1)], tmp_path, f"--out={tmp_path.resolve()}: exists already"),
    ):
        with pytest.raises(ConfigError, match=message):
            remove.remove(small.snapshot(), heads, out)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A prune result as eval.py writes it, cut short to what is read: two orders of heads, one of groups."""
    path = tmp_path_factory.mktemp("prune") / "000030.json"
    orders = {"example": [f"L{i}H{n}" for i, n in small.ALL], "greedy": [f"L{i}H{n}" for i, n in small.ALL[::-1]],
              "groups": ["L0H0 L0H1", "L1H2 L1H3", "L0H2 L0H3", "L1H0 L1H1"]}  # fmt: skip
    rows = [{"order": o, "place": i, "heads": h} for o, heads in orders.items() for i, h in enumerate(heads)]
    rows = sorted(rows, key=lambda r: -r["place"])  # the place counts, not the line
    path.write_text(json.dumps({"tables": {"orders": [r for o in orders for r in rows if r["order"] == o]}}))
    return path


@pytest.mark.parametrize(("order", "keep", "gone"), [
    ("example", "60%", [(0, 0), (0, 1), (0, 2)]),  # 4.8 heads stay: 5
    ("example", "5", [(0, 0), (0, 1), (0, 2)]),
    ("greedy", "75%", [(1, 3), (1, 2)]),
    ("greedy", "1", small.ALL[:0:-1]),
    ("groups", "6", [(0, 0), (0, 1)]),
    ("groups", "50%", [(0, 0), (0, 1), (1, 2), (1, 3)]),
    (None, "6", [(0, 0), (0, 1)]),  # the file's first order
])  # fmt: skip
def test_heads_from_an_order(file, order, keep, gone):
    assert remove.from_order(file, order, keep, small.snapshot().subject) == gone


def test_an_order_of_the_whole_model_goes_on_where_heads_are_gone(file, removed, opened):
    assert remove.from_order(file, "example", "3", opened.subject) == [(0, 2), (0, 3)]


@pytest.mark.parametrize(("order", "keep", "message"), [
    ("example", None, "--from goes with --keep=60%, the share or number of heads that stay"),
    ("example", "0", "--keep=0: allowed"), ("example", "9", "--keep=9: allowed"), ("example", "-3", "--keep=-3: allow"),
    ("example", "120%", "--keep=120%: allowed"), ("example", "half", "--keep=half: allowed"),
    ("example", "0.6", "--keep=0.6: allowed"), ("example", "nan%", "--keep=nan%: allowed"),
    ("example", "8", "--keep=8: allowed is a share such as 60%, or 1 to 7 of the 8 heads"),
    ("example", "0.1%", "--keep=0.1%: allowed is a share such as 60%, or 1 to 7 of the 8 heads"),
    ("groups", "7", "--keep=7: the order groups in .* cannot leave 7 of 8 heads; nearest are 4, 6"),
    ("groups", "5", "--keep=5: the order groups in .* cannot leave 5 of 8 heads; nearest are 4, 6"),
    ("single", "5", "--orders=single: .* has .*example"),
])  # fmt: skip
def test_shares_and_orders_that_there_are_not(file, order, keep, message):
    with pytest.raises(ConfigError, match=message):
        remove.from_order(file, order, keep, small.snapshot().subject)


@pytest.mark.parametrize("text", [None, "", "[]", "3", "{}", '{"tables": {}}', '{"tables": {"orders": []}}',
                                  '{"tables": {"orders": [3]}}', '{"tables": {"orders": [{"order": "x"}]}}',
                                  '{"tables": {"orders": [{"order": "x", "place": 0, "heads": "L9H9"}]}}'])  # fmt: skip
def test_a_file_that_is_no_prune_result(tmp_path, text):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    wanted = r"^--from=.*: not a result of --task=prune with orders \(|^--from = '9\.9': '9\.9' does not exist"
    with pytest.raises(ConfigError, match=wanted) as error:
        remove.from_order(path, None, "5", small.snapshot().subject)
    assert "\n" not in str(error.value)


def test_what_evaluation_passes_on(monkeypatch, file):
    """--from and --keep lead to the heads of the order; what does not belong together is refused."""
    seen, result = [], Result("remove", {}, {})
    monkeypatch.setattr(remove, "remove", lambda snapshot, heads, out, say: (seen.append((heads, out)), result)[1])
    snapshot, go = small.snapshot(), evaluation._remove
    found = go(snapshot, "new", {"from_file": str(file), "keep": "75%", "orders": ("greedy",)})
    assert found.facts == {"from": str(file), "from_hash": None, "order": "greedy", "keep": "75%"}
    go(snapshot, "new", {"heads": [(0, 1)]})
    assert seen == [([(1, 3), (1, 2)], "new"), ([(0, 1)], "new")]
    for options, message in (
        ({}, "takes either --heads=0.1,1.3 or --from=FILE"),
        ({"heads": [(0, 1)], "from_file": "x"}, "takes either"),
        ({"heads": [(0, 1)], "keep": "60%"}, "--keep and --orders go with --from=FILE"),
        ({"heads": [(0, 1)], "orders": ("greedy",)}, "--keep and --orders go with --from=FILE"),
        ({"from_file": str(file), "keep": "5", "orders": ("greedy", "single")}, "--orders=greedy,single: remove foll"),
    ):
        with pytest.raises(ConfigError, match=message):
            go(snapshot, None, options)
