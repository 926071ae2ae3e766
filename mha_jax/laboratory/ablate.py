"""--task=ablate: what breaks without a head, a KV group, a layer, a named set, or all heads of a layer but one.

Definitions: `pruning.ablation` (replacement x downstream) and `pruning.effects`.
"""
import numpy as np

from mha_jax.config import ConfigError
from mha_jax.laboratory.edges import edge_table
from mha_jax.laboratory.result import Result, check_choices, cost_of, evaluation_rows, no_context_line, provenance
from mha_jax.probes import icl, induction
from mha_jax.probes.panel import head_name
from mha_jax.probes.subject import Subject
from mha_jax.pruning import ablation, curves, sets
from mha_jax.pruning.effects import Effects
from mha_jax.run import Snapshot

CALIBRATION = 256  # sequences, none of them evaluated, over which a mean is taken
PERMUTATIONS = 5
PREVIOUS_TOKEN = 0.5  # strength from which a head belongs to the set of previous-token heads


def ablate(snapshot: Snapshot, *, heads=None, replacements=ablation.REPLACEMENTS, downstream=ablation.DOWNSTREAM,
           rows: int | None = None, controls: int = sets.CONTROLS, seed: int = 0,
           progress=lambda done, total: None) -> Result:  # fmt: skip
    """One row of the table `sets` for every set, replacement and downstream choice, with its matched random controls.

    heads: a set of (layer, head) of one's own beside the ones that are always looked at. rows: how many evaluation
    rows (default all). controls: how many random sets at most. ConfigError for a replacement or downstream that does
    not exist, a head that was removed, or too many rows.
    """
    check_choices("replacement", replacements, ablation.REPLACEMENTS)
    check_choices("downstream", downstream, ablation.DOWNSTREAM)
    heads = sorted(set(heads or ()))
    gone = [head_name(*h) for h in heads if h not in snapshot.subject.heads]
    if gone:
        raise ConfigError(f"--heads: {', '.join(gone)} is not in this model, or was removed")
    tokens_RU = evaluation_rows(snapshot, rows)
    special = special_heads(snapshot)
    named = all_sets(snapshot.subject, special, heads)
    matched = {n: sets.controls(snapshot.subject, n.heads, special["induction heads"], seed, controls)
               for n in named}  # fmt: skip
    extra = {s for of_set, _ in matched.values() for s in of_set} - {n.heads for n in named}
    swept = named + [sets.Named("", "control", heads) for heads in sorted(extra)]
    single = [n for n in named if n.kind == "head"]
    total = len(downstream) * len(tokens_RU) * sum(
        len(single) if how == "tie" else len(swept) * (PERMUTATIONS if how == "resample" else 1)
        for how in replacements)  # fmt: skip
    e, (R, _) = snapshot.panel.evaluation, tokens_RU.shape
    table, ways = [], {}
    for how in replacements:
        value = values(snapshot, how, tokens_RU, seed)
        for what in downstream:
            chosen = single if how == "tie" else swept
            found = ablation.sweep(
                snapshot.subject, tokens_RU, sets.mask(snapshot.subject, [n.heads for n in chosen]),
                ablation.Way(how, what, value), repeats_QRT=snapshot.panel.repeats["induction"][1],
                seed=seed,
                progress=lambda done: progress(done, total),
            )  # fmt: skip
            cost = cost_of(snapshot, found.whole_RT, found.loss_PSRT, seed)
            ways[f"{how} x {what}"] = {"cost_ratio": found.ratio}
            place = {n.heads: i for i, n in enumerate(chosen)}
            for i, n in enumerate(chosen):
                if n.kind == "control":
                    continue
                row = {"set": n.name, "kind": n.kind, "heads": " ".join(head_name(*h) for h in n.heads),
                       "replacement": how, "downstream": what}  # fmt: skip
                row |= _row(cost, i) | _others(snapshot, found, n, i)
                of_set, reason = ((), "one pattern for a whole layer: no set to match") if how == "tie" else matched[n]
                table.append(row | _controls(cost, [place[s] for s in of_set], reason))
    score, error = map(float, icl.icl_score(found.whole_RT, e.early_RT[:R], e.late_RT[:R]))
    facts = provenance(snapshot) | {
        "sequences": len(tokens_RU),
        "edge_sequences": snapshot.run.config.probes.rows,
        "icl_warning": None if score < -2 * error else
        f"the whole model's ICL score, {score:+.3f} ± {error:.3f}, is no more than noise: shares of it say nothing",
        "loss": float(found.whole_RT.mean(dtype=np.float64)),
        "icl_score": score,
        "no_context_line": no_context_line(snapshot.panel.evaluation)[0],
        "mean": f"over {CALIBRATION} sequences that are not evaluated, per head and position",
        "resample": f"{PERMUTATIONS} permutations of the evaluated sequences",
        "controls": "as many heads of the same layers, neither of the set nor induction heads",
        "seed": seed,
        "interval": "95 %, percentile bootstrap of 1,000 draws over sequences",
        "ways": ways,
    }
    cut = edge_table(snapshot, seed)
    return Result("ablate", facts, {"sets": table} | ({"edges": cut} if cut else {}))


