"""The pictures say what the files say, with no words over one another and none cut off."""
import functools
import json
import re
import shutil

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from mha_jax.config import ConfigError
from mha_jax.report import canvas, plots
from tests.report.fake_run import write_run

CASES = {
    "gqa": {"kv_heads": 2},
    "trigger": {"task": "trigger", "kv_heads": 1, "formed_at": 152, "same_windows": False,
                "name": "trigger $5_a^b$ {0}"},
    "never": {"formed_at": None, "layers": 1, "steps": 400},
    "text": {"task": "text", "layers": 12, "heads": 12, "kv_heads": 12, "steps": 1000, "formed_at": 904, "every": 100,
             "gone": ((0, 3), (5, 5)), "name": "text-small-with-a-rather-long-configuration-name"},
    "tiny": {"layers": 1, "heads": 1, "kv_heads": 1, "steps": 3, "formed_at": None, "every": 1, "finished": False},
    "partial": {"task": "markov", "finished": False},
    "start": {"steps": 0, "formed_at": None},
    "gone": {"gone": ((0, 0), (1, 1)), "formed_at": 22},
}  # fmt: skip


def emergence_figure(workdir):
    return plots.emergence_figure(canvas.read_run(workdir))


def heads_figure(workdir, step=None):
    panels = plots.read_probes(workdir)
    step = max(panels) if step is None else step
    return plots.heads_figure(canvas.read_run(workdir), step, panels[step])


def positions_figure(workdir):
    return plots.positions_figure(canvas.read_run(workdir), plots.read_probes(workdir))


