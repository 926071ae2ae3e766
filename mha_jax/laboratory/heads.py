"""--task=heads: what each head does. The panel as training logged it, and what training does not afford."""
import numpy as np

from mha_jax.laboratory.result import Result, cost_of, provenance
from mha_jax.probes import attribution, behaviour, circuits, reading
from mha_jax.probes.induction import FORMED
from mha_jax.probes.panel import head_name
from mha_jax.pruning import ablation, sets
from mha_jax.run import Snapshot
from mha_jax.training import summary
from mha_jax.training.tracking import read_metrics, read_probes

SHOWN = 3  # heads drawn at random for the picture of patterns, beside as many of the strongest


def heads(snapshot: Snapshot, seed: int = 0, progress=lambda done, total: None) -> Result:
    """Tables: `heads` (a row a head: every score, and its reading with the rule), `composition` (a row a pair of heads
    and input), `logit_lens` (a row a layer). Arrays hold the patterns of the heads that the picture shows."""
    panel, subject, arrays = snapshot.panel, snapshot.subject, snapshot.reading.arrays
    matching, present = panel.prefix_matching(arrays), ablation.present(subject)
    scores = {"induction": matching.score_LN, "induction_mean": matching.mean_LN,
              "induction_strength": matching.strength_LN}  # fmt: skip
    scores |= {name: arrays[f"{name}_LN"] for name in behaviour.HEAD_SCORES}
    scores["copying_olsson_scale"] = behaviour.olsson_scale(arrays["copying_LN"])
    live, frozen = zeroed(snapshot, progress)
    periods = [int(p) for p in panel.repeats["induction"][0]]
    offsets = tuple(p - 1 for p in periods) if min(periods) > 1 else (0,)
    eigenvalues_LN, eigenvalues_sd = circuits.copying_eigenvalues(subject.params, subject.cfg)
    trace_LN, trace_share_LN = circuits.qk_trace(subject.params, subject.cfg, arrays["previous_token_LN"], offsets)
    more = {
        "copying_eigenvalues": eigenvalues_LN, "qk_trace": trace_LN, "qk_trace_share": trace_share_LN,
        "direct_logit": direct_logit(snapshot), "zeroed_loss_change": live,
        "before_after": before_after(snapshot, frozen),
    }  # fmt: skip
    chance = panel.chances | {"induction": float(np.nanmax(panel.chance_P["induction"]))}
    readings = reading.readings({**scores, "induction": matching.strength_LN}, chance, panel.copying_sd, live)
    table = [
        {"head": row.head, "reading": row.reading}
        | {name: _number(value_LN[head]) for name, value_LN in (scores | more).items()}
        | {"rule": row.rule}
        for row, head in zip(readings, subject.heads, strict=True)
    ]
    best = sorted(subject.heads, key=lambda h: -matching.strength_LN[h])[:SHOWN]
    others_LN = present & ~sets.mask(subject, [best])[0]
    drawn = reading.drawn_heads(seed, min(SHOWN, int(others_LN.sum())), others_LN) if others_LN.any() else []
    known = panel.chances | {"copying_sd": panel.copying_sd, "copying_eigenvalues": 0.0,
                             "copying_eigenvalues_sd": eigenvalues_sd}  # fmt: skip
    facts = provenance(snapshot) | {
        "induction_probe": panel.source.induction_probe,
        "induction_ceiling": panel.ceiling,
        "induction_chance": [float(x) for x in panel.chance_P["induction"]],
        "periods": periods,
        "composition_offsets": list(offsets),
        "formed_at_strength": FORMED,
        "induction_heads": [head_name(*h) for h in panel.induction_heads(arrays)],
        "chance": known | chance,
        "share_without_reading": reading.share_without_reading(readings),
        "drawn_at_random": [head_name(*h) for h in drawn],
        "seed": seed,
        "zeroed_loss_change": "nats, that head alone zero x live",
        "before_after": "nats, that head alone zero x frozen, along the change of loss by position over the formation; "
                        "negative undoes it",
        "direct_logit": "mean over the probe's rows of what the head itself adds to the next token's logit, the final "
                        "norm frozen",
        "scores": {name: jsonable(value) for name, value in scores.items()},
        "disagreement": {k: jsonable(v) for k, v in arrays.items() if k.startswith("disagreement_")},
    }
    composed = circuits.composition(subject.params, subject.cfg, offsets)
    tables = {"heads": table, "composition": _pairs(composed), "logit_lens": logit_lens(snapshot)}
    return Result("heads", facts, tables, arrays | patterns(snapshot, [*best, *drawn]))