def values(snapshot: Snapshot, replacement: str, tokens_RU, seed: int):
    """What z becomes under a replacement, or None."""
    if replacement == "mean":
        return ablation.mean_values(snapshot.subject, snapshot.panel.source.calibration(CALIBRATION))
    if replacement == "resample":
        return ablation.resampled_values(snapshot.subject, tokens_RU, seed, PERMUTATIONS)
    return None


def all_sets(subject: Subject, special: dict, heads=None) -> list[sets.Named]:
    """Named sets first (one's own `heads`, and the `special_heads`), then every head, group, layer and all-but-one."""
    named = [sets.Named(name, "named", tuple(chosen)) for name, chosen in special.items() if chosen]
    if heads:
        named.insert(0, sets.Named("--heads", "named", tuple(heads)))
    return [*named, *sets.single_heads(subject), *sets.groups(subject), *sets.layers(subject),
            *sets.all_but_one(subject)]  # fmt: skip


def special_heads(snapshot: Snapshot) -> dict[str, list[tuple[int, int]]]:
    """The sets that have a name because of what their heads do, at this step."""
    panel, arrays, present = snapshot.panel, snapshot.reading.arrays, snapshot.subject.heads
    inducing = panel.induction_heads(arrays)
    strength_LN = induction.strength(arrays["previous_token_LN"], panel.chances["previous_token"])
    previous = [h for h in present if strength_LN[h] >= PREVIOUS_TOKEN]
    some = "previous-token heads" if previous else "best previous-token head"
    return {
        "induction heads": inducing,
        "all other heads": [h for h in present if h not in inducing] if inducing else [],
        some: previous or [induction.best_head(strength_LN)],
    }


def _row(cost: Effects, i: int) -> dict:
    return {
        "loss": cost.loss_S[i], "loss_change": cost.change_S[i], "loss_change_low": cost.change_S2[i, 0],
        "loss_change_high": cost.change_S2[i, 1], "early_loss": cost.early_S[i], "late_loss": cost.late_S[i],
        "icl": cost.icl_S[i], "icl_removed": cost.icl_removed_S[i], "icl_removed_low": cost.icl_removed_S2[i, 0],
        "icl_removed_high": cost.icl_removed_S2[i, 1], "icl_removed_se_permutations": cost.spread_S[i],
        "off_distribution": bool(cost.off_distribution_S[i]),
    }  # fmt: skip


def _others(snapshot: Snapshot, found: ablation.Sweep, named: sets.Named, i: int) -> dict:
    """The strongest prefix matching outside the set under the ablation, and its change: less the strongest outside
    the set in the whole model. null where it was not measured."""
    names = "others_best_head", "others_prefix_matching", "others_prefix_matching_change"
    if found.prefix_SQLN is None or set(named.heads) == set(snapshot.subject.heads):
        return dict.fromkeys(names)
    strongest = []
    for prefix_QLN in (found.prefix_SQLN[i], snapshot.reading.arrays["induction_PLN"]):
        pm = curves.matching_without(prefix_QLN, snapshot.panel.chance_P["induction"], named.heads)
        best = induction.best_head(pm.strength_LN)
        strongest.append((best, float(pm.score_LN[best])))
    (best, score), (_, whole) = strongest
    return dict(zip(names, (head_name(*best), score, score - whole), strict=True))


def _controls(cost: Effects, at: list[int], reason: str | None) -> dict:
    """Median and 5 to 95 % range over the matched random sets; their number 0 with the reason where there are none."""
    found = {"controls": len(at), "controls_missing": reason}
    for name, value_S in (("icl_removed", cost.icl_removed_S), ("loss_change", cost.change_S)):
        low, middle, high = np.quantile(value_S[at], [0.05, 0.5, 0.95]) if at else (None,) * 3
        found |= {f"control_{name}": middle, f"control_{name}_low": low, f"control_{name}_high": high}
    return found
