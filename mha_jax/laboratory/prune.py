"""--task=prune: how many heads can go, and by which order they should.

Orders are chosen on calibration rows and reported on the evaluation rows, of which none is a calibration row.
"""
import functools
import time

import numpy as np

from mha_jax.data.source import to_batch
from mha_jax.laboratory.result import Result, check_choices, evaluation_rows, provenance
from mha_jax.probes import icl
from mha_jax.probes.panel import head_name
from mha_jax.pruning import ablation, curves, importance, sets
from mha_jax.run import Snapshot

SCORE_ROWS = 64  # calibration rows that scores are taken on
GREEDY_TOKENS = 16_000
RANDOM = 5
CUTS = 20  # of the re-scored order: 5 % of the units at a time
THRESHOLDS = (0.01, 0.05)  # nats

# name: what it orders by (granularity of gradient importance, per-layer l2 norm, scored again at every cut)
GRADIENT = {
    "example": ("example", True, False),
    "example_raw": ("example", False, False),
    "example_rescored": ("example", True, True),
    "token": ("token", True, False),
    "batch": ("batch", True, False),
}
MEANING = {
    "example": "gradient importance, absolute value per example, l2-normalised in each layer, scored once",
    "example_raw": "the same without the normalisation",
    "example_rescored": f"the same as example, scored again after every {100 // CUTS} % of the units",
    "token": "absolute value per token, l2-normalised in each layer, scored once",
    "batch": "absolute value of the batch mean, l2-normalised in each layer, scored once",
    "single": "measured change of loss with the unit alone gone",
    "greedy": "each time the unit whose going costs the least, given what has gone",
    "magnitude": "Frobenius norm of diag(norm gain) W_V W_O",
    "random": f"{RANDOM} random orders; the band is their range",
}
ORDERS = tuple(MEANING)


def prune(snapshot: Snapshot, *, unit: str = "head", orders=ORDERS, rows: int | None = None,
          score_rows: int = SCORE_ROWS, seed: int = 0, say=lambda message: None,
          progress=lambda done, total: None) -> Result:  # fmt: skip
    """`Result` with the tables `curves`, `removable` and `orders`; every curve on the same evaluation rows.

    unit: 'head' or 'group' (all query heads of a KV head at once). say: told what takes long before it starts.
    ConfigError for an order or a unit that does not exist.
    """
    check_choices("orders", orders, ORDERS)
    check_choices("unit", (unit,), importance.UNITS)
    subject, panel, e = snapshot.subject, snapshot.panel, snapshot.panel.evaluation
    tokens_RU, calibration_RU = evaluation_rows(snapshot, rows), panel.source.calibration(score_rows)
    num_units = len(curves.units(subject, unit))
    total = sum(RANDOM if name == "random" else 1 for name in orders) + num_units * ("greedy" in orders)
    found = find_orders(snapshot, calibration_RU, unit, orders, seed, say, lambda: progress(1, total))
    _, repeats_QRT = panel.repeats["induction"]
    measured = {}
    for name, order in found.items():
        measured[name] = curves.curve(subject, tokens_RU, order, repeats_QRT, panel.chance_P["induction"])
        progress(1, total)
    R, heads = len(tokens_RU), len(subject.heads)
    table = [
        {"order": name, "units_removed": int(c.count_C[i]), "heads_removed": int(c.heads_C[i]),
         "share_removed": c.heads_C[i] / heads, "loss": c.loss_C[i],
         "icl": float(icl.icl_score(c.loss_CRT[i], e.early_RT[:R], e.late_RT[:R])[0]),
         "induction_strength": None if np.isnan(c.strength_C[i]) else c.strength_C[i]}
        for name, c in measured.items() for i in range(len(c.count_C))
    ]  # fmt: skip
    removable = [{"order": name, "heads": heads} | {f"removable_at_{nats}": c.removable(nats) for nats in THRESHOLDS}
                 for name, c in measured.items()]  # fmt: skip
    facts = provenance(snapshot) | {
        "unit": unit, "sequences": R, "calibration_sequences": len(calibration_RU), "seed": seed,
        "replacement": "zero", "downstream": "live", "orders": {name: MEANING[name] for name in orders},
        "importance": importance.DEFINITIONS,
        "removable": "heads gone before the loss is first more than so many nats above the whole model's, of the "
                     "numbers of units that the curves were measured at",
    }  # fmt: skip
    names = {name: [" ".join(head_name(*h) for h in heads) for heads in order] for name, order in found.items()}
    listed = [{"order": name, "place": i, "heads": h} for name, order in names.items() for i, h in enumerate(order)]
    return Result("prune", facts, {"curves": table, "removable": removable, "orders": listed})


def find_orders(snapshot: Snapshot, calibration_RU, unit: str, orders, seed: int, say,
                one_done=lambda: None) -> dict[str, curves.Units]:  # fmt: skip
    """{name: units in the order in which they go}; `random` becomes random_0, random_1, ... one_done: called after
    each unit of the greedy order."""
    subject, chosen = snapshot.subject, curves.units(snapshot.subject, unit)
    found = {}
    for name in orders:
        if name in GRADIENT:
            granularity, normalise, again = GRADIENT[name]
            score = functools.partial(_gradient_score, subject, calibration_RU, unit, granularity, normalise)
            if again:
                found[name] = curves.rescored(score, subject, unit, CUTS)
            else:
                found[name] = curves.ascending(score(None), chosen, unit, subject.group)
        elif name == "magnitude":
            score_LJ = importance.weight_magnitude(subject.params, subject.cfg, unit)
            found[name] = curves.ascending(score_LJ, chosen, unit, subject.group)
        elif name == "single":
            found[name] = curves.by_single_loss(subject, calibration_RU, unit)
        elif name == "greedy":
            few_RU = calibration_RU[: max(2, GREEDY_TOKENS // calibration_RU.shape[1])]
            say(f"greedy elimination of {len(chosen)} units on {len(few_RU)} sequences: about "
                f"{_greedy_minutes(snapshot, few_RU, chosen):.1f} minutes, and compilation")  # fmt: skip
            found[name] = []
            for cheapest in curves.greedy(subject, few_RU, unit):
                found[name].append(cheapest)
                one_done()
        else:
            rng = np.random.default_rng(seed)
            found |= {f"random_{i}": [chosen[j] for j in rng.permutation(len(chosen))] for i in range(RANDOM)}
    return found


def _gradient_score(subject, tokens_RU, unit, granularity, normalise, mask_LN):
    found = importance.importance(subject, to_batch(tokens_RU), unit=unit, mask_LN=mask_LN)
    score_LJ = getattr(found, f"{granularity}_LN")
    return importance.per_layer_l2(score_LJ) if normalise else score_LJ


def _greedy_minutes(snapshot: Snapshot, tokens_RU, chosen) -> float:
    """Expected minutes of the greedy order, from one set evaluated after it has been compiled."""
    one = sets.mask(snapshot.subject, chosen[:1])
    ablation.sweep(snapshot.subject, tokens_RU, one, curves.ZERO)
    begin = time.perf_counter()
    ablation.sweep(snapshot.subject, tokens_RU, one, curves.ZERO)
    return (time.perf_counter() - begin) * len(chosen) * (len(chosen) + 1) / 2 / 60
