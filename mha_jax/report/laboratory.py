"""Pictures of what the laboratory found. Each takes a `Result` and returns a figure."""
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mha_jax.probes.panel import head_name
from mha_jax.report.canvas import DPI, GREY, INK, PALETTE, line, styled, title

CHANGE = 1.0  # nats at which the colour of a change of loss is full


def subtitle(facts: dict) -> str:
    """Which run, step and data a picture speaks of."""
    rows = f", {facts['sequences']} sequences" if "sequences" in facts else ""
    return f"{facts['run']}, step {facts['step']}{rows}"


def grid(ax, values, columns, *, low: float, high: float, cmap="RdBu_r", size: float = 6.5, texts=None, rotation=0):
    """Coloured cells with their numbers, or `texts` of the same shape ('' writes nothing); a NaN is an empty cell."""
    ax.imshow(values, cmap=cmap, vmin=low, vmax=high, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        if not np.isnan(value):
            dark = abs(value) > (0.6 if low == 0 else 0.65) * high
            ax.text(j, i, f"{value:.2f}" if texts is None else texts[i][j], ha="center", va="center", size=size,
                    color="white" if dark else INK)  # fmt: skip
    ax.set_xticks(range(len(columns)), columns, size=size, rotation=rotation)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


@styled
def ablation_figure(result) -> Figure:
    """Share of the ICL score removed and change of loss: sets down, replacement x downstream across. A dot marks a
    model that is broken rather than without the head (its late loss is above the no-context line)."""
    rows = [r for r in result.tables["sets"] if r["kind"] != "only"]
    names = list(dict.fromkeys(r["set"] for r in rows))
    ways = list(dict.fromkeys((r["replacement"], r["downstream"]) for r in rows))
    at = {(r["set"], r["replacement"], r["downstream"]): r for r in rows}
    height = 1.5 + 0.19 * len(names)
    figure = Figure(figsize=(1.5 + 2 * max(0.45 * len(ways) + 0.4, 2.2), height), dpi=DPI)  # the names above need it
    axes = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=1.45 / figure.get_figwidth(), right=0.98, top=1 - 1.1 / height, bottom=0.08 / height,
                           wspace=0.05)  # fmt: skip
    for ax, key, name, top in ((axes[0], "icl_removed", "share of the ICL score removed", 1.0),
                               (axes[1], "loss_change", "change of loss, nats", CHANGE)):  # fmt: skip
        found = [[at.get((n, *way), {key: np.nan, "off_distribution": False}) for way in ways] for n in names]
        texts = [[f"{r[key]:.2f}" + "•" * (r["off_distribution"] and key == "icl_removed") for r in of_set]
                 for of_set in found]  # fmt: skip
        grid(ax, np.array([[r[key] for r in of_set] for of_set in found]), [f"{a}\n{b}" for a, b in ways], low=-top,
             high=top, texts=texts)  # fmt: skip
        ax.xaxis.tick_top()
        ax.annotate(name, (0, 1), (0, 26), xycoords="axes fraction", textcoords="offset points")
    axes[0].set_yticks(range(len(names)), names, size=7)
    title(figure, "What breaks without it", subtitle(result.facts) + "; • late loss above the no-context line"
          + ("" if result.facts["icl_warning"] is None else "; no ICL to remove: read the right half"))  # fmt: skip
    return figure


@styled
def edges_figure(result) -> Figure:
    """Prefix matching of each target that is left when one source is taken from one of its inputs."""
    rows = result.tables["edges"]
    targets = list(dict.fromkeys(r["to"] for r in rows))
    sources = list(dict.fromkeys(r["from"] for r in rows))
    inputs = list(dict.fromkeys(r["into"] for r in rows))
    at = {(r["from"], r["to"], r["into"]): r["prefix_matching_cut"] for r in rows}
    width, height = 1.0 + len(inputs) * max(0.42 * len(targets) + 0.45, 1.8), 1.65 + 0.24 * len(sources)
    figure = Figure(figsize=(max(width, 4.5), height), dpi=DPI)
    axes = np.atleast_1d(figure.subplots(1, len(inputs), sharey=True))
    figure.subplots_adjust(left=0.75 / figure.get_figwidth(), right=0.98, top=1 - 0.9 / height, bottom=0.5 / height,
                           wspace=0.08)  # fmt: skip
    for ax, into in zip(axes, inputs, strict=True):
        left = np.array([[at.get((s, t, into), np.nan) for t in targets] for s in sources])
        grid(ax, left, targets, low=0, high=1, cmap="Blues")
        ax.tick_params(labelsize=7)
        ax.set_title(f"no longer in its {into} input", loc="left", size=8, color=GREY)
        ax.set_xlabel("head that reads", size=7)
    axes[0].set_yticks(range(len(sources)), sources, size=7)
    axes[0].set_ylabel("head that writes", size=7)
    title(figure, "Prefix matching that is left with one edge cut",
          f"{result.facts['run']}, step {result.facts['step']}, on repeated blocks")  # fmt: skip
    return figure


