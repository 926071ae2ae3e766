"""What eval.py does: run one task of the laboratory on saved steps, print its tables, write JSON, CSV and pictures."""
import dataclasses
import pathlib
import re

from tqdm import tqdm

from mha_jax.config import ConfigError
from mha_jax.data.cache import digest
from mha_jax.laboratory import ablate, gates, heads, icl, prune, remove
from mha_jax.laboratory.result import Result
from mha_jax.model import surgery, transformer
from mha_jax.probes import behaviour
from mha_jax.probes import icl as icl_scores
from mha_jax.report import canvas, laboratory, plots, tables
from mha_jax.run import Run, Snapshot, open_run
from mha_jax.training import tracking
from mha_jax.training.folder import absolute, read_json, write_atomically, write_json

LONGEST_NAME = 120  # of the options in a file name
ALL = ("heads", "icl", "ablate", "prune", "gates")  # what --task=all runs; gates is --task=prune --method=gates
HEAD_COLUMNS = ("head", "reading", "induction", *behaviour.HEAD_SCORES, "copying_eigenvalues", "zeroed_loss_change")


def evaluate(workdir, task: str, step: str = "last", out=None, **options) -> list[dict]:
    """Runs a task on the steps that `step` names; returns what it wrote, one dict a step and result.

    options: the flags of eval.py that belong to the task, by name.
    """
    run, results = open_run(workdir), []
    if task == "remove" and step == "all":
        raise ConfigError("--step=all: remove takes one step; allowed are last, best, or a saved step")
    place = absolute(out) if out and task != "remove" else run.workdir / "eval"
    if place.exists() and not place.is_dir():
        raise ConfigError(f"--out={place}: a file; allowed is a folder")
    for at in run.steps(step):
        snapshot = run.at(at)
        for name in ALL if task == "all" else (task,):
            folder = place / name.replace("gates", "prune")
            stem = folder / f"{at:06d}{'_gates' if name == 'gates' else ''}{_suffix(options)}"
            if out and task != "remove":
                _check_owner(stem.with_name(f"{stem.name}.json"), snapshot)
            result = _run(snapshot, name, out, options)
            if name == "remove":
                stem = folder / f"{at:06d}{_suffix({'without': tuple(result.facts['removed'])})}"
            results.append(_show(snapshot, result, stem, name))
    return results


def _suffix(options: dict) -> str:
    """The options, for file names: another question's answer does not replace this one's."""
    text = "".join(f"_{key}={_in_name(value)}" for key, value in sorted(options.items()))
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME - 17]}_{digest(text)[:16]}"


def _in_name(value) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else re.sub("[^0-9A-Za-z.+-]", "+", str(value))


def _check_owner(path: pathlib.Path, snapshot: Snapshot):
    """ConfigError where a result of another checkpoint would be replaced in a folder of the user's own."""
    if path.exists() and read_json(path).get("hash") != snapshot.meta["hash"]:
        raise ConfigError(f"--out: {path} is the result of another checkpoint; name another folder")


def _run(snapshot: Snapshot, task: str, out, options: dict) -> Result:
    bar = tqdm(total=0, desc=task, unit="", disable=None, leave=False)

    def progress(done, total):
        bar.total = total
        bar.update(done)

    options = dict(options)
    cfg = snapshot.run.config.model
    if isinstance(options.get("heads"), str):
        options["heads"] = surgery.parse_heads(options["heads"], cfg.num_layers, cfg.num_heads)
    try:
        if task == "icl":
            return icl.icl(snapshot)
        if task == "remove":
            return _remove(snapshot, out, options)
        functions = {"heads": heads.heads, "ablate": ablate.ablate, "prune": prune.prune, "gates": gates.gates}
        say = {"say": bar.write} if task in ("prune", "gates") else {}
        return functions[task](snapshot, progress=progress, **say, **options)
    finally:
        bar.close()


def _remove(snapshot: Snapshot, out, options: dict) -> Result:
    chosen, path = options.get("heads"), options.get("from_file")
    if (chosen is None) == (path is None):
        raise ConfigError("--task=remove takes either --heads=0.1,1.3 or --from=FILE --keep=60%")
    keep, orders = options.get("keep"), options.get("orders", ())
    if path is None and (keep is not None or orders):
        raise ConfigError("--keep and --orders go with --from=FILE, not with --heads")
    if len(orders) > 1:
        raise ConfigError(f"--orders={','.join(orders)}: remove follows one order")
    if path is None:
        return remove.remove(snapshot, chosen, out, say=print)
    chosen = remove.from_order(path, orders[0] if orders else None, keep, snapshot.subject)
    other = read_json(pathlib.Path(path)).get("hash")
    if other != snapshot.meta["hash"]:
        print(f"warning: {path} was made of checkpoint {other}, this one is {snapshot.meta['hash']}")
    result = remove.remove(snapshot, chosen, out, say=print)
    by = {"from": str(path), "from_hash": other, "order": orders[0] if orders else "the first", "keep": keep}
    return dataclasses.replace(result, facts=result.facts | by)


