"""The model a second time, to be compared with: NumPy, float64, loops over rows, heads and queries, no JAX.

It shares nothing with the package but the names of the parameters. Causality here is the order of tokens in the
array, where the package goes by positions.
"""
import dataclasses
import functools

import jax
import numpy as np

from mha_jax.config import Config, DataConfig, ModelConfig
from mha_jax.model import transformer
from mha_jax.validation import resolve

# With these a small model compiles five times faster. Whatever is said to be *exactly* equal is compiled without.
QUICK = {"xla_backend_optimization_level": "0"}
if jax.__version_info__ < (0, 11):  # later ones have these emitters alone and no option
    QUICK["xla_cpu_use_fusion_emitters"] = "False"


def plain_jit(f, **kwargs):
    """jax.jit with NumPy results: on JAX arrays each operation of a test would be compiled as well."""
    run = jax.jit(f, **kwargs)
    return lambda *args, **kwargs: jax.device_get(run(*args, **kwargs))


quick_jit = functools.partial(plain_jit, compiler_options=QUICK)


def model_config(length=16, **fields) -> ModelConfig:
    """A resolved small model: 1 layer, d 32, 8 heads, vocabulary 11, unless said otherwise."""
    fields = dict(num_layers=1, d_model=32, num_heads=8, num_kv_heads=8, vocab_size=11) | fields
    data = DataConfig(task="markov", length=length, vocab_size=2)
    return resolve(Config(model=ModelConfig(**fields), data=data)).model


def random_params(cfg: ModelConfig, seed: int, size: float = 0.35):
    """Parameters of the right shapes with no zero, no one and no symmetry anywhere, so that each of them counts."""
    rng = np.random.default_rng(seed)
    shapes = _abstract(dataclasses.astuple(cfg))[1]
    return jax.tree.map(lambda s: (size * rng.normal(size=s.shape)).astype(np.float32), shapes)


def graphdef(cfg: ModelConfig):
    return _abstract(dataclasses.astuple(cfg))[0]


@functools.cache
def _abstract(fields):
    cfg = ModelConfig(*fields)
    return transformer.graphdef(cfg), jax.eval_shape(lambda: transformer.init_params(cfg, 0))


def random_tokens(cfg: ModelConfig, seed: int, B: int = 2, T: int = 9):
    return np.random.default_rng(seed).integers(0, cfg.vocab_size, (B, T)).astype(np.int32)


def packed(lengths, T: int):
    """(positions [T], segments [T]) of documents of these lengths one after the other, then padding up to T."""
    positions, segments = np.zeros(T, np.int32), np.zeros(T, np.int32)
    start = 0
    for number, length in enumerate(lengths, 1):
        positions[start : start + length] = np.arange(length)
        segments[start : start + length] = number
        start += length
    return positions, segments


def seen(T: int, segments_T=None, window=None):
    """bool [T, S]: which keys each query may see, by the order of the tokens in the array."""
    out = np.zeros((T, T), bool)
    for t in range(T):
        for s in range(t + 1):
            same = segments_T is None or (segments_T[s] == segments_T[t] and segments_T[s] > 0)
            out[t, s] = same and (window is None or t - s < window)
    return out


