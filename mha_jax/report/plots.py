"""Pictures of one run, drawn from the files of its folder and nothing else. Lines are named where they end."""
import pathlib

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mha_jax.probes.behaviour import HEAD_SCORES
from mha_jax.probes.induction import FORMED
from mha_jax.report.canvas import (
    DPI,
    EVENT,
    FAINT,
    GREY,
    INK,
    PALETTE,
    Run,
    about,
    line,
    name_lines,
    panels,
    read_run,
    save,
    styled,
    title,
    write_over,
)
from mha_jax.training.tracking import read_probes

LINE_COLOURS = {"bayes": "#009E73", "unigram": "#CC79A7"}
LINE_NAMES = {"bayes": "Bayes", "unigram": "in-context unigram", "no_icl": "no ICL", "induction": "one-token induction"}
PARTS = {"bigram": "bigram part", "first_outputs": "first outputs", "later_outputs": "later outputs"}
PART_COLOURS = ("#0072B2", "#E69F00", "#56B4E9")
TABLES = ("induction", *HEAD_SCORES)
DASHED = (0, (4, 3))


@styled
def emergence_figure(run: Run) -> Figure:
    """Loss, ICL score and prefix matching over steps."""
    steps = [e["step"] for e in run.events]
    figure, axes = panels(3, right=1.75, last_step=max(steps), first_step=min(steps))  # heads removed: not from 0
    for ax, draw in zip(axes, (_loss_panel, _icl_panel, _heads_panel), strict=True):
        name_lines(ax, draw(ax, run))
    figure.align_ylabels(axes)
    _mark_formation(axes, run)
    title(figure, run.config.name, about(run))
    return figure


def _loss_panel(ax, run: Run) -> list:
    """Draws the losses and the lines to read them against; returns what to name."""
    train, evaluation = run.series("train/loss"), run.series("eval/loss")
    line(ax, train, color=FAINT, linewidth=0.8)
    names = [(train, "train", GREY), (evaluation, "evaluation {:.2f}", INK)]
    for (key, text), colour in zip(PARTS.items(), PART_COLOURS, strict=True):
        line(ax, run.series(f"eval/{key}"), color=colour, linewidth=1.0)
        names.append((run.series(f"eval/{key}"), text + " {:.2f}", colour))
    line(ax, evaluation, color=INK, linewidth=1.8)
    ax.set_ylabel("loss, nats")
    return names + [_level(ax, key, run.last(f"limit/{key}")) for key in run.names("limit/")]


def _icl_panel(ax, run: Run) -> list:
    score, (se_steps, se) = run.series("icl/score"), run.series("icl/score_se")
    line(ax, score, color=INK, linewidth=1.8)
    steps, at, at_se = np.intersect1d(score[0], se_steps, return_indices=True)
    ax.fill_between(steps, score[1][at] - se[at_se], score[1][at] + se[at_se], color=INK, alpha=0.2, linewidth=0)
    ax.axhline(0, color=FAINT, linewidth=0.8, zorder=1)
    ax.set_ylabel("ICL score, nats\n(negative is learning)")
    levels = [_level(ax, k, run.last(f"icl/{k}")) for k in ("unigram", "bayes") if run.last(f"icl/{k}") is not None]
    return [(score, "score {:.2f} (± 1 s.e.)", INK), *levels]


def _level(ax, key: str, value: float):
    """A strategy's loss or score, the same at every step: a dashed line and its name."""
    colour = LINE_COLOURS.get(key, GREY)
    ax.axhline(value, color=colour, linewidth=0.9, linestyle=DASHED, zorder=1)
    return value, LINE_NAMES.get(key, key.replace("_", " ")) + " {:.2f}", colour


def _heads_panel(ax, run: Run) -> list:
    """All heads, a colour per layer; the best is drawn thick, and with few layers each one's best is named."""
    heads, best, layers = run.heads(), run.best_head(), run.config.model.num_layers
    few = layers <= len(PALETTE)
    colours = PALETTE if few else matplotlib.colormaps["viridis"](np.linspace(0, 0.8, layers))
    layer = {name: int(name[1 : name.index("H")]) for name in heads}
    ordered = sorted(heads, key=lambda name: heads[name][1][-1])
    best_of = {layer[name]: name for name in ordered if few} | ({layer[best]: best} if best else {})
    for name, series in heads.items():
        style = {"linewidth": 2.0, "zorder": 3} if name == best else {"linewidth": 0.8, "alpha": 0.55}
        line(ax, series, color=colours[layer[name]], **style)
    names = [(heads[name], name + (" {:.2f}, best" if name == best else " {:.2f}"), colours[layer[name]])
             for name in best_of.values()]  # fmt: skip
    steps, chance = run.series("induction/chance")
    threshold = chance + FORMED * (1 - chance)
    for level, text, style in ((chance, "chance {:.2f}", ":"), (threshold, "strength 0.5: formed", "--")):
        ax.plot(steps, level, color=GREY, linewidth=0.9, linestyle=style, zorder=1)
        names.append(((steps, level), text, GREY))
    ax.set_ylim(-0.02, 1.02)
    ax.set_ylabel("prefix matching of heads" + ("" if few else "\n(dark to light: first to last layer)"))
    return names


