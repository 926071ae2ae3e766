"""--task=icl: loss by position, and the ICL score beside the in-context unigram's and Bayes's."""
from mha_jax.laboratory.result import Result, provenance
from mha_jax.probes import icl as scores
from mha_jax.run import Snapshot


def icl(snapshot: Snapshot) -> Result:
    """Table `positions`: a row a position, the model's loss and every line. Facts: score, windows, standard error,
    copyable tokens and the others apart, losses in nats."""
    panel, v = snapshot.panel, snapshot.reading.values
    e = panel.evaluation
    lines = {name: line.mean(0).tolist() for name, line in e.lines.items()}
    loss_T = snapshot.reading.arrays["loss_by_position_T"]
    facts = provenance(snapshot) | {
        "sequences": len(e.tokens_RU),
        "eval_loss": v["eval/loss"],
        "limits": {k.partition("/")[2]: x for k, x in panel.limits.items() if k.startswith("limit/")},
        "icl_score": v["icl/score"],
        "icl_score_se": v["icl/score_se"],
        "icl_olsson": v.get("icl/olsson"),
        "icl_positions": scores.windows_text(e.early_RT, e.late_RT),
        "icl_unigram": panel.limits["icl/unigram"],
        "icl_bayes": panel.limits.get("icl/bayes"),
        "packing": snapshot.run.config.data.packing if snapshot.run.config.data.task == "text" else None,
        "parts": {k.partition("/")[2]: x for k, x in v.items() if k.startswith("eval/") and k != "eval/loss"},
        "loss_by_position": loss_T.tolist(),
        "lines_by_position": lines,
    }
    table = [{"position": t + 1, "loss": float(loss_T[t])} | {name: line[t] for name, line in lines.items()}
             for t in range(len(loss_T))]  # fmt: skip
    return Result("icl", facts, {"positions": table}, snapshot.reading.arrays)
