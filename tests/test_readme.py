"""The README is true: its commands run as they stand there, what it says comes out comes out, what it names exists."""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import types

import pytest

from mha_jax import config as configs
from mha_jax.validation import resolve
from tests.test_train_command import DRIVER, environment

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FENCES = re.findall(r"^```\w*\n(.*?)^```", README, re.M | re.S)
PROSE = re.sub(r"^```.*?^```", "", README, flags=re.M | re.S)
SPANS = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", PROSE)]
LINES = [line.partition(" #")[0].strip() for fence in FENCES for line in fence.splitlines()]
SHOWN = [command for command in [*LINES, *SPANS] if re.match(r"(python|make) [\w./]", command)]

TINY = ("--config.steps=6 --config.steps_per_call=3 --config.model.d_model=32 --config.data.length=32 "
        "--config.data.batch_size=8 --config.data.eval_rows=8 --config.data.period_min=4 --config.data.period_max=8 "
        "--config.probes.rows=8 --config.probes.panel=3 --config.checkpoint.save=3")  # fmt: skip


def shown(script):
    """The one command that the README shows for a script."""
    (command,) = (c for c in SHOWN if c.startswith(f"python {script}"))
    return command


def shown_eval(task):
    """The command that the README shows for a task of eval.py."""
    (command,) = (c for c in SHOWN if c.startswith("python eval.py") and f"--task={task}" in c)
    return command


