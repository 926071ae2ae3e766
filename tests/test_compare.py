"""scripts/compare.py: the table says what the summaries say; a bad folder is one line and exit code 2."""
import importlib.util
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.text import Text

from mha_jax.report.plots import read_run
from tests.report.fake_run import write_run

ROOT = pathlib.Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("compare", ROOT / "scripts" / "compare.py")
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    cases = {
        "gqa": {"name": "copy", "kv_heads": 2},
        "mqa": {"name": "copy", "kv_heads": 1, "formed_at": 404, "steps": 1000},
        "never": {"name": "one layer", "layers": 1, "formed_at": None, "steps": 400},
        "partial": {"name": "half {0} of $5 and $6", "finished": False},
        "text": {"name": "text", "task": "text"},
    }
    return {name: write_run(root / name, **case) for name, case in cases.items()}


def cells(table):
    """The table as one dict a run, split where two spaces or more are."""
    header, *rows = [re.split(r" {2,}", text) for text in table.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_table_says_what_the_summary_says(folders):
    workdir = folders["gqa"]
    summary = json.loads((workdir / "summary.json").read_text())
    (found,) = cells(compare.table([read_run(workdir)]))
    assert found == {
        "name": "copy", "variant": "GQA-2", "layers": "2", "params": "41,216", "steps": "800",
        "eval loss": f"{summary['final_eval_loss']:.4f}", "Bayes": "1.2200",
        "gap": f"{summary['final_eval_loss'] - 1.22:+.4f}", "ICL": f"{summary['icl_score']:+.3f}",
        "ICL unigram": "-1.210", "best head": "L1H3", "score": f"{summary['induction']['score']:.3f}",
        "formed": "304", "probes": "300 to 310", "tokens/s": "50,000",
    }  # fmt: skip


def test_runs_on_other_data_are_said_to_be_that(folders, tmp_path, capsys):
    compare.main([str(folders["gqa"]), str(folders["mqa"]), "--out", str(tmp_path / "a.png")])
    assert "warning" not in capsys.readouterr().out
    compare.main([str(folders["gqa"]), str(folders["text"]), "--out", str(tmp_path / "b.png")])
    assert "warning: not the same data (data.task" in capsys.readouterr().out


def test_what_is_not_known_is_a_dash(folders):
    partial, text, never = cells(compare.table([read_run(folders[n]) for n in ("partial", "text", "never")]))
    assert partial["params"] == partial["formed"] == partial["probes"] == "-" and partial["steps"] == "800 of 800"
    assert partial["eval loss"] == "1.2500" and partial["best head"] == "L1H3" and partial["tokens/s"] == "51,234"
    assert text["Bayes"] == text["gap"] == "-" and text["formed"] == "304"
    assert never["formed"] == "not by 400" and never["probes"] == "-" and never["layers"] == "1"


def test_not_probed_is_not_the_same_as_not_formed(folders, tmp_path):
    workdir = shutil.copytree(folders["never"], tmp_path / "run")
    summary = json.loads((workdir / "summary.json").read_text())
    summary["induction"] |= {"censored_at": None, "best_head": None}
    (workdir / "summary.json").write_text(json.dumps(summary))
    (found,) = cells(compare.table([read_run(workdir)]))
    assert found["formed"] == found["best head"] == found["score"] == "-"


def test_columns_are_aligned(folders):
    header, *rows = compare.table([read_run(f) for f in folders.values()]).splitlines()
    for name in compare.HEADER:
        start = re.search(rf"(?<!\w ){re.escape(name)}(?=$|  )", header).start()
        for text in rows:
            if name in compare.TEXT:
                assert text[start] != " " and (start == 0 or text[start - 2 : start] == "  ")
            else:
                end = start + len(name)
                assert text[end - 1] != " " and text[end : end + 2] in ("  ", "")


def test_runs_of_one_name_are_told_apart_by_folder(folders):
    runs = [read_run(folders[n]) for n in ("gqa", "mqa", "never")]
    assert compare.labels(runs) == [f"copy ({folders['gqa']})", f"copy ({folders['mqa']})", "one layer"]


def test_figure_has_a_line_a_run_above_bayes_when_known(folders):
    runs = [read_run(folders[n]) for n in ("gqa", "mqa", "never")]
    figure = compare.comparison_figure(runs)
    words = [t.get_text() for t in figure.findobj(Text)]
    assert "evaluation loss\nabove Bayes, nats" in words and "one layer MHA" in words and "3 runs" in words
    for ax, key in zip(figure.axes, ("eval/loss", "induction/strength", "icl/score"), strict=True):
        colours = []
        for run in runs:
            steps, values = run.series(key)
            values = values - 1.22 if key == "eval/loss" else values
            (line,) = [n for n in ax.lines if len(n.get_xdata()) == len(steps) and np.allclose(n.get_ydata(), values)]
            colours.append(line.get_color())
        assert len(set(colours)) == 3


def test_figure_shows_plain_loss_when_a_run_has_no_bayes(folders):
    figure = compare.comparison_figure([read_run(folders[n]) for n in ("gqa", "text")])
    assert figure.axes[0].get_ylabel() == "evaluation loss, nats"
    losses = read_run(folders["gqa"]).series("eval/loss")[1]
    assert any(np.array_equal(line.get_ydata(), losses) for line in figure.axes[0].lines)


def test_names_do_not_overlap_or_leave_the_figure(folders):
    figure = compare.comparison_figure([read_run(f) for f in folders.values()])
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].texts]
    assert len(boxes) == 5 and all(box.x1 <= figure.bbox.x1 for box in boxes)
    tops = sorted((box.y0, box.y1) for box in boxes)
    assert all(b[0] > a[1] for a, b in itertools.pairwise(tops))