FIGURES = {"emergence": emergence_figure, "heads": heads_figure, "positions": positions_figure}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {name: write_run(root / name, **case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def figure_of(runs):
    """(kind, case) -> Figure, drawn once."""
    return functools.cache(lambda kind, case: FIGURES[kind](runs[case]))


@pytest.fixture
def run(tmp_path, runs):
    """A copy of a run that a test may damage."""
    return shutil.copytree(runs["gqa"], tmp_path / "run")


def texts(figure):
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]


def words(figure):
    return [t.get_text() for t in texts(figure)]


def edit_summary(workdir, **changes):
    path = workdir / "summary.json"
    summary = json.loads(path.read_text())
    summary["induction"] |= changes
    path.write_text(json.dumps(summary))


def spans(ax):
    """[first, last] of each shade over the whole height of a panel."""
    found = [p for p in ax.patches if isinstance(p, Rectangle) and p.get_height() == 1.0]
    return [[p.get_x(), p.get_x() + p.get_width()] for p in found]


def vertical_lines(ax):
    return {line.get_xdata()[0] for line in ax.lines if len(set(line.get_xdata())) == 1 and len(line.get_xdata()) == 2}


@pytest.mark.parametrize("case", ["gqa", "tiny", "never"])
def test_pictures_are_written_and_show_something(runs, case):
    paths = plots.draw_all(runs[case])
    assert [p.name for p in paths.values()] == ["emergence.png", "heads.png", "positions.png"]
    for path in paths.values():
        assert path.parent == runs[case] / "plots"
        pixels = imread(path)[..., :3]
        assert pixels.shape[0] > 400 and pixels.shape[1] > 800
        assert pixels.std() > 0.05 and (pixels.min(-1) < 0.5).mean() > 0.002


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", FIGURES)
def test_no_words_overlap_none_are_cut_and_all_can_be_read(figure_of, case, kind, monkeypatch):
    figure, shown = figure_of(kind, case), []
    monkeypatch.setattr(Text, "draw", lambda text, renderer: shown.append(text))  # ticks out of view are not drawn
    FigureCanvasAgg(figure).draw()
    shown = [t for t in shown if t.get_visible() and t.get_text().strip()]
    boxes = np.array([t.get_window_extent().extents for t in shown])
    assert len(shown) > 10 and min(t.get_fontsize() for t in shown) >= 8
    assert (boxes >= 0).all() and (boxes[:, 2:] <= figure.bbox.extents[2:]).all()
    low, high = (boxes[:, None, k : k + 2] for k in (0, 2))
    shared = np.minimum(high, high[:, 0]) - np.maximum(low, low[:, 0])  # across, up
    overlap = np.triu((shared > 0.5).all(-1), 1)
    assert not overlap.any(), [(shown[a], shown[b]) for a, b in np.argwhere(overlap)]


@pytest.mark.parametrize("case", CASES)
def test_strokes_to_the_names_begin_where_the_lines_end(figure_of, case):
    figure = figure_of("emergence", case)
    FigureCanvasAgg(figure).draw()
    for ax in figure.axes:
        low, high = ax.get_ylim()
        strokes = [line.get_ydata() for line in ax.lines if line.get_transform() == ax.transAxes]
        strokes = {place: start for start, place in strokes}
        named = {t.get_position()[1]: float(m[0]) for t in ax.texts
                 if (m := re.search(r"-?\d+\.\d\d", t.get_text())) and t.get_transform() == ax.transAxes}  # fmt: skip
        assert len(named) >= 2 and set(named) <= set(strokes)
        for place, value in named.items():
            assert low + strokes[place] * (high - low) == pytest.approx(value, abs=0.0051)  # written to 0.01


def test_emergence_names_its_lines_and_events(runs, figure_of):
    figure = figure_of("emergence", "gqa")
    final = canvas.read_run(runs["gqa"]).last("induction/L1H3")
    for expected in (
        "quickstart", "GQA-2, repeat, layers 2, heads 4, 41,216 parameters", "train", "evaluation 1.25", "Bayes 1.22",
        "one-token induction 1.30", "in-context unigram 3.55", "uniform 4.16", "in-context unigram -1.21",
        "Bayes -3.05", "chance 0.06",
        "strength 0.5: formed", f"L1H3 {final:.2f}, best", "ICL score, nats\n(negative is learning)",
        "formed 304 (probes 300 to 310); shaded: 10-90 % of the rise", "loss midpoint 300", "optimizer step",
    ):  # fmt: skip
        assert expected in words(figure), expected
    assert sum(w.startswith("L0H") for w in words(figure)) == 1  # the best of the other layer, to name its colour


def test_emergence_marks_formation_in_every_panel(figure_of):
    for ax in figure_of("emergence", "gqa").axes:
        assert spans(ax) == [[264, 344]]
        assert {304, 300} <= vertical_lines(ax)


def test_emergence_draws_what_was_measured(runs, figure_of):
    run = canvas.read_run(runs["gqa"])
    loss_ax, icl_ax, heads_ax = figure_of("emergence", "gqa").axes

    def shows(ax, steps, values):
        return any(len(line.get_xdata()) == len(steps) and np.array_equal(line.get_xdata(), steps)
                   and np.allclose(line.get_ydata(), values) for line in ax.lines)  # fmt: skip

    assert shows(loss_ax, *run.series("eval/loss")) and shows(loss_ax, *run.series("train/loss"))
    assert shows(icl_ax, *run.series("icl/score"))
    assert len(run.heads()) == 8 and all(shows(heads_ax, *series) for series in run.heads().values())
    steps = run.series("induction/chance")[0]
    assert shows(heads_ax, steps, np.full(len(steps), 0.06 + 0.5 * 0.94))  # strength 0.5, read as a score
    band = next(c for c in icl_ax.collections if isinstance(c, PolyCollection)).get_paths()[0].vertices
    at_end = band[band[:, 0] == 800, 1]
    score, se = run.last("icl/score"), run.last("icl/score_se")
    np.testing.assert_allclose([at_end.min(), at_end.max()], [score - se, score + se])


def test_a_layer_has_one_colour(runs, figure_of):
    run, ax = canvas.read_run(runs["gqa"]), figure_of("emergence", "gqa").axes[2]
    colours = {0: set(), 1: set()}
    for name, (_, values) in run.heads().items():
        (found,) = [line for line in ax.lines if np.array_equal(line.get_ydata(), values)]
        colours[int(name[1])].add(found.get_color())
    assert len(colours[0]) == len(colours[1]) == 1 and colours[0] != colours[1]


def test_trigger_parts_are_drawn_and_named(figure_of):
    found = words(figure_of("emergence", "trigger"))
    assert "trigger $5_a^b$ {0}" in found
    for expected in ("bigram part 2.30", "first outputs 4.08", "later outputs 0.05", "no ICL 2.96"):
        assert expected in found
    assert not any("outputs" in w for w in words(figure_of("emergence", "gqa")))


def test_never_formed_says_so(figure_of):
    figure = figure_of("emergence", "never")
    assert any(w.startswith("no induction head formed by step 400 (strength 0.0") for w in words(figure))
    assert not any(spans(ax) for ax in figure.axes)


def test_text_has_no_bayes_line(figure_of):
    for kind in ("emergence", "positions"):
        assert not any("Bayes" in w for w in words(figure_of(kind, "text")))
    assert "bigram 3.10" in words(figure_of("emergence", "text"))


def test_unfinished_run_says_so_and_still_names_its_best_head(figure_of):
    found = words(figure_of("emergence", "partial"))
    assert any("unfinished" in w for w in found) and not any("parameters" in w for w in found)
    assert any(w.startswith("L1H3") and w.endswith("best") for w in found)


def test_formation_before_the_first_probe_and_lost_later(run):
    edit_summary(run, formation_step=0.0, formation_bracket=[0, 0], formation_rise=None, unstable=True)
    assert "formed by the first probe, 0; later lost" in words(emergence_figure(run))


def test_without_probes_of_induction_nothing_is_said_of_it(run):
    edit_summary(run, formation_step=None, formation_bracket=None, formation_rise=None, strength=None, best_head=None)
    assert not any("formed by" in w or w.startswith("formed ") for w in words(emergence_figure(run)))


def test_null_values_are_left_out(run):
    event = {"step": 800, "tokens": 0, "seconds": 0, "eval/loss": None, "induction/L0H9": None}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")
    assert "evaluation 1.25" in words(emergence_figure(run))
    assert "L0H9" not in canvas.read_run(run).heads()


def test_heads_tables_hold_the_numbers(runs, figure_of):
    arrays = np.load(runs["gqa"] / "probes" / "000800.npz")
    figure = figure_of("heads", "gqa")
    titles = ["induction", "previous token", "duplicate token", "first token", "self", "copying", "entropy",
              "confidence"]  # fmt: skip
    found = {next(w for w in words(ax) if w in titles): ax for ax in figure.axes[:8]}
    assert set(found) == set(titles)
    for name, ax in found.items():
        key = "induction_PLN" if name == "induction" else f"{name.replace(' ', '_')}_LN"
        table = arrays[key].min(0) if name == "induction" else arrays[key]
        cells = {t.get_position(): t.get_text() for t in ax.texts if isinstance(t.get_position()[0], int)}
        assert {(j, i): f"{table[i, j]:.2f}" for i in range(2) for j in range(4)}.items() <= cells.items()
        np.testing.assert_array_equal(ax.images[0].get_array(), table)
        assert ax.images[0].get_clim() == (0, 1)
    assert found["induction"].get_title(loc="left") == "chance 0.06 to 0.11"
    assert found["copying"].get_title(loc="left") == "chance 0.07"
    assert found["self"].get_title(loc="left") == "uniform head 0.07"
    assert found["entropy"].get_title(loc="left") == "uniform head 1.00"


def test_heads_step_can_be_chosen(runs, figure_of):
    assert "quickstart, step 800" in words(figure_of("heads", "gqa"))
    assert "quickstart, step 100" in words(heads_figure(runs["gqa"], step=100))


def test_removed_heads_are_marked_in_every_table(figure_of, tmp_path):
    figure = figure_of("heads", "gone")
    assert words(figure).count("gone") == 2 * 8
    many = write_run(tmp_path / "many", heads=20, kv_heads=20, gone=((1, 2),), steps=50, formed_at=None)
    figure = heads_figure(many)  # too many heads for numbers: hatched
    assert "gone" not in words(figure) and not any("." in w and len(w) == 4 for ax in figure.axes[:8] for w in
                                                   [t.get_text() for t in ax.texts])  # fmt: skip
    assert [sum(p.get_hatch() is not None for p in ax.patches) for ax in figure.axes[:8]] == [1] * 8


def test_positions_shows_telling_steps_bayes_and_windows(runs, figure_of):
    figure = figure_of("positions", "gqa")
    (ax,) = figure.axes
    found = words(figure)
    steps = sorted(int(w.removeprefix("step ")) for w in found if w.startswith("step "))
    assert steps[0] == 0 and steps[-1] == 800 and 300 in steps and 3 <= len(steps) <= 6  # 300: amid the fall
    assert {"Bayes", "early", "late", "quickstart, loss by position"} <= set(found)
    assert spans(ax) == [[0.5, 7.5], [32.5, 64.5]]
    loss_T = np.load(runs["gqa"] / "probes" / "000300.npz")["loss_by_position_T"]
    assert any(np.array_equal(line.get_xdata(), np.arange(1, 65)) and np.array_equal(line.get_ydata(), loss_T)
               for line in ax.lines)  # fmt: skip


def test_windows_that_differ_between_rows_are_not_shaded(figure_of):
    figure = figure_of("positions", "trigger")
    assert "ICL windows differ from row to row" in words(figure) and not spans(figure.axes[0])


def test_folders_that_hold_nothing_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        plots.draw_all(tmp_path / "nothing")
    shutil.rmtree(run / "probes")
    assert list(plots.draw_all(run)) == ["emergence"]
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is missing or empty"):
        plots.draw_all(run)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"half", b"other arrays"])
