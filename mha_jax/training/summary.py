"""The final figures of a run, computed from its events alone, so that a resumed run reports what it would have."""
from mha_jax.config import Config
from mha_jax.probes import formation as formations
from mha_jax.probes import icl, induction
from mha_jax.probes.panel import head_name
from mha_jax.training.folder import DEFINITIONS

FOLLOW = 20  # probes at or above the threshold after which a formation needs no close watch any more


def series(events: list[dict], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric; a value that was not finite is NaN."""
    found = {e["step"]: e[key] for e in events if key in e}
    return list(found), [float("nan") if v is None else v for v in found.values()]


def settled(events: list[dict]) -> bool:
    """Whether an induction head has formed and been seen for FOLLOW probes."""
    return sum(v >= formations.FORMED for v in series(events, "induction/strength")[1]) >= FOLLOW


def formation_of(events: list[dict], panel) -> tuple[formations.Formation, tuple]:
    """(formation of the strongest head, (loss midpoint step, its bracket)) of a run."""
    formed = formations.formation(*series(events, "induction/strength"))
    plateau = panel.limits.get(f"limit/{panel.evaluation.plateau}")
    midpoint = formations.loss_midpoint(*series(events, "eval/loss"), plateau, panel.limits.get("limit/bayes"))
    return formed, midpoint


def strongest(panel, reading) -> tuple[str | None, dict]:
    """(name, {score, chance, strength}) of the head with the highest strength; (None, all None) without heads."""
    found = panel.prefix_matching(reading.arrays)
    best = induction.best_head(found.strength_LN)
    tables = {"score": found.score_LN, "chance": found.chance_LN, "strength": found.strength_LN}
    if best[0] < 0:
        return None, dict.fromkeys(tables)
    return head_name(*best), {name: float(table_LN[best]) for name, table_LN in tables.items()}


def summarise(config: Config, events: list[dict], panel, reading, totals: dict) -> dict:
    """summary.json: `reading` is the last panel's, `totals` what the loop counted (steps, tokens, seconds, ...)."""
    values = reading.values
    formed, (midpoint, midpoint_bracket) = formation_of(events, panel)
    best, figures = strongest(panel, reading)
    e = panel.evaluation
    return totals | {
        "name": config.name,
        "final_eval_loss": values["eval/loss"],
        "bayes_loss": panel.limits.get("limit/bayes"),
        "plateau": e.plateau,
        "limits": {k.partition("/")[2]: v for k, v in panel.limits.items() if k.startswith("limit/")},
        "parts": {k.partition("/")[2]: v for k, v in values.items() if k.startswith("eval/") and k != "eval/loss"},
        "icl_score": values["icl/score"],
        "icl_score_se": values["icl/score_se"],
        "icl_positions": icl.windows_text(e.early_RT, e.late_RT),
        "icl_unigram": panel.limits.get("icl/unigram"),
        "icl_bayes": panel.limits.get("icl/bayes"),
        "learns_in_context": learns_in_context(values, panel.limits),
        "packing": config.data.packing if config.data.task == "text" else None,
        "induction": {
            "best_head": best,
            **figures,
            "probe": panel.source.induction_probe,
            "periods": list(panel.repeats["induction"][0]),
            "heads": [head_name(*head) for head in panel.induction_heads(reading.arrays)],
            "ceiling": panel.ceiling,
            "formation_step": formed.step,
            "formation_bracket": formed.bracket,
            "formation_width": formed.width,
            "formation_rise": formed.rise,
            "censored_at": formed.censored_at,
            "unstable": formed.unstable,
            "loss_midpoint_step": midpoint,
            "loss_midpoint_bracket": midpoint_bracket,
            "midpoint_gap": formations.midpoint_gap(midpoint, formed),
        },
        "definitions": DEFINITIONS,
    }


def learns_in_context(values: dict, limits: dict) -> bool:
    """Claimed only well below the in-context unigram's score: counting tokens lowers the loss late in a row too.

    Well below: more than half-way to Bayes's score where that is known (a model without induction can count a
    little more cleverly than the unigram line does), else two standard errors.
    """
    unigram, bayes = limits["icl/unigram"], limits.get("icl/bayes")
    margin = (unigram - bayes) / 2 if bayes is not None else 2 * values["icl/score_se"]
    return values["icl/score"] < unigram - margin


def describe(s: dict) -> list[str]:
    """What the run found, in a few lines for people."""
    bayes, ind = s["bayes_loss"], s["induction"]
    against = f"Bayes {bayes:.4f}, {s['final_eval_loss'] - bayes:+.4f}" if bayes is not None else \
        f"{s['plateau']} line {s['limits'][s['plateau']]:.4f}"  # fmt: skip
    lines = [f"loss: {s['final_eval_loss']:.4f} nats ({against})"]
    lines += [f"  {name.replace('_', ' ')}: {loss:.4f}" for name, loss in s["parts"].items()]
    if s["icl_bayes"] is None:
        above = "not below it" if s["icl_score"] >= s["icl_unigram"] else "below it by less than two standard errors"
        claim = "below it" if s["learns_in_context"] else above
    else:
        way = (s["icl_score"] - s["icl_unigram"]) / (s["icl_bayes"] - s["icl_unigram"])
        claim = f"Bayes {s['icl_bayes']:+.4f}; {way:.0%} of the way to it from the unigram's"
    falls = s["icl_score"] < -2 * s["icl_score_se"]
    counting = "counting tokens explains most of it" if falls else "the loss does not fall along the row"
    claim += f": {'learns in context' if s['learns_in_context'] else counting}"
    packing = f", rows {s['packing']}" if s["packing"] else ""
    lines.append(f"ICL score: {s['icl_score']:+.4f} ± {s['icl_score_se']:.4f} nats, late minus early{packing} "
                 f"(in-context unigram {s['icl_unigram']:+.4f}; {claim})")  # fmt: skip
    if ind["best_head"]:
        lines.append(f"best head: {ind['best_head']}, prefix matching {ind['score']:.3f} (chance {ind['chance']:.3f}, "
                     f"ceiling {ind['ceiling']:.2f}) on {ind['probe']}; induction heads: "
                     f"{', '.join(ind['heads']) or 'none'}")  # fmt: skip
    bracket = tuple(ind["formation_bracket"]) if ind["formation_bracket"] else None
    formed = formations.Formation(ind["formation_step"], bracket, ind["formation_rise"], ind["censored_at"],
                                  ind["unstable"])  # fmt: skip
    lines.append(formations.describe(formed, ind["loss_midpoint_step"], ind["loss_midpoint_bracket"]))
    waiting = "" if s["input_share"] is None else f"{s['input_share']:.1%} waiting for rows, "
    lines.append(f"speed: {s['tokens_per_second']:,.0f} tokens/s, {s['probe_share']:.1%} of the time in probes, "
                 f"{waiting}{s['seconds']:.0f} s and "
                 f"{s['compile_seconds']:.0f} s compiling")  # fmt: skip
    return lines
