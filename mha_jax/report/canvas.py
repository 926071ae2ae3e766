"""What every picture shares: reading a run folder, the look, and names written where lines end.

No pyplot: a Figure of its own needs no display and keeps no global state. Colours are those of Okabe and Ito (2008),
which colour-blind readers can tell apart.
"""
import dataclasses
import pathlib

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mha_jax.config import Config, ConfigError
from mha_jax.training.folder import read_config, read_json
from mha_jax.training.tracking import read_metrics, variant

INK, GREY, FAINT, EVENT = "#222222", "#707070", "#c4c4c4", "#D55E00"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
DPI = 150
STYLE = {
    "font.size": 8.5, "xtick.labelsize": 8, "ytick.labelsize": 8, "axes.labelsize": 8.5, "axes.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY, "xtick.color": GREY,
    "ytick.color": GREY, "axes.labelcolor": INK, "text.color": INK, "hatch.linewidth": 0.6, "hatch.color": GREY,
    "text.parse_math": False,  # names of runs may hold dollars
}  # fmt: skip
styled = matplotlib.rc_context(STYLE)
SUMMARY = ("steps", "induction")  # what a summary.json is read for; other figures it may lack
FORMATION = ("best_head", "strength", "censored_at", "formation_step", "formation_bracket", "formation_rise",
             "unstable", "loss_midpoint_step")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run folder says. summary is {} while the run has not finished."""

    workdir: pathlib.Path
    config: Config
    events: list[dict]
    summary: dict

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of a metric, ascending; steps at which it is missing or null are left out."""
        values = {e["step"]: e[key] for e in self.events if e.get(key) is not None}
        return np.array(sorted(values)), np.array([values[s] for s in sorted(values)], np.float64)

    def last(self, key: str) -> float | None:
        """The newest value of a metric, or None."""
        values = self.series(key)[1]
        return float(values[-1]) if len(values) else None

    def names(self, prefix: str) -> list[str]:
        """Last parts of the metrics under a prefix that ever had a value, in the order written."""
        found = dict.fromkeys(k for e in self.events for k, v in e.items() if k.startswith(prefix) and v is not None)
        return [k.rpartition("/")[2] for k in found]

    def heads(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """{'L1H3': prefix matching over steps} of every head that was ever measured."""
        return {name: self.series(f"induction/{name}") for name in self.names("induction/L")}

    def best_head(self) -> str | None:
        """The summary's best head; of an unfinished run the one that scores highest now; None without heads."""
        if self.summary:
            return self.summary["induction"]["best_head"]
        heads = self.heads()
        return max(heads, key=lambda name: heads[name][1][-1], default=None)


def read_run(workdir) -> Run:
    """The run of a folder. ConfigError when it holds none, or one that has measured nothing yet."""
    workdir = pathlib.Path(workdir)
    config, events = read_config(workdir), read_metrics(workdir)
    if not events:
        raise ConfigError(f"{workdir}: nothing to show, metrics.jsonl is missing or empty")
    path = workdir / "summary.json"
    return Run(workdir, config, events, _read_summary(path) if path.exists() else {})


def _read_summary(path: pathlib.Path) -> dict:
    summary = read_json(path)
    found = summary.get("induction")
    missing = [key for key in SUMMARY if key not in summary]
    missing += [f"induction.{key}" for key in FORMATION if not isinstance(found, dict) or key not in found]
    if missing:
        raise ConfigError(f"{path}: has no {', '.join(missing)}; train.py on this folder writes it anew")
    return summary


def panels(num: int, right: float, last_step: int, first_step: int = 0):
    """(Figure, axes) of panels under each other on one step axis; `right` inches are for the names of lines.

    The axis ends at the last step exactly, so that lines end where their names begin.
    """
    width, height = 6.55 + right, 1.55 + 2.25 * num
    figure = Figure(figsize=(width, height), dpi=DPI)
    axes = figure.subplots(num, 1, sharex=True)
    figure.subplots_adjust(left=0.95 / width, right=1 - right / width, top=1 - 0.95 / height, bottom=0.5 / height,
                           hspace=0.12)  # fmt: skip
    axes[0].set_xlim(first_step, max(last_step, first_step + 1))
    axes[0].xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes[-1].set_xlabel("optimizer step")
    return figure, axes


def title(figure: Figure, name: str, details: str):
    """Two lines at the top left, whatever the size of the figure."""
    inch = 1 / figure.get_figheight()
    x = 0.15 / figure.get_figwidth()
    figure.text(x, 1 - 0.12 * inch, name, size=11, weight="bold", va="top")
    figure.text(x, 1 - 0.34 * inch, details, color=GREY, va="top")


def about(run: Run) -> str:
    """Variant, task, size; and whether the run is unfinished."""
    model, params = run.config.model, run.summary.get("num_params")
    shape = f"layers {model.num_layers}, heads {model.num_heads}"
    size = [f"{params:,} parameters"] if params else []
    unfinished = [] if run.summary else ["unfinished (no summary.json)"]
    return ", ".join([variant(model), run.config.data.task, shape, *size, *unfinished])


def line(ax, series, **style):
    """A line; of few points also the points, for one alone is no line."""
    few = {"marker": "o", "markersize": 2.5, "clip_on": False} if len(series[0]) <= 12 else {}
    ax.plot(*series, **few, **style)


def spread(wanted, gap: float, low: float, high: float) -> np.ndarray:
    """The positions nearest to those wanted (least squares) at least `gap` apart, inside a range while it suffices.

    Isotonic regression of wanted_i - i gap, pooling neighbours that are out of order.
    """
    order, pools = np.argsort(wanted, kind="stable"), []
    for i, k in enumerate(order):
        pools.append([wanted[k] - i * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    flat = np.concatenate([np.full(len(p), np.mean(p)) for p in pools])
    out = np.empty(len(order))
    out[order] = flat.clip(low, max(low, high - (len(order) - 1) * gap)) + gap * np.arange(len(order))
    return out


def name_lines(ax, names):
    """Names lines beside the right edge. names: (series or level, text with {:.2f} for the last value, colour) each.

    Names of lines that end close together are moved apart, a stroke leading from each line to its name; dots
    lead from a line that ends early to the edge. Empty series are skipped. Call when all lines are drawn.
    """
    ax.autoscale_view()  # axhline leaves out the margin of a level just inside the limits
    (low, high), edge, ends = ax.get_ylim(), ax.get_xlim()[1], []
    for what, text, colour in names:
        steps, values = what if isinstance(what, tuple) else ([edge], [what])
        if len(values):
            ends.append(((values[-1] - low) / (high - low), text.replace("{:.2f}", f"{values[-1]:.2f}"), colour))
            ax.plot([steps[-1], edge], [values[-1]] * 2, ":", color=colour, linewidth=0.7, scaley=False)
    if not ends:
        return
    points = ax.get_window_extent().height / ax.figure.dpi * 72
    places = spread([y for y, _, _ in ends], 10.5 / points, 0.0, 1.0)
    for (y, text, colour), place in zip(ends, places, strict=True):
        ax.plot([1.004, 1.03], [y, place], color=colour, linewidth=0.7, transform=ax.transAxes, clip_on=False,
                scaley=False)  # fmt: skip
        ax.text(1.036, place, text, color=colour, size=8, va="center", transform=ax.transAxes)


def write_over(ax, x, points: float, text: str, colour):
    """Text over a panel at a place of its x axis, kept inside the panel's width."""
    low, high = ax.get_xlim()
    share = (x - low) / (high - low)
    side = "left" if share < 0.33 else "right" if share > 0.67 else "center"
    ax.annotate(text, (x, 1), (0, points), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha=side, va="center", color=colour, size=8)  # fmt: skip


def save(figure: Figure, path: pathlib.Path) -> pathlib.Path:
    """Writes the figure, making its folder; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
