"""Edges: what an induction head loses when one lower head is taken from its queries, keys or values alone."""
import numpy as np

from mha_jax.laboratory.result import cost_of
from mha_jax.probes import circuits
from mha_jax.probes.panel import head_name
from mha_jax.pruning import edges
from mha_jax.run import Snapshot

TARGETS = 4  # the strongest heads, whose inputs are looked at
THROUGH = {"query": "q", "key": "k", "value": "v"}


def edge_table(snapshot: Snapshot, seed: int = 0) -> list[dict]:
    """A row for every edge into the strongest induction heads (of none, into the strongest head that has any head
    below it): change of loss, share of the ICL score removed, prefix matching without and with the cut, and the
    composition score of the same pair and input. On the probe's rows. Empty in a model of one layer."""
    panel, subject = snapshot.panel, snapshot.subject
    strength_LN = panel.prefix_matching(snapshot.reading.arrays).strength_LN
    lowest = min(layer for layer, _ in subject.heads)
    able = sorted((h for h in subject.heads if h[0] > lowest), key=lambda h: -strength_LN[h])
    inducing = panel.induction_heads(snapshot.reading.arrays)
    targets = [h for h in able if h in inducing][:TARGETS] or able[:1]
    found = edges.between(subject.heads, targets)
    if not found:
        return []
    tokens_RU = panel.evaluation.tokens_RU[: snapshot.run.config.probes.rows]
    cuts = edges.cut_edges(subject, tokens_RU, found, panel.repeats["induction"][1])
    cost = cost_of(snapshot, cuts.whole_RT, cuts.loss_ERT[None], seed)
    composed = circuits.composition(subject.params, subject.cfg)
    return [
        {
            "from": head_name(*edge.source), "to": head_name(*edge.target), "into": edge.into,
            "loss_change": cost.change_S[i], "loss_change_low": cost.change_S2[i, 0],
            "loss_change_high": cost.change_S2[i, 1], "icl_removed": cost.icl_removed_S[i],
            "prefix_matching": float(np.min(cuts.whole_EQ[i])), "prefix_matching_cut": float(np.min(cuts.prefix_EQ[i])),
            "composition": float(composed[THROUGH[edge.into]].score_LNLN[(*edge.source, *edge.target)]),
            "composition_z": float(composed[THROUGH[edge.into]].z_LNLN[(*edge.source, *edge.target)]),
        }
        for i, edge in enumerate(found)
    ]  # fmt: skip