def attend(q_BTNH, k_BSKH, v_BSKH, seen_BTS, sink_N=None, kv_of_head=None):
    """(z_BTNH, pattern_BNTS) of unscaled q in float64; a query that sees nothing reads 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (q_BTNH, k_BSKH, v_BSKH))
    B, T, N, H = q.shape
    group = N // k.shape[2] if kv_of_head is None else None
    z, pattern = np.zeros(q.shape), np.zeros((B, N, T, T))
    for b in range(B):
        for n in range(N):
            j = n // group if kv_of_head is None else kv_of_head[n]
            scores = q[b, :, n] @ k[b, :, j].T / np.sqrt(H)
            for t in range(T):
                keys = np.flatnonzero(seen_BTS[b, t])
                if len(keys) == 0:
                    continue
                row = scores[t, keys]
                top = row.max() if sink_N is None else max(row.max(), sink_N[n])
                mass = np.exp(row - top)
                total = mass.sum() + (0.0 if sink_N is None else np.exp(sink_N[n] - top))
                pattern[b, n, t, keys] = mass / total
            z[b, :, n] = pattern[b, n] @ v[b, :, j]
    return z, pattern


def attend_grads(q_BTNH, k_BSKH, v_BSKH, seen_BTS, dz_BTNH, sink_N=None):
    """Gradients of sum(z * dz) with respect to q, k, v and sink, written out by hand in float64."""
    q, k, v, dz = (np.asarray(x, np.float64) for x in (q_BTNH, k_BSKH, v_BSKH, dz_BTNH))
    B, _, N, H = q.shape
    group = N // k.shape[2]
    _, pattern = attend(q, k, v, seen_BTS, sink_N)
    dq, dk, dv, dsink = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), np.zeros(N)
    for b in range(B):
        for n in range(N):
            p, j = pattern[b, n], n // group
            dp = dz[b, :, n] @ v[b, :, j].T
            mean = (p * dp).sum(-1, keepdims=True)
            ds = p * (dp - mean) / np.sqrt(H)
            dq[b, :, n] = ds @ k[b, :, j]
            dk[b, :, j] += ds.T @ q[b, :, n]
            dv[b, :, j] += p.T @ dz[b, :, n]
            live = seen_BTS[b].any(-1)
            dsink[n] -= ((1 - p.sum(-1)) * mean[:, 0])[live].sum()
    return dq, dk, dv, dsink


def norm(cfg: ModelConfig, p, x):
    if cfg.norm == "none":
        return x
    if cfg.norm == "rms":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps) * p["scale_D"]
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + cfg.norm_eps) * p["scale_D"]
    return y + p["bias_D"] if cfg.bias else y


def rotate(x_TNH, positions_T, theta):
    """Rope by complex numbers: component i and i + H/2 are one number, turned by position x theta^(-2i/H)."""
    H = x_TNH.shape[-1]
    rate = theta ** (-2.0 * np.arange(H // 2) / H)
    turned = (x_TNH[..., : H // 2] + 1j * x_TNH[..., H // 2 :]) * np.exp(1j * positions_T[:, None, None] * rate)
    return np.concatenate([turned.real, turned.imag], -1)


def mlp(cfg: ModelConfig, p, x):
    up = x @ p["w_up_DF"] + (p["b_up_F"] if cfg.bias else 0)
    if cfg.mlp == "gelu":
        hidden = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    else:
        gate = x @ p["w_gate_DF"]
        hidden = gate / (1 + np.exp(-gate)) * up
    return hidden @ p["w_down_FD"] + (p["b_down_D"] if cfg.bias else 0)


def attention_layer(cfg: ModelConfig, p, layer, x_BTD, positions_BT, segments_BT, table_BTD):
    """(output_BTD, found): one attention layer; found holds q, k, v, z and pattern of the heads that remain."""
    heads = range(cfg.num_heads) if cfg.kept_heads is None else cfg.kept_heads[layer]
    B, T, _ = x_BTD.shape
    bias = p["bo_D"] if cfg.bias else 0.0
    if len(heads) == 0:
        return np.zeros(x_BTD.shape) + bias, {}
    group = cfg.num_heads // cfg.num_kv_heads
    kv_heads = sorted({n // group for n in heads})
    moved = x_BTD + table_BTD if cfg.positions == "shortformer" else x_BTD
    q = np.einsum("btd,dnh->btnh", moved, p["wq_DNH"]) + (p["bq_NH"] if cfg.bias else 0)
    k = np.einsum("btd,dkh->btkh", moved, p["wk_DKH"]) + (p["bk_KH"] if cfg.bias else 0)
    v = np.einsum("btd,dkh->btkh", x_BTD, p["wv_DKH"]) + (p["bv_KH"] if cfg.bias else 0)
    if cfg.smeared_key:
        own = 1 / (1 + np.exp(-p["smear_K"]))
        plain = k.copy()
        for b in range(B):
            for t in range(1, T):
                if segments_BT is None or segments_BT[b, t] == segments_BT[b, t - 1]:
                    k[b, t] = own[:, None] * plain[b, t] + (1 - own)[:, None] * plain[b, t - 1]
    if cfg.qk_norm:
        q = q / np.sqrt((q**2).mean(-1, keepdims=True) + cfg.norm_eps) * p["q_scale_H"]
        k = k / np.sqrt((k**2).mean(-1, keepdims=True) + cfg.norm_eps) * p["k_scale_H"]
    if cfg.positions == "rope":
        q, k = (np.stack([rotate(x[b], positions_BT[b], cfg.rope_theta) for b in range(B)]) for x in (q, k))
    may = np.stack([seen(T, None if segments_BT is None else segments_BT[b], cfg.window) for b in range(B)])
    z, pattern = attend(q, k, v, may, p["sink_N"] if cfg.sink else None, [kv_heads.index(n // group) for n in heads])
    out = sum(z[:, :, i] @ p["wo_NHD"][i] for i in range(len(heads))) + bias
    return out, {"q": q, "k": k, "v": v, "z": z, "pattern": pattern}


def forward(cfg: ModelConfig, params, tokens_BT, positions_BT=None, segments_BT=None):
    """(logits_BTV, found per layer, residual stream before each layer and after the last)."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    B, T = tokens_BT.shape
    positions_BT = np.broadcast_to(np.arange(T), (B, T)) if positions_BT is None else positions_BT
    table_BTD = params["positions_PD"][positions_BT] if cfg.positions in ("learned", "shortformer") else None
    x = params["embed_VD"][tokens_BT]
    if cfg.positions == "learned":
        x = x + table_BTD
    found, residuals = [], [x]
    for layer in range(cfg.num_layers):
        p = params["layers"][f"layer_{layer:02d}"]
        normed = norm(cfg, p.get("attention_norm"), x)
        out, of_layer = attention_layer(cfg, p["attention"], layer, normed, positions_BT, segments_BT, table_BTD)
        x = x + out
        if cfg.mlp != "none":
            x = x + mlp(cfg, p["mlp"], norm(cfg, p.get("mlp_norm"), x))
        found.append(of_layer)
        residuals.append(x)
    x = norm(cfg, params.get("final_norm"), x)
    return x @ (params["embed_VD"].T if cfg.tied else params["unembed_DV"]), found, residuals
