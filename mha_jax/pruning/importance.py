"""How much a head matters by what can be read off without removing it: the gradient of its gate, or its weights.

Michel, Levy and Neubig 2019, equation 2: I_h = E_x |dL(x) / d xi_h|, where xi_h = 1 multiplies what head h read and
L(x) is the mean loss over the real tokens of one row (a packed row is one example). A gate g of its own for every
row, position and head gives three granularities in one backward pass, each named with every number, for they differ
in order and not only in scale: `token` (what that paper's code does), `example` (its definition; the default), `batch`.

R rows, T positions, L layers, J gates of a layer: the N query heads, or the K groups whose heads read one KV head.
"""
import difflib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.config import ConfigError, ModelConfig, kept_heads
from mha_jax.model.interventions import Interventions
from mha_jax.model.transformer import layer_key
from mha_jax.probes.subject import Subject
from mha_jax.pruning.ablation import present
from mha_jax.training.step import loss_sum

UNITS = ("head", "group")
DEFINITIONS = {
    "token": "mean over rows of the sum over positions of |g|",
    "example": "mean over rows of |the sum over positions of g|",
    "batch": "|mean over rows of the sum over positions of g|",
    "signed": "mean over rows of the sum over positions of g; negative: the loss would rise without the head",
    "g": "derivative of the row's mean loss over its real tokens, in nats, by a gate of 1 on what the head (or all "
         "heads of the KV group) read at one position",
    "per_layer_l2": "divided by the l2 norm of the scores of its layer",
    "weight_magnitude": "Frobenius norm of diag(norm gain) W_V W_O; of a group, root of the sum of its heads' squares",
}  # fmt: skip


class Importance(NamedTuple):
    """float64 [L, J] in nats, as `DEFINITIONS` says, NaN where there is no head (any more)."""

    token_LN: np.ndarray
    example_LN: np.ndarray
    batch_LN: np.ndarray
    signed_LN: np.ndarray