class Chain:
    """Commands in a home of their own, where runs/ is; their output by the name they were run under."""

    def __init__(self, home):
        self.home, self.runs, self.done = home, home / "runs", {}

    def __call__(self, name, command, **extra):
        argv = shlex.split(command.replace("runs/", f"{self.runs}/"))
        self.done[name] = subprocess.run(
            [sys.executable if argv[0] == "python" else argv[0], *argv[1:]], cwd=ROOT, capture_output=True, text=True,
            env=environment(self.home), timeout=180, **extra,
        )  # fmt: skip

    def lines(self, name):
        """What a command that succeeded printed."""
        assert self.done[name].returncode == 0, self.done[name].stderr
        return self.done[name].stdout.splitlines()


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The README from train.py to compare.py on one run of six steps."""
    run = Chain(tmp_path_factory.mktemp("home"))
    train = shown("train.py").replace("NAME", "quickstart").replace("[--config.section.key=value ...]", TINY)
    heads = shown_eval("heads")
    run("train", train)
    run.events = (run.runs / "quickstart" / "metrics.jsonl").read_bytes()
    run("again", train)
    run("heads", heads)
    run("icl", heads.replace("heads", "icl") + " --step=best")
    run("remove", shown_eval("remove"))
    compare = shown("scripts/compare.py")
    for folder in re.findall(r"runs/(\w+)", compare):
        shutil.copytree(run.runs / "quickstart", run.runs / folder)
    run("compare", compare)
    return run


def test_every_command_shown_is_one_that_is_run_here():
    scripts = {c.split()[1] for c in SHOWN if c.startswith("python ")}
    assert scripts == {"train.py", "eval.py", "scripts/compare.py", "scripts/benchmark.py"}
    assert shown("train.py").startswith("python train.py --config=configs/NAME.py --workdir=runs/NAME [")
    evals = [c.split()[2:] for c in SHOWN if c.startswith("python eval.py")]
    assert {e[0] for e in evals} == {"--workdir=runs/quickstart"}
    # ablate and prune take a minute each at this size: tests/laboratory calls them.
    assert {e[1] for e in evals} == {f"--task={task}" for task in ("heads", "ablate", "prune", "remove")}
    assert {"--task=icl", "--task=all", "--step=last|best|all|N"} <= set(SPANS)


def test_train_makes_what_the_readme_says_comes_out(chain):
    (tree,) = (fence for fence in FENCES if fence.startswith("runs/quickstart/"))
    names = [n.removeprefix("runs/quickstart/") for n in re.findall(r"[\w/]+(?:\.(?:png|jsonl?|npz)|/(?=\s))", tree)]
    assert len(names) >= 8
    for name in names:
        assert (chain.runs / "quickstart" / name.replace("000400", "000006")).exists(), name
    assert json.loads((chain.runs / "quickstart" / "config.json").read_text())["steps"] == 6


def labels(lines):
    """What stands before the colon of each line; four spaces begin the rest of a line too long for the page."""
    return [line.partition(":")[0].strip() for line in lines if not line.startswith("    ")]


def test_the_readme_shows_the_lines_that_train_prints(chain):
    at = README.index("The last lines of the quickstart")
    block = re.search(r"^```\n(.*?)^```", README[at:], re.M | re.S)[1]
    assert labels(block.splitlines()) == labels(chain.lines("train"))
    assert chain.lines("train")[-1].startswith(f"run folder: {chain.runs}/quickstart")


def test_the_same_command_again_only_prints_the_summary_again(chain):
    first, again = chain.lines("train"), chain.lines("again")
    assert [line for line in first if not line.startswith("speed:")] == [
        line for line in again if not line.startswith("speed:")]  # fmt: skip
    assert len(first) == len(again) > 5
    assert (chain.runs / "quickstart" / "metrics.jsonl").read_bytes() == chain.events
    assert "resumes exactly from step 6" in chain.done["again"].stderr


def test_eval_measures_the_run_from_its_folder(chain):
    folder, heads, icl = chain.runs / "quickstart", chain.lines("heads"), chain.lines("icl")
    events = [json.loads(line) for line in chain.events.decode().splitlines()]
    losses = {e["step"]: e["eval/loss"] for e in events if "eval/loss" in e}
    last = {k: v for e in events if e["step"] == 6 for k, v in e.items()}
    assert heads[0].startswith("quickstart, step 6, ")
    found = json.loads((folder / "eval" / "heads" / "000006.json").read_text())["scores"]["previous_token"]
    names = [(layer, head) for layer in range(2) for head in range(4)]
    assert [found[i][j] for i, j in names] == [last[f"previous_token/L{i}H{j}"] for i, j in names]
    assert [line.split()[0] for line in heads if re.match(r"L\dH\d ", line)] == [f"L{i}H{j}" for i, j in names]
    best = min(losses, key=losses.get)
    assert icl[0].startswith(f"quickstart, step {best}, ")
    assert json.loads((folder / "eval" / "icl" / f"{best:06d}.json").read_text())["eval_loss"] == losses[best]
    for path in (f"heads/{6:06d}.png", f"icl/{best:06d}.png"):
        assert (folder / "eval" / path).stat().st_size > 5_000


def test_removed_heads_are_a_run_of_their_own(chain):
    lines = chain.lines("remove")
    assert lines[1].startswith("removed L0H1 L1H2; masked and removed differ by ")
    kept = json.loads((chain.runs / "smaller" / "config.json").read_text())["model"]["kept_heads"]
    assert kept == [[0, 2, 3], [0, 1, 3]]


def test_compare_draws_one_figure_and_prints_one_table(chain):
    lines = chain.lines("compare")
    assert lines[0].startswith("name") and [line.split()[0] for line in lines[1:4]] == ["quickstart"] * 3
    assert lines[-1] == f"figure: {chain.runs}/compare.png" and len(lines) == 5
    assert (chain.runs / "compare.png").stat().st_size > 20_000


REFUSED = {
    "--task=heads": "--workdir=runs/NAME is needed",
    "--workdir=runs/quickstart": "--task=None: allowed are heads, icl",
    "--workdir=runs/quickstart --task=head": "--task=head: allowed are heads, icl",
    "--workdir=runs/quickstart --task=icl --step=5": "--step=5: allowed are last, best, all and the saved steps 0, 3, ",
    "--workdir=runs/nowhere --task=heads": "runs/nowhere: not a run folder, it has no config.json",
    "--workdir=runs/quickstart --taks=heads": "Unknown command line flag 'taks'",
    "--workdir=runs/quickstart --task=icl 6": "'6': not a flag",
}


def test_bad_input_to_eval_is_one_line_and_exit_code_2(chain):
    """Each case a fork of one process, whose imports are made once."""
    driver = DRIVER.replace("train.py", "eval.py").format(root=str(ROOT), more="", patch="pass")
    cases = [text.replace("runs/", f"{chain.runs}/").split() for text in REFUSED]
    before = sorted(chain.runs.rglob("*"))
    done = subprocess.run([sys.executable, "-c", driver], input=json.dumps(cases), capture_output=True, text=True,
                          cwd=chain.home, env=environment(chain.home), timeout=180)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for (text, code, _), (case, message) in zip(found, REFUSED.items(), strict=True):
        assert code == 2 and text.startswith("error: ") and text.count("\n") == 1 and message in text, (case, text)
    assert sorted(chain.runs.rglob("*")) == before


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_every_make_command_shown_does_what_it_says():
    """As make says it would; `make test` runs this, so what it was given is taken away."""
    commands = [c for c in SHOWN if c.startswith("make ")]
    asked = "; echo ----; ".join(c.replace("make ", "make --no-print-directory -n ", 1) for c in commands)
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CONFIG", "ARGS",
                                                            "WORKDIR", "ACCELERATOR", "PYTHON")}  # fmt: skip
    done = subprocess.run(["sh", "-ec", asked], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    steps = dict(zip(commands, done.stdout.split("----\n"), strict=True))
    python = ".venv/bin/python"
    last = {c: out.splitlines()[-1].strip() if out else "" for c, out in steps.items()}
    assert last["make run"] == f"{python} train.py --config=configs/quickstart.py --workdir=runs/quickstart"
    assert last["make test"] == f"{python} -m pytest -n 2 --dist loadgroup"
    assert ".venv/bin/ruff check ." in steps["make test"]
    for command in commands:
        given = dict(part.split("=", 1) for part in shlex.split(command)[2:])
        if "CONFIG" in given:
            name = pathlib.Path(given["CONFIG"]).stem
            workdir = given.get("WORKDIR", f"runs/{name}")
            expected = f"{python} train.py --config={given['CONFIG']} --workdir={workdir} {given.get('ARGS', '')}"
            assert last[command] == expected.strip() and (ROOT / given["CONFIG"]).exists()
        if "ACCELERATOR" in given:
            assert f'"jax[{given["ACCELERATOR"]}]"' in steps[command]


def test_the_benchmark_starts():
    done = subprocess.run([sys.executable, *shown("scripts/benchmark.py").split()[1:], "--help"], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and "--shape" in done.stdout


def test_the_config_in_the_readme_is_one():
    (code,) = (fence for fence in FENCES if "def get_config" in fence)
    module = types.ModuleType("readme")
    exec(code, vars(module))
    assert resolve(module.get_config()).model.num_kv_heads == 2


def test_every_setting_named_exists():
    keys = set(configs.flat(configs.Config()))
    sections = {key.partition(".")[0] for key in keys if "." in key}
    named = set(re.findall(r"--config\.([\w.]+)=", README)) - {"section.key"}
    for span in SPANS:
        first = re.match(r"([a-z]+)\.(\w+)", span)
        if first and first[1] in sections and first[2] != "py":
            named.add(first[0])
    assert len(named) >= 7 and named <= keys, named - keys


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/results.md"])
def test_every_file_named_exists(name):
    text, rooms = (ROOT / name).read_text(), ("configs", "docs", "mha_jax", "scripts", "tests")
    files = [f"/{p.relative_to(ROOT)}" for p in (*ROOT.glob("*"), *(p for r in rooms for p in (ROOT / r).rglob("*")))]
    for path in set(re.findall(r"[\w/]*\w\.(?:py|md|toml|txt)\b", text)):
        if "NAME" not in path and not path.startswith("runs/"):
            assert any(file.endswith(f"/{path}") for file in files), path
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / name).parent / target).exists(), target


def test_nothing_in_the_readme_waits_to_be_filled_in():
    """Figures that are not measured yet stand as words in capitals while it is written."""
    assert set(re.findall(r"\b[A-Z]{9,}\b", README)) <= {"ACCELERATOR", "CONTRIBUTING"}
