"""The transformer: embedding, pre-norm blocks in an unrolled loop, unembedding, and the boundary to plain JAX.

Modules are Flax NNX and hold float32 parameters. Outside this package a model is `graphdef(cfg)` plus a plain
nested dict of arrays: `forward(graphdef, params, tokens)` merges the two inside a jitted function.
Letters as in attention.py; F MLP width, V vocabulary, L layers.
"""
import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mha_jax.config import ModelConfig, kept_heads
from mha_jax.model.attention import Attention, dense, rms
from mha_jax.model.interventions import Interventions

CAPTURES = ("pattern", "z", "q", "k", "v", "resid")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aux:
    """What `capture` asked for, stacked over layers; None where not asked. Heads are the original ones, NaN if gone.

    pattern_LBNTS attention weights; z_LBTNH what each head read, after gates; q_LBTNH, k_LBSKH after rotation;
    v_LBSKH; resid_MBTD the residual stream entering layers start.., and after the last (M = layers run + 1).
    Layers below `start` are absent: index 0 is layer `start`.
    """

    pattern_LBNTS: jax.Array | None = None
    z_LBTNH: jax.Array | None = None
    q_LBTNH: jax.Array | None = None
    k_LBSKH: jax.Array | None = None
    v_LBSKH: jax.Array | None = None
    resid_MBTD: jax.Array | None = None


class Norm(nnx.Module):
    """LayerNorm or RMSNorm with a learned scale, computed in float32; `none` is the identity."""

    def __init__(self, cfg: ModelConfig):
        self.kind, self.eps = cfg.norm, cfg.norm_eps
        self.scale_D = None if cfg.norm == "none" else nnx.Param(jnp.ones(cfg.d_model))
        self.bias_D = nnx.Param(jnp.zeros(cfg.d_model)) if cfg.norm == "layer" and cfg.bias else None

    def __call__(self, x_BTD):
        if self.kind == "none":
            return x_BTD
        if self.kind == "rms":
            return rms(x_BTD, self.scale_D[...], self.eps)
        y_BTD = x_BTD.astype(jnp.float32)
        y_BTD = y_BTD - y_BTD.mean(-1, keepdims=True)
        y_BTD = y_BTD * jax.lax.rsqrt((y_BTD * y_BTD).mean(-1, keepdims=True) + self.eps) * self.scale_D[...]
        return (y_BTD if self.bias_D is None else y_BTD + self.bias_D[...]).astype(x_BTD.dtype)


class MLP(nnx.Module):
    """gelu in the tanh form (GPT-2), or SwiGLU (Shazeer 2020): down(silu(gate x) * up x)."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        D, F = cfg.d_model, cfg.d_mlp
        std = D**-0.5 if cfg.init == "fan_in" else 0.02
        down_std = F**-0.5 if cfg.init == "fan_in" else 0.02 * (2 * cfg.num_layers) ** -0.5
        self.w_gate_DF = nnx.Param(std * jax.random.normal(rngs.params(), (D, F))) if cfg.mlp == "swiglu" else None
        self.w_up_DF = nnx.Param(std * jax.random.normal(rngs.params(), (D, F)))
        self.w_down_FD = nnx.Param(down_std * jax.random.normal(rngs.params(), (F, D)))
        self.b_up_F = nnx.Param(jnp.zeros(F)) if cfg.bias else None
        self.b_down_D = nnx.Param(jnp.zeros(D)) if cfg.bias else None

    def __call__(self, x_BTD):
        up_BTF = dense(x_BTD, self.w_up_DF[...], None if self.b_up_F is None else self.b_up_F[...])
        if self.w_gate_DF is None:
            hidden_BTF = jax.nn.gelu(up_BTF, approximate=True)
        else:
            hidden_BTF = jax.nn.silu(dense(x_BTD, self.w_gate_DF[...])) * up_BTF
        return dense(hidden_BTF, self.w_down_FD[...], None if self.b_down_D is None else self.b_down_D[...])


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) where there is an MLP."""

    def __init__(self, cfg: ModelConfig, layer: int, rngs: nnx.Rngs):
        self.attention_norm = Norm(cfg)
        self.attention = Attention(cfg, layer, rngs)
        self.mlp_norm = None if cfg.mlp == "none" else Norm(cfg)
        self.mlp = None if cfg.mlp == "none" else MLP(cfg, rngs)

    def __call__(self, x_BTD, *args):
        out_BTD, found = self.attention(self.attention_norm(x_BTD), *args)
        x_BTD = x_BTD + out_BTD
        if self.mlp is not None:
            x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return x_BTD, found