def test_a_damaged_panel_is_named(run, content):
    path = run / "probes" / "000100.npz"
    path.write_bytes(path.read_bytes()[:500] if content == b"half" else content)
    if content == b"other arrays":
        np.savez(path, step=100, loss_by_position_T=np.zeros(64))
    with pytest.raises(ConfigError, match=rf"^{path}: (cannot be read as a panel|not a panel, it has no )") as caught:
        plots.draw_all(run)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_name_is_left_out_and_said(run, capsys):
    expected = plots.read_probes(run)
    assert capsys.readouterr().err == ""
    (run / "probes" / "foo.npz").write_bytes(b"mine")
    assert plots.read_probes(run).keys() == expected.keys()
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {run}/probes/foo.npz is not used: the files of probes/ are named STEP.npz"]  # fmt: skip


@pytest.mark.parametrize("wanted, expected", [
    ([0.1, 0.5, 0.9], [0.1, 0.5, 0.9]),  # far apart: left alone
    ([0.5, 0.5], [0.45, 0.55]),
    ([0.9, 0.5, 0.5], [0.9, 0.45, 0.55]),
    ([0.0, 0.01], [0.0, 0.1]),  # kept in the range below ...
    ([0.99, 1.0, 1.0], [0.8, 0.9, 1.0]),  # ... and above
    ([0.3, 0.2], [0.3, 0.2]),
    ([0.44, 0.5, 0.56], [0.4, 0.5, 0.6]),
])  # fmt: skip
def test_spread_by_hand(wanted, expected):
    np.testing.assert_allclose(canvas.spread(wanted, 0.1, 0.0, 1.0), expected, atol=1e-12)


def test_spread_is_the_nearest_arrangement():
    rng = np.random.default_rng(0)
    for _ in range(50):
        wanted = rng.random(6)
        order = np.argsort(wanted)
        found = canvas.spread(wanted, 0.08, -9.0, 9.0)
        assert (np.diff(found[order]) >= 0.08 - 1e-12).all()
        cost = np.square(found - wanted).sum()
        for _ in range(30):  # no nearby arrangement that keeps the gaps is closer to what was wanted
            other = found[order] + 0.02 * rng.normal(size=6)
            other = np.maximum.accumulate(other - 0.08 * np.arange(6)) + 0.08 * np.arange(6)
            assert np.square(other - wanted[order]).sum() >= cost - 1e-12
