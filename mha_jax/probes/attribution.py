"""Which part of the model moves a prediction: direct logits, the logit lens, value-weighted patterns, before and after.

Letters as in model/attention.py; L layers, V vocabulary, M = L + 1 places in the residual stream. The model is
`graph, params` of a float32 config; everything is computed at the highest matrix precision. Absent heads are NaN.
"""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mha_jax.config import ConfigError
from mha_jax.model.transformer import layer_key
from mha_jax.probes.behaviour import fold_final_norm
from mha_jax.probes.icl import token_loss


class Parts(NamedTuple):
    """What adds up to the logit of one token at every position: embedding + heads that exist + MLPs + bias = logit.

    embedding: token and learned position. heads: each head's result z W_O, its value bias included. mlp: each layer's,
    with its own biases, 0 where there is none. bias: those of the attention outputs and of the final norm.
    """

    embedding_BT: jax.Array
    heads_LNBT: jax.Array
    mlp_LBT: jax.Array
    bias_BT: jax.Array
    logit_BT: jax.Array


def direct_logits(graph, params, tokens_BT, targets_BT) -> Parts:
    """Direct logit attribution of the tokens `targets_BT`, the final norm frozen at the size it really has.

    Direct means through the residual stream alone: what a head changes in later layers is theirs (Elhage et al. 2021).
    Parts count the whole logit, not the logit less its mean over the vocabulary.
    """
    with jax.default_matmul_precision("highest"):
        return _direct_logits(graph, params, tokens_BT, targets_BT)


@functools.partial(jax.jit, static_argnums=0)
def _direct_logits(graph, params, tokens_BT, targets_BT):
    model = nnx.merge(graph, params)
    logits_BTV, aux, _ = model(tokens_BT, capture=("z", "resid"))
    toward_BTD, bias_BT = _frozen(model, aux.resid_MBTD[-1], targets_BT)
    heads_LNBT, mlp_LBT = [], []
    for i, x_BTD in enumerate(aux.resid_MBTD[:-1]):
        block = model.layers[layer_key(i)]
        attention = block.attention
        logit_NBT = jnp.full((model.num_heads, *tokens_BT.shape), jnp.nan)
        if attention.heads:
            heads = jnp.array(attention.heads)
            z_BTNH, wo_NHD = aux.z_LBTNH[i][:, :, heads], attention.wo_NHD[...]
            logit_NBT = logit_NBT.at[heads].set(
                jnp.einsum("BTNH,BTNH->NBT", z_BTNH, jnp.einsum("BTD,NHD->BTNH", toward_BTD, wo_NHD))
            )
            x_BTD = x_BTD + jnp.einsum("BTNH,NHD->BTD", z_BTNH, wo_NHD)
        if attention.bo_D is not None:
            bias_BT = bias_BT + toward_BTD @ attention.bo_D[...]
            x_BTD = x_BTD + attention.bo_D[...]
        moved_BTD = jnp.zeros_like(x_BTD) if block.mlp is None else block.mlp(block.mlp_norm(x_BTD))
        heads_LNBT.append(logit_NBT)
        mlp_LBT.append((moved_BTD * toward_BTD).sum(-1))
    embedding_BT = (aux.resid_MBTD[0] * toward_BTD).sum(-1)
    logit_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return Parts(embedding_BT, jnp.stack(heads_LNBT), jnp.stack(mlp_LBT), bias_BT, logit_BT)


def _frozen(model, x_BTD, targets_BT):
    """(direction_BTD, offset_BT): the target's logit is x . direction + offset, the final norm's size held at x's."""
    norm = model.final_norm
    kernel_DV = model.embed_VD[...].T if model.unembed_DV is None else model.unembed_DV[...]
    gain_D = None if norm.scale_D is None else norm.scale_D[...]
    column_BTD = fold_final_norm(gain_D, kernel_DV, centred=norm.kind == "layer").T[targets_BT]
    offset_BT = 0.0 if norm.bias_D is None else kernel_DV.T[targets_BT] @ norm.bias_D[...]
    offset_BT = jnp.broadcast_to(offset_BT, targets_BT.shape)
    if norm.kind == "none":
        return column_BTD, offset_BT
    centre = x_BTD.mean(-1, keepdims=True) if norm.kind == "layer" else 0.0
    return column_BTD * jax.lax.rsqrt(jnp.square(x_BTD - centre).mean(-1, keepdims=True) + norm.eps), offset_BT


def logit_lens(graph, params, tokens_BT, targets_BT):
    """loss_MBT in nats if the model ended before layer m: its residual stream there through the final norm and the
    unembedding (nostalgebraist 2020). The last is the model's own loss."""
    with jax.default_matmul_precision("highest"):
        return _logit_lens(graph, params, tokens_BT, targets_BT)


@functools.partial(jax.jit, static_argnums=0)
def _logit_lens(graph, params, tokens_BT, targets_BT):
    model = nnx.merge(graph, params)
    resid_MBTD = model(tokens_BT, capture=("resid",))[1].resid_MBTD
    # One place at a time: the logits of all of them at once would be M times the memory.
    return jax.lax.map(lambda x_BTD: token_loss(model.unembed(x_BTD), targets_BT), resid_MBTD)


def value_weighted(pattern_LBNTS, v_LBSKH, kv_of_head):
    """[L, B, N, T, S]: A[t, s] |v_s| over the head's mean |v| (over sequences and keys).

    Heads rest on tokens whose values are small (Elhage et al. 2021): there it falls below the pattern, which it equals
    where all values have one size. kv_of_head: the KV head that each of the N query heads reads.
    """
    size_LBSK = jnp.linalg.norm(v_LBSKH.astype(jnp.float32), axis=-1)
    mean_LK = size_LBSK.mean((1, 2))
    size_LBSK = size_LBSK / jnp.where(mean_LK == 0, 1.0, mean_LK)[:, None, None]
    size_LBNS = jnp.moveaxis(size_LBSK, 3, 2)[:, :, jnp.asarray(kv_of_head)]
    return pattern_LBNTS * size_LBNS[:, :, :, None]


def before_after(losses_start_T, losses_end_T, ablated_LNT, clean_T):
    """[L, N] in nats: how far ablating each head moves the losses along the phase change (Olsson et al. 2022).

    v = (losses_end - losses_start) / its length, from the losses where the change starts and ends; the score is
    (ablated - clean) . v. **Negative undoes the change**, as induction heads do. T: loss by position here, one token of
    each example in the paper; any fixed list of losses will do. Host, float64. ConfigError when nothing changed.
    """
    change_T = np.asarray(losses_end_T, np.float64) - np.asarray(losses_start_T, np.float64)
    length = np.linalg.norm(change_T)
    if not length > 0:
        raise ConfigError(f"before and after: the change of loss has length {length}: allowed are two steps whose "
                          "losses differ")
    return (np.asarray(ablated_LNT, np.float64) - np.asarray(clean_T, np.float64)) @ (change_T / length)