def test_command_from_the_repository_root(folders, tmp_path):
    out = tmp_path / "new" / "figure.png"
    command = [sys.executable, "scripts/compare.py", folders["gqa"], folders["mqa"], "--out", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"figure: {out}" and "GQA-2" in done.stdout and "MQA" in done.stdout
    assert out.stat().st_size > 20_000 and done.stderr == ""


def test_figure_goes_beside_the_first_run(folders, capsys):
    compare.main([str(folders["never"])])
    assert (folders["never"].parent / "compare.png").exists()
    assert "not by 400" in capsys.readouterr().out


def refusal(capsys, *arguments) -> str:
    """The one line that compare.py refuses these arguments with."""
    with pytest.raises(SystemExit) as caught:
        compare.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and err.startswith("error: ") and len(err.splitlines()) == 1, err
    return err


@pytest.mark.parametrize("damage", ["no folder", "empty folder", "no metrics", "broken config"])
def test_bad_folder_is_one_line_and_exit_code_2(folders, tmp_path, capsys, damage):
    bad = tmp_path / "bad"
    if damage != "no folder":
        bad.mkdir()
    if damage == "no metrics":
        (bad / "config.json").write_text((folders["gqa"] / "config.json").read_text())
    if damage == "broken config":
        (bad / "config.json").write_text("{")
    assert str(bad) in refusal(capsys, folders["gqa"], bad)


SUMMARY = {"null": "holds null", "[]": "holds []", '{"steps": 3': "not JSON", "": "not JSON", "{}": "has no steps, ind",
           '{"steps": 3, "induction": null}': "has no induction.best_head, ",
           '{"steps": 3, "induction": {"best_head": "L0H1"}}': "has no induction.strength, "}  # fmt: skip
METRICS = {"null\n": "line 1: not an event", "[]\n": "line 1: not an event", "{}\n": "line 1: not an event",
           '{"eval/loss": 1}\n': "line 1: not an event", '{"step": 0}\n{"st\n{"step": 1}\n': "line 2: not JSON",
           '{"step": 0, "eval/loss": "low"}\n': "line 1: not an event",
           '{"step": 0, "eval': "missing or empty"}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message"), [
    *(("summary.json", text, message) for text, message in SUMMARY.items()),
    *(("metrics.jsonl", text, message) for text, message in METRICS.items()),
    ("config.json", "null", "holds null"),
])  # fmt: skip
def test_a_damaged_file_is_named(folders, tmp_path, capsys, name, text, message):
    bad = shutil.copytree(folders["gqa"], tmp_path / "bad", ignore=shutil.ignore_patterns("probes"))
    (bad / name).write_text(text)
    line = refusal(capsys, folders["mqa"], bad)
    assert str(bad) in line and name in line and message in line


def test_a_metrics_file_cut_short_is_shown_as_far_as_it_goes(folders, tmp_path):
    cut = shutil.copytree(folders["partial"], tmp_path / "cut")
    with open(cut / "metrics.jsonl", "a") as file:
        file.write('{"step": 810, "eval/lo')
    assert compare.table([read_run(cut)]) == compare.table([read_run(folders["partial"])])


def test_a_figure_that_cannot_be_written_is_refused(folders, tmp_path, capsys):
    (tmp_path / "file").touch()
    run = folders["gqa"]
    for out, message in (
        (tmp_path, f"--out={tmp_path} is a folder: allowed is a file ending in .png, .pdf, .svg, .jpg"),
        (tmp_path / "figure", "ends in '': allowed are .png, .pdf, .svg, .jpg\n"),
        (tmp_path / "figure.pgn", f"ends in '.pgn': .*; did you mean {tmp_path}/figure.png?"),
        (tmp_path / "file" / "figure.png", f"{tmp_path}/file"),
        (pathlib.Path("/proc/figure.png"), "/proc/figure.png"),  # nobody may write there, not even root
    ):
        before, _, after = message.partition(".*")
        line = refusal(capsys, run, "--out", out)
        assert before in line and after in line
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