@styled
def pruning_figure(result) -> Figure:
    """Loss, ICL score and induction strength against the share of heads removed; random orders as a band."""
    rows = result.tables["curves"]
    orders = list(dict.fromkeys(r["order"] for r in rows))
    named, drawn = [o for o in orders if "random" not in o], [o for o in orders if "random" in o]
    figure = Figure(figsize=(10.6, 3.6), dpi=DPI)
    axes = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.78, bottom=0.3, wspace=0.3)
    for ax, key, name in zip(axes, ("loss", "icl", "induction_strength"),
                             ("loss, nats", "ICL score, nats", "induction strength"),
                             strict=True):  # fmt: skip
        series = {o: np.array([[r["share_removed"], np.nan if r[key] is None else r[key]] for r in rows
                               if r["order"] == o]).T for o in orders}  # fmt: skip
        if drawn:
            x = np.unique(np.concatenate([series[o][0] for o in drawn]))  # of unequal groups each order has its own
            y = np.stack([np.interp(x, *series[o]) for o in drawn])
            ax.fill_between(x, y.min(0), y.max(0), color="#e2e2e2", linewidth=0,
                            label=f"{len(drawn)} random orders: range")  # fmt: skip
        for i, o in enumerate(named):
            style = {"color": PALETTE[i % len(PALETTE)], "linestyle": ("-", "--", ":")[i // len(PALETTE) % 3]}
            line(ax, series[o], linewidth=1.2, label=o.replace("_", " "), **style)
        ax.set_xlabel("share of heads removed")
        ax.set_ylabel(name)
        ax.set_xlim(0, 1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower left", ncols=6, frameon=False, fontsize=7.5)
    title(figure, "How many heads can go", subtitle(result.facts) + ", zero ablation, downstream live")
    return figure


@styled
def gates_figure(result) -> Figure:
    """The front of sparsity against loss, and the same heads trained from scratch."""
    rows = sorted(result.tables["front"], key=lambda r: r["kept"])
    figure = Figure(figsize=(5.6, 3.6), dpi=DPI)
    ax = figure.add_axes((0.12, 0.14, 0.84, 0.66), xlabel="heads kept", ylabel="evaluation loss, nats")
    kept = [r["kept"] for r in rows]
    line(ax, (kept, [r["loss"] for r in rows]), color=PALETTE[0], label="pruned by gates")
    at = {}
    for r in rows:
        at.setdefault((r["kept"], r["loss"]), []).append(r["penalty"])
    for place, penalties in at.items():
        low, high = min(penalties), max(penalties)
        text = f"penalty {low:g}" if low == high else f"{low:g} to {high:g}"
        ax.annotate(text, place, (5, 5), textcoords="offset points", size=7, color=GREY)
    scratch = [(r["kept"], r["from_scratch_loss"]) for r in rows if r["from_scratch_loss"] is not None]
    if scratch:
        line(ax, tuple(zip(*scratch, strict=True)), color=PALETTE[1], linestyle="--",
             label="the same heads, trained from scratch")  # fmt: skip
    ax.legend(frameon=False)
    left = min(kept)
    ax.set_xlim(left - 0.06 * (rows[0]["of"] - left + 1), rows[0]["of"] + 0.25 * (rows[0]["of"] - left + 1))
    ticks = MaxNLocator(integer=True).tick_values(left, rows[0]["of"])
    ax.set_xticks([tick for tick in ticks if left <= tick <= rows[0]["of"]])
    title(figure, "Hard-concrete gates", subtitle(result.facts))
    return figure


@styled
def patterns_figure(result) -> Figure:
    """Attention of the strongest heads and of heads drawn at random, plain and weighted by the size of the values."""
    shown, drawn = result.arrays["shown"], set(result.facts["drawn_at_random"])
    S = len(shown)
    figure = Figure(figsize=(0.3 + 1.75 * S, 4.6), dpi=DPI)
    axes = figure.subplots(2, S, squeeze=False)
    figure.subplots_adjust(left=0.3 / figure.get_figwidth(), right=0.99, top=0.8, bottom=0.02, hspace=0.12, wspace=0.08)
    for i, head in enumerate(shown):
        name = head_name(*head)
        for ax, key in zip(axes[:, i], ("pattern_STT", "weighted_STT"), strict=True):
            ax.imshow(result.arrays[key][i], cmap="Blues", vmin=0, vmax=1)
            ax.set_xticks([])
            ax.set_yticks([])
        axes[0, i].set_title(f"{name}{' (drawn at random)' if name in drawn else ''}", size=8, loc="left")
    for ax, word in zip(axes[:, 0], ("attention", "attention x size of value"), strict=True):
        ax.set_ylabel(word, size=8)
    title(figure, "Where heads look", subtitle(result.facts) + "; query down, key across; one probe sequence")
    return figure


@styled
def composition_figure(result) -> Figure:
    """Composition scores between all pairs, less their baseline, one table for each input."""
    rows = [r for r in result.tables["composition"] if not r["through"].endswith("offsets")]
    sources, targets = (list(dict.fromkeys(r[k] for r in rows)) for k in ("from", "to"))
    high = max(abs(r["score"]) for r in rows)
    height = 1.55 + 0.2 * len(sources)
    figure = Figure(figsize=(max(5.0, 0.8 + 3 * (0.34 * len(targets) + 0.3)), height), dpi=DPI)
    axes = figure.subplots(1, 3, sharey=True)
    figure.subplots_adjust(left=0.6 / figure.get_figwidth(), right=0.98, top=1 - 0.85 / height, bottom=0.5 / height,
                           wspace=0.08)  # fmt: skip
    for ax, through in zip(axes, ("q", "k", "v"), strict=True):
        at = {(r["from"], r["to"]): r["score"] for r in rows if r["through"] == through}
        score = np.array([[at.get((s, t), np.nan) for t in targets] for s in sources])
        many = len(targets) > 12
        grid(ax, score, targets, low=-high, high=high, size=6, rotation=90 if many else 0,
             texts=np.full(score.shape, "") if many else None)  # fmt: skip
        ax.set_title(f"{through.upper()}-composition", loc="left", size=8, color=GREY)
    axes[0].set_yticks(range(len(sources)), sources, size=6)
    axes[0].set_ylabel("output of", size=7)
    axes[0].set_xlabel("read by", size=7)
    title(figure, "Composition scores, less those of random weights", subtitle(result.facts))
    return figure
