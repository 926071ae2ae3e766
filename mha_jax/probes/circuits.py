"""What the weights alone say of each head: copying, composition, the QK trace. Host, NumPy, float64.

L layers, N query heads, H head width, V vocabulary, O offsets, P heads in one row (layer by layer), D the width of the
residual stream as heads see it. Elhage et al. 2021 define the circuits; vectors are rows here: x W_V W_O.

A head reads the residual stream through its layer's norm. The norm's gain is folded into W_Q, W_K and W_V (the final
norm's into W_U); its division by a size, a number, is left out. LayerNorm also hides the direction (1, .., 1) from
every reader, so under it everything lives in the D = d_model - 1 dimensions beside that one: what is written and what
is read are both centred. Biases and position tables are no part of a circuit. Under GQA, K and V are those of the
head's group. A head that is gone, or whose circuit is zero, is NaN.
"""
from typing import NamedTuple

import numpy as np

from mha_jax.config import ConfigError, kept_heads
from mha_jax.model.transformer import layer_key
from mha_jax.probes.behaviour import fold_final_norm

ROTATIONS = 100  # random rotations behind each z
DRAWS = 500  # random heads behind the chance sd of copying


class Circuits(NamedTuple):
    """Kernels on the original heads, norms folded in; zero where a head is gone."""

    q_LNDH: np.ndarray
    k_LNDH: np.ndarray
    v_LNDH: np.ndarray
    o_LNHD: np.ndarray
    embed_VD: np.ndarray
    unembed_DV: np.ndarray


