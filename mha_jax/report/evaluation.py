"""What eval.py does: measure saved steps, print a table, write JSON and a picture."""
import json
import pathlib

import numpy as np

from mha_jax.model import transformer
from mha_jax.probes import behaviour, icl
from mha_jax.probes.panel import Panel, Reading, head_name
from mha_jax.report import canvas, plots
from mha_jax.run import Run, open_run
from mha_jax.training.folder import DEFINITIONS, absolute, write_json


def evaluate(workdir, task: str, step: str = "last", out=None) -> list[dict]:
    """Runs 'heads' or 'icl' on the steps that `step` names; returns what it wrote, one dict a step."""
    run = open_run(workdir)
    folder = absolute(out) if out else run.workdir / "eval" / task
    results = []
    for at in run.steps(step):
        reading, meta = run.measure(at)
        describe = {"heads": heads_result, "icl": icl_result}[task]
        result = {
            "task": task, "run": run.config.name, "step": at, "hash": meta["hash"], "tokens": meta["tokens"],
            "data": run.panel.source.description, "definitions": DEFINITIONS,
        } | describe(run.panel, reading)  # fmt: skip
        write_json(folder / f"{at:06d}.json", result)
        print("\n".join(table(run, task, result)))
        print(f"written: {folder / f'{at:06d}.json'}, {draw(run, task, reading, at, folder)}")
        results.append(result)
    return results


def heads_result(panel: Panel, reading: Reading) -> dict:
    """Every score of every head, with chance levels; null for a head that is gone."""
    a = reading.arrays
    pm = panel.prefix_matching(a)
    scores = {"induction": pm.score_LN, "induction_mean": pm.mean_LN, "induction_strength": pm.strength_LN}  # fmt: skip
    scores |= {name: a[f"{name}_LN"] for name in behaviour.HEAD_SCORES}
    scores["copying_olsson_scale"] = behaviour.olsson_scale(a["copying_LN"])
    chance = panel.chances | {"induction": float(np.nanmax(panel.chance_P["induction"]))}
    return {
        "induction_probe": panel.source.induction_probe,
        "induction_ceiling": panel.ceiling,
        "periods": [int(p) for p in panel.repeats["induction"][0]],
        "induction_heads": [head_name(*h) for h in panel.induction_heads(a)],
        "chance": chance | {"copying_sd": panel.copying_sd},
        "scores": {name: _jsonable(value) for name, value in scores.items()},
        "disagreement": {k: _jsonable(v) for k, v in a.items() if k.startswith("disagreement_")},
    }


def icl_result(panel: Panel, reading: Reading) -> dict:
    """Loss by position beside every line, the ICL score with its windows, and copyable tokens apart."""
    v, e = reading.values, panel.evaluation
    lines = {name: line.mean(0).tolist() for name, line in e.lines.items()}
    return {
        "sequences": len(e.tokens_RU),
        "eval_loss": v["eval/loss"],
        "limits": {k.partition("/")[2]: x for k, x in panel.limits.items() if k.startswith("limit/")},
        "icl_score": v["icl/score"],
        "icl_score_se": v["icl/score_se"],
        "icl_olsson": v.get("icl/olsson"),
        "icl_positions": icl.windows_text(e.early_RT, e.late_RT),
        "icl_unigram": panel.limits["icl/unigram"],
        "icl_bayes": panel.limits.get("icl/bayes"),
        "parts": {k.partition("/")[2]: x for k, x in v.items() if k.startswith("eval/") and k != "eval/loss"},
        "loss_by_position": reading.arrays["loss_by_position_T"].tolist(),
        "lines_by_position": lines,
    }


def draw(run: Run, task: str, reading: Reading, step: int, folder: pathlib.Path) -> pathlib.Path:
    """The picture of a result."""
    shown = canvas.Run(run.workdir, run.config, [], {"num_params": transformer.count_params(run.config.model)} | (
        {"icl_positions": icl.windows_text(run.panel.evaluation.early_RT, run.panel.evaluation.late_RT)}))
    if task == "heads":
        figure = plots.heads_figure(shown, step, reading.arrays)
    else:
        figure = plots.positions_figure(shown, {step: reading.arrays})
    return canvas.save(figure, folder / f"{step:06d}.png")


def table(run: Run, task: str, result: dict) -> list[str]:
    """The result for a terminal."""
    title = f"{run.config.name}, step {result['step']}, checkpoint {result['hash']}"
    if task == "icl":
        bayes = "" if result["icl_bayes"] is None else f", Bayes {result['icl_bayes']:+.4f}"
        return [title, f"eval loss {result['eval_loss']:.4f}; lines: " + ", ".join(
            f"{k} {x:.4f}" for k, x in result["limits"].items()),
            f"ICL score {result['icl_score']:+.4f} ± {result['icl_score_se']:.4f} (late minus early, positions "
            f"{json.dumps(result['icl_positions'])}; in-context unigram "
            f"{result['icl_unigram']:+.4f}{bayes})"]  # fmt: skip
    columns = ("induction", *behaviour.HEAD_SCORES)
    lines = [title, f"induction: prefix matching on {result['induction_probe']}, minimum over periods "
             f"{result['periods']}", "head    " + "".join(f"{c.replace('_', ' '):>17}" for c in columns)]  # fmt: skip
    lines.append("chance  " + "".join(f"{result['chance'][c]:>17.3f}" for c in columns))
    shape = np.shape(result["scores"]["induction"])
    for layer, head in np.ndindex(shape):
        row = [result["scores"][c][layer][head] for c in columns]
        mark = "  induction head" if head_name(layer, head) in result["induction_heads"] else ""
        lines.append(f"{head_name(layer, head):<8}" + "".join(f"{'gone' if x is None else format(x, '.3f'):>17}"
                                                              for x in row) + mark)  # fmt: skip
    return lines


def _jsonable(array):
    """Nested lists with null for NaN."""
    if np.ndim(array):
        return [_jsonable(x) for x in array]
    return None if np.isnan(array) else float(array)
