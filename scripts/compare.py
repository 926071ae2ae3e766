"""Compare runs: one figure, one table.

    python scripts/compare.py runs/mha runs/gqa runs/mqa [--out runs/compare.png]

Top to bottom: evaluation loss (above Bayes when all runs know theirs), the best head's induction strength, the ICL
score. Runs that have not finished are shown as far as they are, with - for what they do not know yet.
Exit codes: 0 done; 2 for a folder that holds no run or a damaged one, or a figure that cannot be written there.
"""
import argparse
import collections
import difflib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # run from anywhere, nothing installed

from matplotlib.figure import Figure

from mha_jax import command
from mha_jax.config import ConfigError, flat
from mha_jax.probes.induction import FORMED
from mha_jax.report.canvas import DPI, FAINT, GREY, PALETTE, Run, line, name_lines, panels, read_run, styled, title
from mha_jax.training.tracking import variant

HEADER = ("name", "variant", "layers", "params", "steps", "eval loss", "Bayes", "gap", "ICL", "ICL unigram",
          "best head", "score", "formed", "probes", "tokens/s")  # fmt: skip
TEXT = ("name", "variant", "best head")  # columns of words, on the left of their column
FORMATS = (".png", ".pdf", ".svg", ".jpg")  # of the figure


def labels(runs: list[Run]) -> list[str]:
    """Names of runs; where two are the same their folders tell them apart."""
    count = collections.Counter(run.config.name for run in runs)
    return [run.config.name + (f" ({run.workdir})" if count[run.config.name] > 1 else "") for run in runs]


def row(run: Run) -> dict:
    """The table's cells of one run, as text; the name is the caller's. Losses and scores in nats."""
    s, found = run.summary, run.summary.get("induction", {})
    loss, bayes = s.get("final_eval_loss", run.last("eval/loss")), s.get("bayes_loss", run.last("limit/bayes"))
    step, best = max(e["step"] for e in run.events), run.best_head()
    bracket = found.get("formation_bracket")
    return {
        "variant": variant(run.config.model),
        "layers": str(run.config.model.num_layers),
        "params": _number(s.get("num_params"), ",d"),
        "steps": str(s["steps"]) if s else f"{step} of {run.config.steps}",
        "eval loss": _number(loss, ".4f"),
        "Bayes": _number(bayes, ".4f"),
        "gap": _number(None if None in (loss, bayes) else loss - bayes, "+.4f"),
        "ICL": _number(s.get("icl_score", run.last("icl/score")), "+.3f"),
        "ICL unigram": _number(s.get("icl_unigram", run.last("icl/unigram")), "+.3f"),
        "best head": best or "-",
        "score": _number(run.last(f"induction/{best}"), ".3f"),
        "formed": _formed(found, bracket),
        "probes": f"{bracket[0]} to {bracket[1]}" if bracket else "-",
        "tokens/s": _number(s.get("tokens_per_second", run.last("perf/tokens_per_second")), ",.0f"),
    }  # fmt: skip


def _formed(found: dict, bracket) -> str:
    if found.get("censored_at") is not None:
        return f"not by {found['censored_at']}"
    first = "by " if bracket and bracket[0] == bracket[1] else ""  # of a run that begins with a trained model
    return first + _number(found.get("formation_step"), ".0f")


def _number(value, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def table(runs: list[Run]) -> str:
    """One line a run under a header, columns aligned: words left, numbers right."""
    rows = [dict(zip(HEADER, HEADER, strict=True))]
    rows += [{"name": name} | row(run) for name, run in zip(labels(runs), runs, strict=True)]
    width = {key: max(len(r[key]) for r in rows) for key in HEADER}
    lines = ["  ".join(f"{r[key]:{'<' if key in TEXT else '>'}{width[key]}}" for key in HEADER) for r in rows]
    return "\n".join(text.rstrip() for text in lines)


@styled
def comparison_figure(runs: list[Run]) -> Figure:
    """The runs over steps, a colour (and from the sixth on a dash) each, named at the ends of their loss curves."""
    names = [f"{name} {variant(run.config.model)}" for name, run in zip(labels(runs), runs, strict=True)]
    bayes = [run.last("limit/bayes") for run in runs]
    last_step = max(e["step"] for run in runs for e in run.events)
    figure, axes = panels(3, right=0.6 + 0.067 * max(map(len, names)), last_step=last_step)
    figure.subplots_adjust(top=1 - 0.65 / figure.get_figheight())  # nothing is written over the panels
    known, ends = None not in bayes, []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        style = {"color": PALETTE[i % len(PALETTE)], "linestyle": ("-", "--", ":")[i // len(PALETTE) % 3]}
        steps, loss = run.series("eval/loss")
        curves = (steps, loss - bayes[i] if known else loss), run.series("induction/strength"), run.series("icl/score")
        for ax, curve in zip(axes, curves, strict=True):
            line(ax, curve, linewidth=1.5, **style)
        ends.append((curves[0], name, style["color"]))
    axes[0].set_ylabel("evaluation loss\nabove Bayes, nats" if known else "evaluation loss, nats")
    axes[1].set_ylabel("induction strength\nof the best head")
    axes[2].set_ylabel("ICL score, nats\n(negative is learning)")
    axes[1].axhline(FORMED, color=GREY, linewidth=0.9, linestyle="--", zorder=1)
    for ax in (axes[0], axes[2]) if known else axes[2:]:
        ax.axhline(0, color=FAINT, linewidth=0.8, zorder=1)
    name_lines(axes[0], ends)
    name_lines(axes[1], [(FORMED, "formed", GREY)])
    figure.align_ylabels(axes)
    tasks = dict.fromkeys(run.config.data.task for run in runs)
    title(figure, f"{len(runs)} runs", ", ".join(tasks))
    return figure


def check_out(out: pathlib.Path):
    """ConfigError when a figure cannot go there, before anything is read and drawn."""
    if out.is_dir():
        raise ConfigError(f"--out={out} is a folder: allowed is a file ending in {', '.join(FORMATS)}")
    if out.suffix.lower() not in FORMATS:
        near = difflib.get_close_matches(out.suffix.lower(), FORMATS, 1)
        hint = f"; did you mean {out.with_suffix(near[0])}?" if near else ""
        raise ConfigError(f"--out={out} ends in {out.suffix!r}: allowed are {', '.join(FORMATS)}{hint}")


def other_data(runs: list[Run]) -> list[str]:
    """The keys of config.data that decide which tokens a loss is of, where the runs differ."""
    keys = [f"data.{key}" for key in ("task", "dataset", "field", "validation", "tokenizer", "vocab_size", "length",
                                      "period_min", "period_max", "block", "table_seed", "num_triggers")]  # fmt: skip
    configs = [flat(run.config) for run in runs]
    return [key for key in keys if len({config[key] for config in configs}) > 1]


@command.errors_on_one_line()
def main(arguments: list[str] | None = None):
    """Draws and prints."""
    parser = argparse.ArgumentParser(description="Compare runs: one figure, one table.")
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=pathlib.Path, help="figure; default: compare.png beside the first run")
    args = parser.parse_args(arguments)
    out = args.out or args.runs[0].resolve().parent / "compare.png"
    check_out(out)
    runs = [read_run(path) for path in args.runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    comparison_figure(runs).savefig(out, dpi=DPI)
    print(table(runs))
    if differ := other_data(runs):
        print(f"warning: not the same data ({', '.join(differ)}): the losses are not comparable")
    print(f"figure: {out}")


if __name__ == "__main__":
    main()
