"""What an ablation cost, from losses alone: change of loss and of the ICL score, with intervals over rows.

R rows, T positions, S sets, P permutations, K bootstrap draws. Rows are the independent units; every draw takes the
same rows of the whole and of the ablated model, so intervals are of paired differences. Host code, float64.
"""
import dataclasses

import numpy as np

DRAWS = 1000
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Effects:
    """One value a set, intervals [S, 2] at 95 % (percentile bootstrap over rows), losses and scores in nats.

    icl_removed: share of the ICL score removed, 1 - ablated / whole; NaN where the whole model has none.
    spread_S: s.e. of icl_removed over permutations (`resample`), else NaN.
    off_distribution_S: the late loss is above the line of a model without context, so the model is broken rather than
    without the head.
    """

    loss_S: np.ndarray
    change_S: np.ndarray
    change_S2: np.ndarray
    early_S: np.ndarray
    late_S: np.ndarray
    icl_S: np.ndarray
    icl_removed_S: np.ndarray
    icl_removed_S2: np.ndarray
    spread_S: np.ndarray
    off_distribution_S: np.ndarray


def effects(whole_RT, loss_PSRT, early_RT, late_RT, no_context_RT, seed: int = 0) -> Effects:
    """`Effects` of a sweep. early_RT, late_RT: the windows of the ICL score; no_context_RT: loss in nats of a model
    that uses no context, on the same rows. Means over a window are ratios of sums, as in `probes.icl.icl_score`."""
    R, T = whole_RT.shape
    draws_KR = np.random.default_rng(seed).multinomial(R, np.full(R, 1 / R), size=DRAWS)
    windows = {"all": np.ones((R, T), bool), "early": early_RT, "late": late_RT}

    def means(loss_SRT, name, weights_KR):
        """[K, S]: mean loss inside a window under each weighting of the rows."""
        sums_SR = np.einsum("srt,rt->sr", loss_SRT, windows[name].astype(np.float64))
        tokens_K = weights_KR @ windows[name].sum(1)
        return weights_KR @ sums_SR.T / np.where(tokens_K > 0, tokens_K, np.nan)[:, None]

    def interval(value_KS):
        """Over the draws that have a token in each window: of few rows, some have none."""
        known_KS = value_KS[np.isfinite(value_KS).all(1)]
        if not len(known_KS):
            return np.full((value_KS.shape[1], 2), np.nan)
        return np.quantile(known_KS, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0).T

    once_KR = np.ones((1, R))
    mean_SRT, whole_SRT = loss_PSRT.mean(0, dtype=np.float64), whole_RT[None].astype(np.float64)
    at = {name: means(mean_SRT, name, once_KR)[0] for name in windows}
    whole = {name: means(whole_SRT, name, once_KR)[0, 0] for name in windows}
    drawn = {name: means(mean_SRT, name, draws_KR) for name in windows}
    drawn_whole = {name: means(whole_SRT, name, draws_KR) for name in windows}

    def removed(late, early, late_whole, early_whole):
        score = late_whole - early_whole
        return 1 - (late - early) / np.where(score == 0, np.nan, score)

    removed_PS = np.stack([
        removed(*(means(loss_SRT.astype(np.float64), name, once_KR)[0] for name in ("late", "early")), whole["late"],
                whole["early"]) for loss_SRT in loss_PSRT
    ])  # fmt: skip
    P = len(loss_PSRT)
    late_line = float(no_context_RT[late_RT].mean(dtype=np.float64))
    return Effects(
        loss_S=at["all"],
        change_S=at["all"] - whole["all"],
        change_S2=interval(drawn["all"] - drawn_whole["all"]),
        early_S=at["early"],
        late_S=at["late"],
        icl_S=at["late"] - at["early"],
        icl_removed_S=removed_PS.mean(0),
        icl_removed_S2=interval(removed(drawn["late"], drawn["early"], drawn_whole["late"], drawn_whole["early"])),
        spread_S=removed_PS.std(0, ddof=1) / np.sqrt(P) if P > 1 else np.full(removed_PS.shape[1], np.nan),
        off_distribution_S=at["late"] > late_line,
    )