def zeroed(snapshot: Snapshot, progress=lambda done, total: None):
    """(change of loss [L, N] in nats with each head alone zero x live, loss by position [L, N, T] zero x frozen)."""
    subject, tokens_RU = snapshot.subject, snapshot.panel.evaluation.tokens_RU
    chosen = sets.mask(subject, [n.heads for n in sets.single_heads(subject)])
    total = 2 * len(chosen) * len(tokens_RU)
    live, frozen = (
        ablation.sweep(subject, tokens_RU, chosen, ablation.Way("zero", what), progress=lambda n: progress(n, total))
        for what in ablation.DOWNSTREAM
    )
    change_S = cost_of(snapshot, live.whole_RT, live.loss_PSRT).change_S
    shape = subject.cfg.num_layers, subject.cfg.num_heads
    change_LN, loss_LNT = np.full(shape, np.nan), np.full((*shape, tokens_RU.shape[1] - 1), np.nan)
    for i, head in enumerate(subject.heads):
        change_LN[head] = change_S[i]
        loss_LNT[head] = frozen.loss_PSRT[0, i].mean(0, dtype=np.float64)
    return change_LN, loss_LNT


def before_after(snapshot: Snapshot, loss_LNT) -> np.ndarray:
    """[L, N]: `attribution.before_after` over the rise of the strongest head; NaN where the run has no formation."""
    nothing = np.full(loss_LNT.shape[:2], np.nan)
    probes = read_probes(snapshot.run.workdir)
    rise = formation_rise(snapshot)
    if rise is None or not probes:
        return nothing
    start = max((s for s in probes if s <= rise[0]), default=min(probes))
    end = min((s for s in probes if s >= rise[1]), default=max(probes))
    if start == end:
        return nothing
    losses = (probes[s]["loss_by_position_T"] for s in (start, end))
    return attribution.before_after(*losses, loss_LNT, snapshot.reading.arrays["loss_by_position_T"])


def formation_rise(snapshot: Snapshot) -> tuple[float, float] | None:
    """The steps at 10 and 90 % of the rise, as the run's own events have it."""
    return summary.formation_of(read_metrics(snapshot.run.workdir), snapshot.panel)[0].rise


def direct_logit(snapshot: Snapshot) -> np.ndarray:
    """[L, N]: what each head adds directly to the logit of the next token, mean over the probe's rows."""
    rows = snapshot.panel.evaluation.tokens_RU[: snapshot.run.config.probes.rows]
    parts = attribution.direct_logits(snapshot.subject.graph, snapshot.params, rows[:, :-1], rows[:, 1:])
    return np.asarray(parts.heads_LNBT).mean((2, 3), dtype=np.float64)


def logit_lens(snapshot: Snapshot) -> list[dict]:
    """Loss of the model cut short after each layer, on the probe's rows."""
    rows = snapshot.panel.evaluation.tokens_RU[: snapshot.run.config.probes.rows]
    loss_MBT = attribution.logit_lens(snapshot.subject.graph, snapshot.params, rows[:, :-1], rows[:, 1:])
    names = ["embedding", *(f"layer {i}" for i in range(len(loss_MBT) - 1))]
    return [{"after": n, "loss": float(x)} for n, x in zip(names, np.asarray(loss_MBT).mean((1, 2)), strict=True)]


def patterns(snapshot: Snapshot, shown) -> dict[str, np.ndarray]:
    """The first probe sequence with the patterns of the heads shown, plain and weighted by the size of the values."""
    subject = snapshot.subject
    tokens_T = snapshot.panel.repeats["induction"][1][0][0]
    aux = subject.forward(tokens_T, capture=("pattern", "v"))[1]
    kv_of_head = [n // subject.group for n in range(subject.cfg.num_heads)]
    weighted = attribution.value_weighted(aux.pattern_LBNTS, aux.v_LBSKH, kv_of_head)
    pick = lambda x: np.stack([np.asarray(x[layer, 0, head]) for layer, head in shown])  # noqa: E731
    return {"shown": np.array(shown), "pattern_STT": pick(aux.pattern_LBNTS), "weighted_STT": pick(weighted)}


def _pairs(composed) -> list[dict]:
    """A row for every pair of heads in different layers and every input; scores less their baseline, with z."""
    return [
        {"from": head_name(*at[:2]), "to": head_name(*at[2:]), "through": name, "score": float(c.score_LNLN[at]),
         "z": float(c.z_LNLN[at]), "baseline": c.baseline, "approximate": c.approximate}
        for name, c in composed.items() for at in map(tuple, np.argwhere(~np.isnan(c.score_LNLN)).tolist())
    ]  # fmt: skip


def jsonable(array):
    """Nested lists with null for NaN."""
    if np.ndim(array):
        return [jsonable(x) for x in array]
    return _number(array)


def _number(value):
    return None if np.isnan(value) else float(value)
