"""eval.py's tasks from a run folder alone: what is written and printed, and flags that cannot be obeyed."""
import contextlib
import csv
import functools
import importlib.util
import io
import json
import math
import pathlib
import shutil
import subprocess
import sys

import pytest
from absl import flags

from mha_jax import command
from mha_jax.config import ConfigError
from mha_jax.report import evaluation
from mha_jax.run import open_run
from tests.laboratory import small
from tests.laboratory.test_gates import OPTIONS
from tests.test_train_command import DRIVER, environment

ROOT = pathlib.Path(__file__).parents[1]
TASKS = ("heads", "icl", "ablate", "prune", "gates")
TABLES = {"heads": ["heads", "composition", "logit_lens"], "icl": ["positions"], "ablate": ["sets", "edges"],
          "prune": ["curves", "removable", "orders"], "gates": ["front"]}  # fmt: skip
PICTURES = {"heads": ["", "_patterns", "_composition"], "icl": [""], "ablate": ["", "_edges"], "prune": [""],
            "gates": [""]}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def surroundings():
    """One device; a folder that is opened again and again is opened once, and gates are few."""
    few = functools.partial(evaluation.gates.gates, **OPTIONS)
    with small.surroundings(), pytest.MonkeyPatch.context() as patch:
        opened = functools.cache(lambda at: small.run() if at == small.run().workdir else open_run(at))
        patch.setattr(evaluation, "open_run", lambda at: opened(pathlib.Path(at)))
        patch.setattr(evaluation.gates, "gates", few)
        yield


def evaluate(*args, **options):
    """(what `evaluation.evaluate` returned, what it printed)."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return evaluation.evaluate(*args, **options), out.getvalue()


@pytest.fixture(scope="module")
def everything():
    """--task=all: ({task: result}, printed)."""
    found, printed = evaluate(small.run().workdir, "all", str(small.STEPS))
    return dict(zip(TASKS, found, strict=True)), printed


def path(task, suffix, folder=None):
    at = (folder or small.run().workdir / "eval") / task.replace("gates", "prune")
    return at / f"{small.STEPS:06d}{'_gates' if task == 'gates' else ''}{suffix}"


def plain(value):
    """As JSON has it: lists, and null for what is not finite."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@pytest.mark.parametrize("task", TASKS)