def _show(snapshot: Snapshot, result: Result, at: pathlib.Path, name: str) -> dict:
    """Writes a result into files whose names begin as `at`, and prints it; returns its JSON."""
    folder, stem = at.parent, at.name
    written = {"task": result.task} | result.facts | {"tables": result.tables}
    write_json(folder / f"{stem}.json", written)
    for table, rows in result.tables.items():
        write_atomically(folder / f"{stem}_{table}.csv", tables.csv_text(rows))
    pictures = {key: canvas.save(figure, folder / f"{stem}{'_' if key else ''}{key}.png")
                for key, figure in figures(snapshot, result).items()}  # fmt: skip
    f = result.facts
    print(f"{f['run']}, step {f['step']}, checkpoint {f['hash']}")
    print("\n".join(lines(result)))
    print(f"written: {folder / stem}.json, {len(result.tables)} table(s) as CSV, {len(pictures)} picture(s)")
    tracking.send_evaluation(snapshot.run.workdir, snapshot.run.config, name, snapshot.step, pictures, result.tables)
    return written


def figures(snapshot: Snapshot, result: Result) -> dict:
    """{name: figure} of a result; the name '' is the task's own picture."""
    if result.task in ("heads", "icl"):
        shown = canvas.Run(snapshot.run.workdir, snapshot.run.config, [], _summary(snapshot.run))
        if result.task == "icl":
            return {"": plots.positions_figure(shown, {snapshot.step: result.arrays})}
        found = {"": plots.heads_figure(shown, snapshot.step, result.arrays),
                 "patterns": laboratory.patterns_figure(result)}  # fmt: skip
        if result.tables["composition"]:
            found["composition"] = laboratory.composition_figure(result)
        return found
    if result.task == "ablate":
        found = {"": laboratory.ablation_figure(result)}
        return found | ({"edges": laboratory.edges_figure(result)} if "edges" in result.tables else {})
    if "front" in result.tables:
        return {"": laboratory.gates_figure(result)}
    return {"": laboratory.pruning_figure(result)} if result.task == "prune" else {}


def _summary(run: Run) -> dict:
    """What the run's own pictures say beneath their title."""
    e = run.panel.evaluation
    return {"num_params": transformer.count_params(run.config.model),
            "icl_positions": icl_scores.windows_text(e.early_RT, e.late_RT)}  # fmt: skip


def lines(result: Result) -> list[str]:
    """The result for a terminal."""
    f, t = result.facts, result.tables
    if result.task == "icl":
        bayes = "" if f["icl_bayes"] is None else f", Bayes {f['icl_bayes']:+.4f}"
        packing = f", rows {f['packing']}" if f["packing"] else ""
        return [
            f"eval loss {f['eval_loss']:.4f}; lines: " + ", ".join(f"{k} {x:.4f}" for k, x in f["limits"].items()),
            *(f"  {name.replace('_', ' ')}: {loss:.4f}" for name, loss in f["parts"].items()),
            f"ICL score {f['icl_score']:+.4f} ± {f['icl_score_se']:.4f} (late minus early, positions "
            f"{_windows(f['icl_positions'])}{packing}; in-context unigram {f['icl_unigram']:+.4f}{bayes})",
        ]
    if result.task == "heads":
        chance = {"head": "chance", "reading": ""} | f["chance"] | {"induction": None}  # of its own period: above
        minimum = f", minimum over periods {f['periods']}" if f["periods"] != [0] else ""
        chances = ", ".join(f"{x:.3f}" for x in f["induction_chance"])
        return [
            f"induction: prefix matching on {f['induction_probe']}{minimum}; chance {chances}",
            *tables.text([chance, *t["heads"]], HEAD_COLUMNS),
            f"{f['share_without_reading']:.0%} of the heads have no reading; induction heads: "
            f"{', '.join(f['induction_heads']) or 'none'}; why each: the column `rule` of the CSV",
        ]
    if result.task == "ablate":
        warning = [] if f["icl_warning"] is None else [f["icl_warning"]]
        return [*warning, "share of the ICL score removed (• late loss above the no-context line: the model is broken)",
                *tables.text(grid(t["sets"])), *_edge_lines(t)]  # fmt: skip
    if result.task == "remove":
        return [f"removed {' '.join(f['removed'])}; masked and removed differ by {f['largest_difference']:.1e} at most",
                *tables.text(t["before_after"]), f"new run folder: {f['folder']}"]  # fmt: skip
    return tables.text(t["front" if "front" in t else "removable"])


def _windows(positions: dict) -> str:
    spans = [f"{name} {span[0]} to {span[1]}" for name in ("early", "late") if (span := positions[name])]
    return ", ".join(spans) + ("" if positions["same_in_every_row"] else ", other in each row")


def grid(rows: list[dict]) -> list[dict]:
    """The whole grid as one table: a row a set, a column for each replacement x downstream, and the controls' median
    of the first way beside it."""
    found, first = {}, f"{rows[0]['replacement']} {rows[0]['downstream']}"
    for row in rows:
        mark = "•" if row["off_distribution"] else ""
        cells = found.setdefault(row["set"], {"set": row["set"]})
        way = f"{row['replacement']} {row['downstream']}"
        cells[way] = f"{row['icl_removed']:.2f}{mark}"
        if way == first and row["control_icl_removed"] is not None:
            cells[f"controls, {first}"] = f"{row['control_icl_removed']:.2f} of {row['controls']}"
    columns = dict.fromkeys(c for cells in found.values() for c in cells)
    return [{c: cells.get(c, "-") for c in columns} for cells in found.values()]


def _edge_lines(t: dict) -> list[str]:
    if "edges" not in t:
        return []
    strongest = sorted(t["edges"], key=lambda r: -abs(r["prefix_matching"] - r["prefix_matching_cut"]))[:8]
    return ["edges that change prefix matching the most (all of them: the CSV)", *tables.text(strongest)]
