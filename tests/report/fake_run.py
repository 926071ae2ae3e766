"""Writes run folders as a training run would, with made-up but plausible numbers, for tests of what reads them."""
import json
import pathlib

import numpy as np

from mha_jax import config as configs
from mha_jax.config import Config, DataConfig, ModelConfig
from mha_jax.training.folder import write_json
from mha_jax.validation import resolve

CHANCE_P = np.array([0.11, 0.09, 0.06])
LINES = {  # of each task, mean loss on the evaluation rows
    "repeat": {"uniform": 4.16, "unigram": 3.55, "induction": 1.30, "bayes": 1.22},
    "trigger": {"uniform": 4.16, "unigram": 3.60, "no_icl": 2.96, "bayes": 2.31},
    "markov": {"uniform": 1.10, "unigram": 1.02, "bayes": 0.90},
    "text": {"bigram": 3.10, "unigram": 4.60},
}
PLATEAU = {"repeat": "unigram", "trigger": "no_icl", "markov": "unigram", "text": "bigram"}


def write_run(workdir, *, name="quickstart", task="repeat", layers=2, heads=4, kv_heads=4, steps=800, formed_at=304,
              every=50, light=10, gone=(), finished=True, probes=True, same_windows=True, seed=0):  # fmt: skip
    """A run folder; returns the folder.

    formed_at: step at which the best head (the last one present) crosses strength 0.5, None for never.
    gone: (layer, head) pairs without values. light: steps between light probes, as far as 200 steps after
    formation. finished: whether there is a summary.json.
    """
    workdir, rng = pathlib.Path(workdir), np.random.default_rng(seed)
    (workdir / "probes").mkdir(parents=True)
    config = resolve(Config(
        name=name, steps=steps,
        model=ModelConfig(num_layers=layers, d_model=16 * heads, num_heads=heads, num_kv_heads=kv_heads),
        data=DataConfig(task=task, vocab_size=512 if task == "text" else 64),
    ))  # fmt: skip
    write_json(workdir / "config.json", configs.to_dict(config))
    present = [(i, j) for i in range(layers) for j in range(heads) if (i, j) not in gone]
    best, limits = present[-1], LINES[task]
    bayes = limits.get("bayes", 1.9)
    events, settled_at = [], steps if formed_at is None else formed_at + 200
    for step in sorted({*range(0, steps + 1, light), *range(0, steps + 1, every), steps}):
        progress = 0.0 if formed_at is None else 1 / (1 + np.exp(-(step - formed_at) / 18))
        full, values = step % every == 0 or step == steps, {}
        if full or step <= settled_at:
            values = _head_values(rng, present, best, progress)
        if full:
            fall = np.exp(-step / 60)
            plateau = limits[PLATEAU[task]]
            loss = bayes + 0.03 + (plateau - bayes) * (1 - progress) + (4.25 - plateau) * fall
            values |= {"eval/loss": loss, "icl/score": -1.0 * (1 - fall) - 1.9 * progress + 0.01 * rng.normal(),
                       "icl/score_se": 0.05 + 0.03 * progress, "icl/unigram": -1.21,
                       "perf/tokens_per_second": 51_234.0, "perf/probe_share": 0.02}  # fmt: skip
            values |= {} if task == "text" else {"icl/bayes": -3.05}
            values |= {f"limit/{k}": v for k, v in limits.items()} if step == 0 else {}
            if task == "trigger":
                values |= {"eval/bigram": 2.3 + 1.8 * fall, "eval/first_outputs": 4.08 + 0.2 * fall,
                           "eval/later_outputs": 0.05 + 4.1 * (1 - progress) + 0.1 * fall}  # fmt: skip
            if probes:
                _write_probe(workdir, rng, config, step, present, best, progress, loss)
            events.append(_line(step, {"train/loss": loss + 0.08 * rng.normal(), "train/learning_rate": 1e-3}))
        if values:
            events.append(_line(step, values))
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    if finished:
        write_json(workdir / "summary.json", _summary(config, events, formed_at, bayes, best, same_windows))
    return workdir


def _line(step, values):
    return {"step": step, "tokens": step * 4096, "seconds": step * 0.08} | {k: float(v) for k, v in values.items()}


def _scores(rng, present, best, progress):
    """{(layer, head): prefix matching}; one more head of the last layer rises half as far."""
    out = {at: 0.06 + 0.02 * rng.random() for at in present}
    out[best] = 0.08 + 0.88 * progress + 0.01 * rng.random()
    if len(present) > 1:
        out[present[-2]] = 0.06 + 0.45 * progress + 0.01 * rng.random()
    return out


def _head_values(rng, present, best, progress):
    scores = _scores(rng, present, best, progress)
    values = {f"induction/L{i}H{j}": s for (i, j), s in scores.items()}
    values |= {"induction/max": scores[best], "induction/chance": 0.06,
               "induction/strength": (scores[best] - 0.06) / 0.94}  # fmt: skip
    return values


def _write_probe(workdir, rng, config, step, present, best, progress, loss):
    L, N, T = config.model.num_layers, config.model.num_heads, config.data.length
    gone_LN = np.ones((L, N), bool)
    gone_LN[tuple(np.array(present).T)] = False
    induction_LN = np.full((L, N), np.nan)
    for at, score in _scores(rng, present, best, progress).items():
        induction_LN[at] = score
    decay_T = np.exp(-np.arange(T) / 12)
    arrays = {
        "loss_by_position_T": loss + (decay_T - decay_T.mean()) * 3 * progress + 0.05 * rng.normal(size=T),
        "induction_PLN": np.stack([induction_LN, induction_LN + 0.02, induction_LN + 0.04]),
        "induction_periods_P": np.array([8, 16, 32]),
        "induction_chance_P": CHANCE_P,
    }
    if config.data.task != "text":
        arrays["bayes_by_position_T"] = LINES[config.data.task]["bayes"] + (decay_T - decay_T.mean()) * 3
    for score in ("previous_token", "duplicate_token", "first_token", "self", "confidence", "entropy", "copying"):
        arrays[f"{score}_LN"] = np.where(gone_LN, np.nan, rng.random((L, N)))
        arrays[f"{score}_chance"] = np.float64(1.0 if score == "entropy" else 0.07)
    np.savez(workdir / "probes" / f"{step:06d}.npz", step=step, **arrays)


def _summary(config, events, formed_at, bayes, best, same_windows):
    last = {k: v for e in events for k, v in e.items()}
    never = formed_at is None
    known = config.data.task != "text"
    return {
        "steps": config.steps, "tokens": last["tokens"], "seconds": last["seconds"], "num_params": 41_216,
        "tokens_per_second": 50_000.0, "probe_share": 0.02, "input_share": 0.01, "name": config.name,
        "final_eval_loss": last["eval/loss"], "bayes_loss": bayes if known else None,
        "icl_score": last["icl/score"], "icl_unigram": last["icl/unigram"],
        "icl_positions": {"early": [1, 7], "late": [33, 64], "same_in_every_row": same_windows},
        "induction": {
            "best_head": f"L{best[0]}H{best[1]}", "score": last["induction/max"], "chance": 0.06,
            "strength": last["induction/strength"], "formation_step": formed_at,
            "formation_bracket": None if never else [formed_at // 10 * 10, formed_at // 10 * 10 + 10],
            "formation_rise": None if never else [formed_at - 40, formed_at + 40],
            "formation_width": None if never else 80,
            "censored_at": config.steps if never else None, "unstable": False,
            "loss_midpoint_step": None if never or not known else int(formed_at // 50 * 50),
        },
    }  # fmt: skip