def test_a_task_writes_all_it_found(everything, task):
    found = everything[0][task]
    assert json.loads(path(task, ".json").read_text()) == plain(found)
    meta = small.snapshot().meta
    assert (found["task"], found["run"], found["step"], found["hash"], found["data_fingerprint"]) == (
        task.replace("gates", "prune"), "small", small.STEPS, meta["hash"], meta["data"])  # fmt: skip
    assert found["definitions"] == "1" and found["tokens"] == small.STEPS * 8 * 32
    assert task == "icl" or found["seed"] == 0
    assert list(found["tables"]) == TABLES[task]
    for name, rows in found["tables"].items():
        with path(task, f"_{name}.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert list(lines[0]) == list(dict.fromkeys(key for row in rows for key in row))
        for line, row in zip(lines, plain(rows), strict=True):
            assert line == {key: "" if row.get(key) is None else str(row[key]) for key in line}
    for name in PICTURES[task]:
        assert path(task, f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_printed_is_the_tables(everything):
    found, printed = everything
    lines = printed.splitlines()
    assert len([x for x in lines if x.startswith("small, step 30, checkpoint ")]) == len(TASKS)
    for row in found["heads"]["tables"]["heads"]:
        assert [line.split()[:2] for line in lines].count([row["head"], row["reading"]]) == 1
    header = next(line for line in lines if line.startswith("set "))
    assert "zero live" in header and "resample frozen" in header and "tie live" in header and "controls" in header
    only = next(line for line in lines if line.startswith("only L0H1 "))
    row = next(r for r in found["ablate"]["tables"]["sets"] if r["set"] == "only L0H1")
    assert f" {row['icl_removed']:.2f}" in only and only.split()[-2:] == ["-", "-"], "a tie is of one head"
    assert any(line.startswith("greedy elimination of 8 units on 64 sequences: about ") for line in lines)
    assert all(any(line.startswith(f"{order} ") for line in lines) for order in ("greedy", "random_4"))
    assert "training" in printed and "heads from scratch for 30 steps" in printed


def test_all_again_somewhere_else_is_the_same(everything, tmp_path):
    """A folder for each task, and every file as it was: whatever is measured does not depend on what was before."""
    evaluate(small.run().workdir, "all", "last", tmp_path)
    for task in TASKS:
        for suffix in (".json", *(f"_{name}.csv" for name in TABLES[task])):
            assert path(task, suffix, tmp_path).read_bytes() == path(task, suffix).read_bytes(), (task, suffix)


def test_another_process_finds_the_same_numbers(tmp_path):
    command = [sys.executable, str(ROOT / "eval.py"), f"--workdir={small.run().workdir}", "--task=ablate", "--rows=8",
               "--replacement=zero", "--downstream=live", f"--out={tmp_path}/there"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    _, printed = evaluate(small.run().workdir, "ablate", "last", tmp_path / "here", rows=8, replacements=("zero",),
                          downstream=("live",))  # fmt: skip
    stem = "000030_downstream=live_replacements=zero_rows=8"
    for suffix in (".json", "_sets.csv", "_edges.csv"):
        there, here = ((tmp_path / name / "ablate" / f"{stem}{suffix}").read_bytes() for name in ("there", "here"))
        assert there == here, suffix
    assert done.stdout.replace("/there/", "/here/") == printed


def test_results_that_are_not_of_one_checkpoint_or_question_do_not_replace_each_other(tmp_path):
    evaluate(small.run().workdir, "icl", "last", tmp_path)
    evaluate(small.run().workdir, "icl", "last", tmp_path)
    evaluate(small.run().workdir, "icl", str(small.HALF), tmp_path)
    assert len(list((tmp_path / "icl").glob("*.json"))) == 2
    found = json.loads((tmp_path / "icl" / f"{small.STEPS:06d}.json").read_text())
    (tmp_path / "icl" / f"{small.STEPS:06d}.json").write_text(json.dumps(found | {"hash": "another"}))
    with pytest.raises(ConfigError, match="000030.json is the result of another checkpoint; name another folder"):
        evaluate(small.run().workdir, "icl", "last", tmp_path)
    many = evaluation._suffix({"heads": ",".join(f"L{i}H{n}" for i in range(8) for n in range(8))})
    fewer = evaluation._suffix({"heads": ",".join(f"L{i}H{n}" for i in range(8) for n in range(7))})
    assert len(many) == len(fewer) == evaluation.LONGEST_NAME and many != fewer
    short = {"rows": 8, "orders": ("a", "b"), "heads": "0.1,1/3"}
    assert evaluation._suffix(short) == "_heads=0.1+1+3_orders=a+b_rows=8"


def test_fc_18_a_folder_with_a_config_and_a_checkpoint_is_enough(everything, tmp_path):
    shutil.copy(small.run().workdir / "config.json", tmp_path)
    shutil.copytree(small.run().workdir / "checkpoints" / str(small.STEPS), tmp_path / "checkpoints" / str(small.STEPS))
    (found,), _ = evaluate(tmp_path, "icl")
    assert plain(found) == plain(everything[0]["icl"])
    (found,), _ = evaluate(tmp_path, "heads")
    assert plain(found["tables"]) == plain(everything[0]["heads"]["tables"])


def test_fc_18_a_folder_of_removed_heads_answers_every_question(tmp_path):
    """A layer without heads, and one that lacks its first: tables speak of what is there by the original numbers."""
    out, left = tmp_path / "less", ["L1H1", "L1H2", "L1H3"]
    (found,), printed = evaluate(small.run().workdir, "remove", "last", out, heads="L1H0,0.0,0.1,0.2,0.3")
    assert "removed L0H0 L0H1 L0H2 L0H3 L1H0; masked and removed differ by " in printed
    assert f"new run folder: {out}" in printed and (
        small.run().workdir / "eval/remove/000030_without=L0H0+L0H1+L0H2+L0H3+L1H0_before_after.csv").exists()
    (heads,), _ = evaluate(out, "heads")
    assert [r["head"] for r in heads["tables"]["heads"]] == left
    assert heads["tables"]["composition"] == [] and heads["drawn_at_random"] == []
    assert heads["scores"]["induction"][0] == [None] * 4 and heads["scores"]["induction"][1][0] is None
    (icl,), _ = evaluate(out, "icl", "best")
    assert icl["eval_loss"] == pytest.approx(found["loss_removed"], rel=1e-6)
    (cut,), printed = evaluate(out, "ablate", replacements=("zero",), downstream=("live",))
    sets = {r["set"]: r["heads"] for r in cut["tables"]["sets"]}
    assert {"L1H1", "L1K1", "layer 1", "only L1H3"} <= set(sets) and not {"L0H0", "L1H0", "layer 0"} & set(sets)
    assert sets["L1K0"] == "L1H1" and sets["only L1H3"] == "L1H1 L1H2" and "edges" not in cut["tables"]
    (curves,), _ = evaluate(out, "prune", orders=("magnitude", "random"))
    assert {r["heads"] for r in curves["tables"]["orders"]} == set(left)
    names = {"heads": "", "icl": "", "ablate": "_downstream=live_replacements=zero",
             "prune": "_orders=magnitude+random"}  # fmt: skip
    assert all((out / "eval" / task / f"000030{name}.png").exists() for task, name in names.items())


# -------------------------------------------------------------------------------------------------- what is refused

TASK_NAMES = "heads, icl, ablate, prune, remove, all"
EARLY = {  # before JAX is imported
    "": f"--task=None: allowed are {TASK_NAMES}\n",
    "--task=ablation": f"--task=ablation: allowed are {TASK_NAMES}; did you mean ablate?\n",
    "--task=gates": f"--task=gates: allowed are {TASK_NAMES}",
    "--task=heads --heads=0.1": "--heads=0.1: not of this task; it belongs to ablate, remove\n",
    "--task=icl --seed=1": "--seed=1: not of this task; it belongs to heads, ablate, prune, prune --method=gates\n",
    "--task=all --rows=8": "--rows=8: not of this task; it belongs to ablate, prune, prune --method=gates\n",
    "--task=prune --penalties=1": "--penalties=1: not of this task; it belongs to prune --method=gates\n",
    "--task=prune --method=gates --orders=greedy": "--orders=greedy: not of this task; it belongs to prune, remove",
    "--task=ablate --method=gates": "--method=gates: not of this task; it belongs to prune\n",
    "--task=prune --noscratch": "--scratch=False: not of this task; it belongs to prune --method=gates\n",
    "--task=prune --method=gates --penalties=0.1,much": "--penalties=0.1,much: allowed are numbers\n",
    "--task=ablate --replacement=": "--replacement= is empty: allowed are values with commas between them\n",
    "--task=ablate --rows=1": "--rows=1: 1 is not integer >= 2\n",
    "--task=prune --method=gate": "--method=gate: value should be one of <orders|gates>",
    "--task=prune --unti=head": "Unknown command line flag 'unti'. Did you mean: unit ?",
    "--task=icl --out=": "--out= is empty: allowed is a path",
}
LATE = {  # by what the run has
    "--task=icl --step=7": "--step=7: allowed are last, best, all and the saved steps 0, 15, 30\n",
    "--task=ablate --heads=0.1,1.4": "--heads = '0.1,1.4': '1.4' does not exist; allowed are different heads written "
                                     "0.1 or L0H1, layers 0 to 1, heads 0 to 3\n",
    "--task=ablate --heads=L2H0": "--heads = '2.0': '2.0' does not exist; allowed",
    "--task=remove --heads=0.1,0.1": "--heads = '0.1,0.1': '0.1' is named twice",
    "--task=remove --heads=all": "--heads = 'all': 'all' is no head",
    "--task=ablate --replacement=zero,zero": "--replacement=zero,zero: zero is named twice\n",
    "--task=icl --out=RUN/config.json": "--out=RUN/config.json: a file; allowed is a folder\n",
    "--task=remove --heads=0.1 --out=RUN/checkpoints/9": "exists already or lies among the checkpoints; name another",
    "--task=remove --from=RUN/pairs.json --keep=5": "order greedy in RUN/pairs.json cannot leave 5 of 8 heads; nearest "
                                                    "are 4, 6\n",
    "--task=ablate --replacement=zero,one": "--replacement=one: allowed are zero, mean, resample, uniform, tie\n",
    "--task=ablate --downstream=thawed": "--downstream=thawed: allowed are live, frozen\n",
    "--task=ablate --rows=17": "--rows=17: allowed are 2 to config.data.eval_rows = 16\n",
    "--task=prune --orders=best": "--orders=best: allowed are example, ",
    "--task=prune --unit=layer": "--unit=layer: allowed are head, group\n",
    "--task=prune --method=gates --penalties=0.1,-1": "--penalties=0.1,-1.0, --gate_steps=25: allowed are some finite",
    "--task=prune --method=gates --penalties=nan": "--penalties=nan, --gate_steps=25: allowed are some finite",
    "--task=remove": "--task=remove takes either --heads=0.1,1.3 or --from=FILE --keep=60%\n",
    "--task=remove --heads=0.1 --keep=60%": "--keep and --orders go with --from=FILE, not with --heads\n",
    "--task=remove --heads=0.1 --step=all": "--step=all: remove takes one step; allowed are last, best, or a saved",
    "--task=remove --heads=0.1 --out=RUN/eval":
        "RUN/eval: exists already or lies among the checkpoints; name another folder\n",
    "--task=remove --from=RUN/config.json --keep=5":
        "RUN/config.json: not a result of --task=prune with orders (KeyErr",
    "--task=remove --from=RUN/no.json --keep=5": "RUN/no.json: not a result of --task=prune with orders (FileNo",
    "--task=remove --from=RUN/orders.json": "--from goes with --keep=60%, the share or number of heads that stay\n",
    "--task=remove --from=RUN/orders.json --keep=0%":
        "--keep=0%: allowed is a share such as 60%, or 1 to 7 of the 8 heads\n",
    "--task=remove --from=RUN/orders.json --keep=5 --orders=single": "--orders=single: RUN/orders.json has greedy\n",
}


@pytest.fixture(scope="module")
def eval_command():
    """Function of arguments: eval.py in this process, as `command.run` runs it, its flags as new each time."""
    before = set(flags.FLAGS)
    spec = importlib.util.spec_from_file_location("eval_command", ROOT / "eval.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = set(flags.FLAGS) - before

    def call(*argv):
        for name in names:
            flags.FLAGS[name].unparse()
        with command.errors_on_one_line():
            command._parse(["eval.py", *argv])
            module.main(None)

    yield call
    for name in names:
        delattr(flags.FLAGS, name)


def test_bad_flags_are_one_line_and_exit_code_2_before_jax_is_imported(tmp_path):
    """Each case a fork of one process, whose imports are made once."""
    driver = DRIVER.replace("train.py", "eval.py").format(root=str(ROOT), more="", patch="pass")
    cases = [["--workdir=no", *text.split()] for text in EARLY] + [["--workdir=no", "--task=heads"], ["--task=heads"]]
    done = subprocess.run([sys.executable, "-c", driver], input=json.dumps(cases), capture_output=True, text=True,
                          cwd=tmp_path, env=environment(tmp_path), timeout=180)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    messages = [*EARLY.values(), "no: not a run folder, it has no config.json\n", "--workdir=runs/NAME is needed\n"]
    for case, (text, code, jax_imported), message in zip(cases, found, messages, strict=True):
        assert code == 2 and text.startswith("error: ") and text.count("\n") == 1 and message in text, (case, text)
        assert not jax_imported or case[1:] == ["--task=heads"], case
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("text", LATE)
def test_what_the_run_does_not_have_is_named(eval_command, text, capsys, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")  # JAX has started here
    workdir = small.run().workdir
    orders = [{"order": "greedy", "place": i, "heads": f"L{a}H{b}"} for i, (a, b) in enumerate(small.ALL)]
    pairs = [{"order": "greedy", "place": i, "heads": f"L{i // 2}H{2 * (i % 2)} L{i // 2}H{2 * (i % 2) + 1}"}
             for i in range(4)]  # fmt: skip
    (workdir / "pairs.json").write_text(json.dumps({"tables": {"orders": pairs}}))
    (workdir / "orders.json").write_text(json.dumps({"tables": {"orders": orders}}))
    before = sorted(workdir.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        eval_command(f"--workdir={workdir}", *text.replace("RUN", str(workdir)).split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.count("\n") == 1 and LATE[text].replace("RUN", str(workdir)) in error, error
    assert sorted(workdir.rglob("*")) == before


def test_the_flags_reach_the_task(eval_command, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    seen = []
    monkeypatch.setattr(evaluation, "evaluate", lambda *args, **given: seen.append((args, given)))
    run = f"--workdir={small.run().workdir}"
    eval_command(run, "--task=ablate", "--heads=0.1", "--replacement=zero,mean", "--rows=4", "--seed=3", "--step=best")
    eval_command(run, "--task=prune", "--method=gates", "--penalties=0.1,1", "--noscratch", "--train_params")
    eval_command(run, "--task=remove", "--from=x.json", "--keep=60%", "--orders=greedy", "--out=new")
    at = str(small.run().workdir)
    assert seen == [
        ((at, "ablate", "best", None), {"heads": "0.1", "replacements": ("zero", "mean"), "rows": 4, "seed": 3}),
        ((at, "gates", "last", None), {"penalties": (0.1, 1.0), "from_scratch": False, "train_params": True}),
        ((at, "remove", "last", "new"), {"from_file": "x.json", "keep": "60%", "orders": ("greedy",)}),
    ]