def circuits(params, cfg) -> Circuits:
    """The kernels of `params`, a model of the resolved ModelConfig `cfg`, as its circuits see them."""
    L, N, H, group = cfg.num_layers, cfg.num_heads, cfg.head_dim, cfg.num_heads // cfg.num_kv_heads
    visible_MD = _beside_ones(cfg.d_model) if cfg.norm == "layer" else np.eye(cfg.d_model)
    D = visible_MD.shape[1]
    q_LNDH, k_LNDH, v_LNDH = (np.zeros((L, N, D, H)) for _ in range(3))
    o_LNHD = np.zeros((L, N, H, D))
    for layer, heads in enumerate(kept_heads(cfg)):
        if not heads:
            continue
        p = params["layers"][layer_key(layer)]
        w = {name: np.asarray(x, np.float64) for name, x in p["attention"].items()}
        gain_M = np.ones(cfg.d_model) if cfg.norm == "none" else np.asarray(p["attention_norm"]["scale_D"], np.float64)
        kv_heads = sorted({n // group for n in heads})
        kv_of_head = [kv_heads.index(n // group) for n in heads]
        q_NDH, k_KDH, v_KDH = (np.tensordot(visible_MD * gain_M[:, None], w[name], (0, 0)).swapaxes(0, 1)
                               for name in ("wq_DNH", "wk_DKH", "wv_DKH"))  # fmt: skip
        if cfg.qk_norm:  # its gains; its division by a size is left out too, and depends on what is read
            q_NDH, k_KDH = q_NDH * w["q_scale_H"], k_KDH * w["k_scale_H"]
        q_LNDH[layer, heads], k_LNDH[layer, heads], v_LNDH[layer, heads] = q_NDH, k_KDH[kv_of_head], v_KDH[kv_of_head]
        o_LNHD[layer, heads] = w["wo_NHD"] @ visible_MD
    embed_VM = np.asarray(params["embed_VD"], np.float64)
    unembed_MV = embed_VM.T if cfg.tied else np.asarray(params["unembed_DV"], np.float64)
    gain_M = None if cfg.norm == "none" else np.asarray(params["final_norm"]["scale_D"], np.float64)
    unembed_MV = fold_final_norm(gain_M, unembed_MV, centred=cfg.norm == "layer")
    return Circuits(q_LNDH, k_LNDH, v_LNDH, o_LNHD, embed_VM @ visible_MD, visible_MD.T @ unembed_MV)


def _beside_ones(width):
    """Orthonormal columns [width, width - 1], all orthogonal to (1, .., 1)."""
    return np.linalg.qr(np.column_stack([np.ones(width), np.eye(width)[:, 1:]]))[0][:, 1:]


def ov_matrices(c: Circuits):
    """[L, N, H, H] with the non-zero eigenvalues of the V x V circuits W_E W_V W_O W_U: those of W_O W_U W_E W_V."""
    return c.o_LNHD @ (c.unembed_DV @ c.embed_VD) @ c.v_LNDH


def copying_eigenvalues(params, cfg) -> tuple[np.ndarray, float]:
    """(score_LN in [-1, 1], sd of the score over random heads, whose mean is 0).

    Sum of the real parts over the sum of the moduli of the OV circuit's eigenvalues (Elhage et al. 2021): 1 when
    attending a token raises its own logit whatever the token, -1 when it lowers it.
    """
    c = circuits(params, cfg)
    score_LN = _positivity(np.linalg.eigvals(ov_matrices(c)))[1]
    return score_LN, copying_chance_sd(c.unembed_DV @ c.embed_VD, cfg.head_dim)


def copying_chance_sd(round_DD, head_dim, draws: int = DRAWS, seed: int = 0) -> float:
    """sd of the copying score of heads with random W_V and W_O in a model whose W_U W_E is round_DD.

    Rotations change random kernels into random kernels, so only the singular values of round_DD count. With random
    embeddings and d_model = 4 H it is 0.21, 0.11, 0.06, 0.03 at H 8, 16, 32, 64, and 0.24 at H 8 and d_model 16.
    """
    rng = np.random.default_rng(seed)
    size_D = np.linalg.svd(round_DD, compute_uv=False)
    shape = (head_dim, len(size_D))
    return float(np.std([_positivity(np.linalg.eigvals((rng.normal(size=shape) * size_D) @ rng.normal(size=shape).T))[1]
                         for _ in range(draws)]))  # fmt: skip


def _positivity(eigenvalues):
    """(sum of real parts, the same over the sum of moduli) over the last axis; NaN where all are 0."""
    real, modulus = eigenvalues.real.sum(-1), np.abs(eigenvalues).sum(-1)
    real = np.where(modulus == 0, np.nan, real)
    return real, real / np.where(modulus == 0, 1.0, modulus)


class Composition(NamedTuple):
    """How much of what one head writes another head reads, on axes [writer's L, N, reader's L, N].

    score: |W_OV W|_F / (|W_OV|_F |W|_F) less `baseline` = 1 / sqrt(D), what random heads have whatever their rank. z:
    the ratio less its mean, over its sd, when what the writer writes is turned by random rotations. NaN unless the
    writer is in an earlier layer. approximate: QK-norm divides by a size that no matrix can show.
    """

    score_LNLN: np.ndarray
    z_LNLN: np.ndarray
    baseline: float
    approximate: bool


def composition(params, cfg, offsets=(0,), rotations: int = ROTATIONS, seed: int = 0) -> dict[str, Composition]:
    """{'q', 'k', 'v'}: composition of all pairs of heads through the later head's queries, keys, values.

    W is W_Q R W_K^T for q, its transpose for k, the later head's W_OV for v (Elhage et al. 2021). R turns queries by
    their distance from the key under rope: q and k have distance 0, and with rope there are also 'q_offsets' and
    'k_offsets', the mean of the ratios over `offsets` (tokens from the query back to the key).
    """
    c = circuits(params, cfg)
    L, N, D, _ = c.q_LNDH.shape
    q_PDH, k_PDH, v_PDH, o_PHD = (w.reshape(L * N, *w.shape[2:]) for w in c[:4])
    # |A X| is |R X| where A = Q R: a head shrinks to what it writes [H, D] and, for readers, a basis and a core [H, H].
    writer_PHD = np.linalg.qr(v_PDH, mode="r") @ o_PHD
    here_O, offsets_O, theta = np.zeros(1), np.asarray(offsets, np.float64), cfg.rope_theta
    readers = {
        "q": _reader(q_PDH, k_PDH, here_O, theta), "k": _reader(k_PDH, q_PDH, here_O, theta),
        "v": _reader(v_PDH, o_PHD.swapaxes(1, 2), here_O, theta),
    }  # fmt: skip
    if cfg.positions == "rope":
        readers["q_offsets"] = _reader(q_PDH, k_PDH, offsets_O, theta)
        readers["k_offsets"] = _reader(k_PDH, q_PDH, -offsets_O, theta)
    layer_P = np.repeat(np.arange(L), N)
    earlier_PP = layer_P[:, None] < layer_P
    out = {}
    with np.errstate(invalid="ignore", divide="ignore"):  # a circuit of zeros has no direction: NaN
        writer_PHD, share_PA = _unit(writer_PHD), _shares(writer_PHD)
        for name, (basis_PDR, core_PORS) in readers.items():
            core_PORS = _unit(core_PORS)
            ratio_PP = np.stack([_ratios(w_HD @ basis_PDR, core_PORS) for w_HD in writer_PHD])
            mean_PP, sd_PP = _rotated_ratios(share_PA, core_PORS, D, rotations, seed)
            score, z = (np.where(earlier_PP, x, np.nan).reshape(L, N, L, N)
                        for x in (ratio_PP - D**-0.5, (ratio_PP - mean_PP) / sd_PP))  # fmt: skip
            out[name] = Composition(score, z, D**-0.5, cfg.qk_norm and name != "v")
    return out


def _reader(left_PDH, right_PDH, offsets_O, theta):
    """(basis_PDR, core_PORS): |X basis core| is |X left R right^T| for any X and each offset's rotation R."""
    basis_PDR, left_PRH = np.linalg.qr(left_PDH)
    right_PSH = np.linalg.qr(right_PDH, mode="r")
    turned_PORH = np.stack([rotate(left_PRH, offset, theta) for offset in offsets_O], axis=1)
    return basis_PDR, turned_PORH @ right_PSH.swapaxes(1, 2)[:, None]


def rotate(x, offset, theta):
    """Rope over the last axis at position `offset`, half-split as in model/attention.py."""
    if offset == 0:
        return x
    a, b = np.split(x, 2, axis=-1)
    angle_h = offset * theta ** (-np.arange(a.shape[-1]) / a.shape[-1])
    cos, sin = np.cos(angle_h), np.sin(angle_h)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _unit(x):
    """x with Frobenius norm 1 over the last two axes."""
    return x / np.linalg.norm(x, axis=(-2, -1), keepdims=True)


def _shares(writer_PHD):
    """[P, A]: squares of the singular values over their sum."""
    square_PA = np.square(np.linalg.svd(writer_PHD, compute_uv=False))
    return square_PA / square_PA.sum(-1, keepdims=True)


def _ratios(met_PAR, core_PORS):
    """[P]: |met core|_F, averaged over offsets."""
    return np.linalg.norm(met_PAR[:, None] @ core_PORS, axis=(-2, -1)).mean(-1)


def _rotated_ratios(share_PA, core_PORS, width, rotations, seed):
    """(mean_PP, sd_PP) of the ratios when the writer is turned by a random rotation of the residual stream.

    A random rotation looks the same from any basis, so in place of it stands its block between the writer's singular
    directions and the reader's basis, and one draw serves all pairs.
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rotations):
        frame_DR, corner_RR = np.linalg.qr(rng.normal(size=(width, core_PORS.shape[2])))
        block_AR = (frame_DR * np.sign(np.diag(corner_RR)))[: share_PA.shape[1]]
        through_POA = np.square(block_AR @ core_PORS).sum(-1)
        found.append(np.sqrt(np.tensordot(share_PA, through_POA, (1, 2))).mean(-1))
    return np.mean(found, axis=0), np.std(found, axis=0)


def qk_trace(params, cfg, previous_token_LN, offsets=(0,)) -> tuple[np.ndarray, np.ndarray]:
    """(trace_LN, the same over the sum of the moduli of the eigenvalues, in [-1, 1]).

    tr(W_E W_Q R W_K^T (sum over heads e of earlier layers of s_e W_V^e W_O^e)^T W_E^T), s_e = previous_token_LN (Olsson
    et al. 2022): does a head look for the token it stands on among those that earlier heads moved one place on? Under
    rope, R is the mean over `offsets` (tokens from query back to key). Undefined, NaN, in layer 0. ConfigError when the
    scores are not [L, N].
    """
    c = circuits(params, cfg)
    weight_LN = np.asarray(previous_token_LN, np.float64)
    if weight_LN.shape != c.q_LNDH.shape[:2]:
        raise ConfigError(f"previous_token_LN has shape {weight_LN.shape}: allowed is {c.q_LNDH.shape[:2]}")
    weight_LN = np.where(c.o_LNHD.any((2, 3)), weight_LN, 0.0)
    moved_LDD = np.stack([np.tensordot(w_N[:, None, None] * v_NDH, o_NHD, ((0, 2), (0, 1)))
                          for w_N, v_NDH, o_NHD in zip(weight_LN, c.v_LNDH, c.o_LNHD, strict=True)])  # fmt: skip
    before_LDD = np.concatenate([np.zeros_like(moved_LDD[:1]), np.cumsum(moved_LDD, axis=0)[:-1]])
    same_DD = c.embed_VD.T @ c.embed_VD
    match_LNHH = c.k_LNDH.swapaxes(2, 3) @ (before_LDD.swapaxes(1, 2) @ same_DD)[:, None] @ c.q_LNDH
    if cfg.positions == "rope":
        match_LNHH = np.mean([rotate(match_LNHH, offset, cfg.rope_theta) for offset in offsets], axis=0)
    return _positivity(np.linalg.eigvals(match_LNHH))