def heads_per_gate(cfg: ModelConfig, unit: str) -> int:
    """How many query heads share one gate: 1 for unit 'head', N / K for 'group'. ConfigError for another unit."""
    if unit not in UNITS:
        near = difflib.get_close_matches(str(unit), UNITS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unit = {unit!r}: allowed are {', '.join(UNITS)}{hint}")
    return 1 if unit == "head" else cfg.num_heads // cfg.num_kv_heads


def any_of_gate(heads_LN, size: int) -> np.ndarray:
    """bool [L, J]: the gates of `size` heads that have at least one of these heads."""
    return heads_LN.reshape(len(heads_LN), -1, size).any(-1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _of_rows(graph, size, sharding, params, batch, alive_LN):
    """(sum over positions of |g| [B, L, J], of g [B, L, J], real tokens [B])."""
    weights_BT, (L, N) = batch["weights_BT"], alive_LN.shape
    tokens_B = weights_BT.sum(1)
    share_BT = weights_BT / jnp.maximum(tokens_B, 1.0)[:, None]  # so the sum of losses is that of the rows' means

    def loss(gate_BTLJ):
        gate_BTLN = jnp.repeat(gate_BTLJ, size, axis=-1) * alive_LN
        return loss_sum(graph, params, batch | {"weights_BT": share_BT}, Interventions(gate_LN=gate_BTLN), sharding)

    g_BTLJ = jax.grad(loss)(jnp.ones((*weights_BT.shape, L, N // size)))
    return jnp.abs(g_BTLJ).sum(1), g_BTLJ.sum(1), tokens_B


def importance(subject: Subject, batch: dict, *, unit: str = "head", mask_LN=None) -> Importance:
    """Gradient importance of every head, or of every KV group by a gate that its query heads share.

    batch: host arrays as `data.source.to_batch` gives them, any number of rows; a row without a real token is not
    an example. unit: see `UNITS`. mask_LN: bool, False for heads already cut off; the derivative is then that of the
    model without them, and another mask compiles nothing new.
    ConfigError for an unknown unit or a batch without real tokens; ValueError for a mask of another shape.
    """
    size = heads_per_gate(subject.cfg, unit)
    alive_LN = present(subject)
    if mask_LN is not None:
        if np.shape(mask_LN) != alive_LN.shape:
            raise ValueError(f"mask_LN has shape {np.shape(mask_LN)}, the model has (layers, heads) = {alive_LN.shape}")
        alive_LN = alive_LN & np.asarray(mask_LN, bool)
    parts = []
    with jax.default_matmul_precision("highest"):
        for rows in subject.chunks(len(batch["inputs_BT"])):
            chunk = {k: None if v is None else subject.place(v[rows]) for k, v in batch.items()}
            sharding = subject.residual_sharding(len(chunk["inputs_BT"]))
            found = _of_rows(subject.graph, size, sharding, subject.params, chunk, alive_LN)
            parts.append(jax.device_get(found))
    token_RLJ, signed_RLJ, tokens_R = (np.concatenate(part).astype(np.float64) for part in zip(*parts, strict=True))
    real = tokens_R > 0
    if not real.any():
        raise ConfigError(f"the {len(real)} row(s) to score heads on have no real token: allowed is 1 or more")
    gone_LJ = ~any_of_gate(alive_LN, size)
    signed_LJ = signed_RLJ[real].mean(0)
    scores = (token_RLJ[real].mean(0), np.abs(signed_RLJ[real]).mean(0), np.abs(signed_LJ), signed_LJ)
    return Importance(*(np.where(gone_LJ, np.nan, score_LJ) for score_LJ in scores))


def per_layer_l2(score_LN) -> np.ndarray:
    """Scores over the l2 norm of their layer (Michel et al. 2019, after Molchanov et al. 2017); NaN stays NaN.

    A layer whose scores are all 0 keeps them.
    """
    score_LN = np.asarray(score_LN, np.float64)
    norm_L1 = np.sqrt(np.nansum(score_LN**2, axis=1, keepdims=True))
    return score_LN / np.where(norm_L1 > 0, norm_L1, 1.0)


def weight_magnitude(params: dict, cfg: ModelConfig, unit: str = "head") -> np.ndarray:
    """Size of what a head can write, float64 [L, J]: the Frobenius norm of diag(norm gain) W_V W_O, NaN if gone.

    The product and not the kernels one by one: moving a factor from W_V to W_O changes those and not the model, and a
    KV head's kernels have no share that is one query head's. W_Q and W_K say where a head looks, not how much it
    writes; biases are left out. A group's maps stand side by side, so its norm is the root of the sum of squares.
    """
    size, group = heads_per_gate(cfg, unit), cfg.num_heads // cfg.num_kv_heads
    square_LN = np.full((cfg.num_layers, cfg.num_heads), np.nan)
    for layer, kept in enumerate(kept_heads(cfg)):
        if not kept:
            continue
        heads = np.array(kept)
        block = params["layers"][layer_key(layer)]
        wv_DKH, wo_NHD = (np.asarray(block["attention"][name], np.float64) for name in ("wv_DKH", "wo_NHD"))
        if cfg.norm != "none":
            wv_DKH = np.asarray(block["attention_norm"]["scale_D"], np.float64)[:, None, None] * wv_DKH
        _, kv_of_head = np.unique(heads // group, return_inverse=True)
        # |A B|^2 = trace(A'A BB'): only H x H matrices are formed, never D x D.
        inner_KHI = np.einsum("dkh,dki->khi", wv_DKH, wv_DKH)
        outer_NHI = np.einsum("nhd,nid->nhi", wo_NHD, wo_NHD)
        square_LN[layer, heads] = (inner_KHI[kv_of_head] * outer_NHI).sum((1, 2))
    square_LJ = np.nansum(square_LN.reshape(cfg.num_layers, -1, size), axis=-1)
    return np.sqrt(np.where(any_of_gate(~np.isnan(square_LN), size), np.maximum(square_LJ, 0), np.nan))