def _mark_formation(axes, run: Run):
    """Formation and loss midpoint through all panels, named in two rows over the first."""
    if not run.summary:
        return
    found = run.summary["induction"]
    formed, midpoint, rise = (found[k] for k in ("formation_step", "loss_midpoint_step", "formation_rise"))
    if found["censored_at"] is not None:
        text = f"no induction head formed by step {found['censored_at']} (strength {found['strength']:.2f})"
        write_over(axes[0], axes[0].get_xlim()[0], 16, text, EVENT)
    if formed is not None:
        low, high = found["formation_bracket"]
        text = f"formed {formed:.0f} (probes {low} to {high})" if low < high else f"formed by the first probe, {low}"
        text += ("; shaded: 10-90 % of the rise" if rise else "") + ("; later lost" if found["unstable"] else "")
        write_over(axes[0], formed, 16, text, EVENT)
    if midpoint is not None:
        write_over(axes[0], midpoint, 5, f"loss midpoint {midpoint}", GREY)
    for ax in axes:
        if rise:
            ax.axvspan(*rise, color="#f3e9df", linewidth=0, zorder=0)
        for step, colour, style in ((formed, EVENT, "-"), (midpoint, GREY, (0, (1, 2)))):
            if step is not None:
                ax.axvline(step, color=colour, linewidth=0.9, linestyle=style, zorder=1)