class Transformer(nnx.Module):
    """A decoder-only language model; `num_kv_heads` alone makes it MHA, GQA or MQA."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        D, V = cfg.d_model, cfg.vocab_size
        std = D**-0.5 if cfg.init == "fan_in" else 0.02
        self.positions, self.dtype = cfg.positions, cfg.dtype
        self.num_layers, self.num_heads = cfg.num_layers, cfg.num_heads
        self.attention = cfg.attention
        self.embed_VD = nnx.Param(std * jax.random.normal(rngs.params(), (V, D)))
        table = cfg.positions in ("learned", "shortformer")
        # Each table at the scale of what it is added to: embeddings, or for shortformer the normed residual stream.
        place_std = 1.0 if cfg.positions == "shortformer" and cfg.norm != "none" else std
        place_PD = place_std * jax.random.normal(rngs.params(), (cfg.max_length, D)) if table else None
        self.positions_PD = nnx.Param(place_PD) if table else None
        # Zero-padded keys: plain numbers sort 0, 1, 10, 11, 2 and would stack a 12-layer model in the wrong order.
        self.layers = nnx.Dict({layer_key(i): Block(cfg, i, rngs) for i in range(cfg.num_layers)})
        self.final_norm = Norm(cfg)
        self.unembed_DV = None if cfg.tied else nnx.Param(std * jax.random.normal(rngs.params(), (D, V)))

    def __call__(self, tokens_BT, *, positions_BT=None, segments_BT=None, interventions: Interventions | None = None,
                 cache=None, capture=(), start=0, x_BTD=None, residual_sharding=None, implementation=None):  # fmt: skip
        """Logits of the next token at every position.

        tokens_BT int; positions_BT (default 0..T-1) must ascend inside a segment, for causality goes by position
        and `blockwise` never reads a key later in the row; segments_BT (0 padding, equal numbers see each other).
        capture: names among CAPTURES. start, x_BTD: enter at layer `start` with this residual stream instead of
        the embedding. residual_sharding: NamedSharding of [B, T, D]. implementation: overrides the config's.
        Returns (logits_BTV float32, Aux, cache); the cache is for decoding, which this model does not do yet.
        ValueError for an unknown capture, an intervention of the wrong shape, or a length without position rows.
        """
        unknown = set(capture) - set(CAPTURES)
        if unknown or cache is not None:
            raise ValueError(f"capture {sorted(unknown)}: allowed are {CAPTURES}" if unknown else "cache must be None")
        if (start == 0) != (x_BTD is None):
            raise ValueError("start and x_BTD are given together")
        if not 0 <= start <= self.num_layers:
            raise ValueError(f"start = {start}: allowed are 0 to {self.num_layers}, where only the unembedding is left")
        if interventions is not None:
            interventions.check(self.num_layers, self.num_heads)
        positions_bT = jnp.arange(tokens_BT.shape[1])[None] if positions_BT is None else positions_BT
        place_bTD = None
        if self.positions_PD is not None:
            if tokens_BT.shape[1] > self.positions_PD.shape[0]:
                raise ValueError(f"length {tokens_BT.shape[1]} is more than the {self.positions_PD.shape[0]} positions")
            place_bTD = self.positions_PD[...][positions_bT]
        if x_BTD is None:
            x_BTD = self.embed_VD[...][tokens_BT]
            if self.positions == "learned":
                x_BTD = x_BTD + place_bTD
        constrain = lambda x: x  # noqa: E731
        if residual_sharding is not None:
            constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=residual_sharding)
        x_BTD = constrain(x_BTD.astype(self.dtype))
        shift_bTD = place_bTD if self.positions == "shortformer" else None
        found, resid = [], [x_BTD]
        for i in range(start, self.num_layers):
            with jax.named_scope(layer_key(i)):
                x_BTD, of_layer = self.layers[layer_key(i)](
                    x_BTD, i, positions_bT, segments_BT, shift_bTD, interventions, capture,
                    implementation or self.attention, batch_shards(residual_sharding),
                )  # fmt: skip
            x_BTD = constrain(x_BTD)
            found.append(of_layer)
            resid.append(x_BTD)
        return self.unembed(x_BTD), _stack(found, resid, capture), cache

    def unembed(self, x_BTD):
        """logits_BTV in float32: the final norm and the unembedding of a residual stream."""
        x_BTD = self.final_norm(x_BTD)
        kernel_DV = self.embed_VD[...].T if self.unembed_DV is None else self.unembed_DV[...]
        B, T, D = x_BTD.shape
        logits_BTV = jnp.matmul(
            x_BTD.reshape(B * T, D), kernel_DV.astype(x_BTD.dtype), preferred_element_type=jnp.float32
        ).reshape(B, T, -1)
        return logits_BTV


def layer_key(i: int) -> str:
    """Name of layer i in the parameter dict."""
    return f"layer_{i:02}"


def batch_shards(sharding) -> int:
    """Into how many parts the batch axis of a [B, T, D] array is cut."""
    if sharding is None or not sharding.spec or sharding.spec[0] is None:
        return 1
    axes = sharding.spec[0] if isinstance(sharding.spec[0], tuple) else (sharding.spec[0],)
    size = 1
    for axis in axes:
        size *= sharding.mesh.shape[axis]
    return size


def _stack(found, resid, capture) -> Aux:
    out = {"resid_MBTD": jnp.stack(resid)} if "resid" in capture else {}
    fields = {"pattern": "pattern_LBNTS", "z": "z_LBTNH", "q": "q_LBTNH", "k": "k_LBSKH", "v": "v_LBSKH"}
    for name in capture:
        if name in fields:
            some = next((f[name] for f in found if name in f), None)
            if some is None:
                raise ValueError(f"capture {name!r}: no layer that runs has a head")
            out[fields[name]] = jnp.stack([f.get(name, jnp.full_like(some, jnp.nan)) for f in found])
    return Aux(**out)


def graphdef(cfg: ModelConfig):
    """The static half of the model: hashable, without arrays. The same for every seed."""
    return nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg, nnx.Rngs(0))))


def init_params(cfg: ModelConfig, seed):
    """The other half: a nested dict of float32 arrays, a pure function of `seed`, which may be traced."""
    return nnx.to_pure_dict(nnx.state(Transformer(cfg, nnx.Rngs(jax.random.key(seed))), nnx.Param))


def forward(graph, params, tokens_BT, **kwargs):
    """`Transformer.__call__` of graphdef `graph` with parameters `params`."""
    return nnx.merge(graph, params)(tokens_BT, **kwargs)


def count_params(cfg: ModelConfig) -> int:
    """Number of parameters in closed form; per layer d H (2 N + 2 K) in attention, N and K the heads that remain.

    For MHA with head_dim = d / N and no per-head extras (bias, smeared key, sink, QK-norm) it does not depend on N.
    """
    D, H, group = cfg.d_model, cfg.head_dim, cfg.num_heads // cfg.num_kv_heads
    norm = {"none": 0, "rms": D, "layer": D * (2 if cfg.bias else 1)}[cfg.norm]
    total = cfg.vocab_size * D * (1 if cfg.tied else 2) + norm
    total += cfg.max_length * D if cfg.positions in ("learned", "shortformer") else 0
    for heads in kept_heads(cfg):
        N, K = len(heads), len({n // group for n in heads})
        total += norm + D * cfg.bias + D * H * (2 * N + 2 * K)
        total += (N + 2 * K) * H * cfg.bias + K * cfg.smeared_key + N * cfg.sink + 2 * H * (cfg.qk_norm and N > 0)
        if cfg.mlp != "none":
            total += norm + D * cfg.d_mlp * (3 if cfg.mlp == "swiglu" else 2) + (cfg.d_mlp + D) * cfg.bias
    return total