@styled
def heads_figure(run: Run, step: int, arrays: dict) -> Figure:
    """A table of layers by heads for each score; `arrays` are those of a full panel at `step`."""
    tables = [_table(arrays, key) for key in TABLES]
    L, N = tables[0][0].shape
    cell_w, cell_h = min(max(0.36, 1.5 / N), 4.4 / N), min(0.3, 3.6 / L)  # inches
    rows = -(-len(TABLES) // 4)
    width, height = 0.85 + 4 * N * cell_w + 3 * 0.35, 1.1 + rows * (0.65 + L * cell_h)
    figure = Figure(figsize=(width, height), dpi=DPI)
    axes = figure.subplots(rows, 4, sharex=True, sharey=True)
    figure.subplots_adjust(left=0.6 / width, right=1 - 0.25 / width, top=1 - 1.0 / height, bottom=0.75 / height,
                           wspace=0.35 / (N * cell_w), hspace=0.65 / (L * cell_h))  # fmt: skip
    for ax in axes.flat[len(TABLES) :]:
        ax.set_visible(False)
    for ax, key, (table_LN, chance) in zip(axes.flat[: len(TABLES)], TABLES, tables, strict=True):
        image = _heatmap(ax, table_LN, numbers=cell_w >= 0.33 and cell_h >= 0.18)
        ax.set_title(chance, loc="left", size=8, color=GREY, pad=4)
        ax.annotate(key.replace("_", " "), (0, 1), (0, 15), xycoords="axes fraction", textcoords="offset points")
        ax.set_xticks(range(0, N, -int(-0.18 // cell_w)))
        ax.set_yticks(range(0, L, -int(-0.18 // cell_h)))
    for ax, side in [(ax, ax.set_ylabel) for ax in axes[:, 0]] + [(ax, ax.set_xlabel) for ax in axes[-1]]:
        side("layer" if side == ax.set_ylabel else "head")
    bar = figure.add_axes((1 - 1.65 / width, 0.25 / height, 1.4 / width, 0.07 / height))
    figure.colorbar(image, cax=bar, orientation="horizontal", ticks=(0, 0.5, 1)).outline.set_visible(False)
    title(figure, f"{run.config.name}, step {step}", about(run))
    return figure


def _table(arrays, key: str) -> tuple[np.ndarray, str]:
    """(scores [L, N], what they are compared with). Induction: the minimum over repeat lengths."""
    if key == "induction":
        low, high = (f"{x:.2f}" for x in (arrays["induction_chance_P"].min(), arrays["induction_chance_P"].max()))
        return arrays["induction_PLN"].min(0), f"chance {low}" + (f" to {high}" if low != high else "")
    reference = "chance" if key == "copying" else "uniform head"
    return arrays[f"{key}_LN"], f"{reference} {float(arrays[f'{key}_chance']):.2f}"


def _heatmap(ax, table_LN, numbers: bool):
    """Scores on a scale fixed at 0 to 1; a removed head (NaN) is hatched."""
    for (layer, head), value in np.ndenumerate(table_LN):
        gone = np.isnan(value)
        if gone:
            ax.add_patch(Rectangle((head - 0.5, layer - 0.5), 1, 1, facecolor="#e2e2e2", linewidth=0,
                                   hatch=None if numbers else "////"))  # fmt: skip
        if numbers:
            ax.text(head, layer, "gone" if gone else f"{value:.2f}", ha="center", va="center", size=8,
                    color="white" if value > 0.6 else INK)  # fmt: skip
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return ax.imshow(table_LN, vmin=0, vmax=1, cmap="Blues", aspect="auto")


@styled
def positions_figure(run: Run, panels: dict[int, dict]) -> Figure:
    """Loss at each position at steps spread over the fall of the loss; `panels` are arrays of full panels by step."""
    loss = {step: arrays["loss_by_position_T"] for step, arrays in panels.items()}
    strategies = {key: panels[max(panels)].get(f"{key}_by_position_T", []) for key in ("unigram", "bayes")}
    steps, t, names = _telling_steps(loss), np.arange(1, len(loss[max(loss)]) + 1), []
    figure = Figure(figsize=(7.6, 4.2), dpi=DPI)
    ax = figure.add_axes((0.09, 0.12, 0.76, 0.7), xlim=(1, len(t)), xlabel="position t of the predicted token",
                         ylabel="loss, nats")  # fmt: skip
    shades = np.linspace(0.95, 0.15, len(steps))[::-1]  # of one step, the darkest
    for step, colour in zip(steps, matplotlib.colormaps["viridis_r"](shades), strict=True):
        line(ax, (t, loss[step]), color=colour, linewidth=1.2)
        names.append(((t, loss[step]), f"step {step}", colour))
    for key, value_T in strategies.items():
        line(ax, (t[: len(value_T)], value_T), color=LINE_COLOURS.get(key, GREY), linewidth=1.0, linestyle=DASHED)
        names.append(((t[: len(value_T)], value_T), LINE_NAMES.get(key, key), LINE_COLOURS.get(key, GREY)))
    ax.set_ylim(0, None)
    windows = run.summary.get("icl_positions", {"early": None, "late": None, "same_in_every_row": True})
    if not windows["same_in_every_row"]:
        write_over(ax, len(t), 7, "ICL windows differ from row to row", GREY)
    for name in ("early", "late") if windows["same_in_every_row"] else ():
        if windows[name]:
            first, last = windows[name]
            ax.axvspan(first - 0.5, last + 0.5, color="#f0f0f0", linewidth=0, zorder=0)
            write_over(ax, (first + last) / 2, 7, name, GREY)
    name_lines(ax, names)
    title(figure, f"{run.config.name}, loss by position", about(run))
    return figure


def _telling_steps(loss: dict[int, np.ndarray], most: int = 6) -> list[int]:
    """First, last, and the probed steps nearest to even drops of the mean loss between them."""
    mean = {step: loss_T.mean() for step, loss_T in sorted(loss.items())}
    first, last = min(mean), max(mean)
    levels = np.linspace(mean[first], mean[last], most)[1:-1]
    return sorted({first, last} | {min(mean, key=lambda step: abs(mean[step] - level)) for level in levels})


def draw_all(workdir) -> dict[str, pathlib.Path]:
    """Every picture of a run folder, {name: plots/name.png}; those of the probes only once there are any.

    ConfigError when the folder holds no run, or one that has measured nothing.
    """
    run, folder = read_run(workdir), pathlib.Path(workdir) / "plots"
    figures, panels = {"emergence": emergence_figure(run)}, read_probes(workdir)
    if panels:
        newest = max(panels)
        figures |= {"heads": heads_figure(run, newest, panels[newest]), "positions": positions_figure(run, panels)}
    return {name: save(figure, folder / f"{name}.png") for name, figure in figures.items()}
