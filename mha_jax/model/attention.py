"""One attention path for MHA, GQA and MQA.

B batch, T query position, S key position, D model width, N query heads, K KV heads, G = N // K query heads of
one KV head, H head width. K = N is MHA, K = 1 is MQA. Query head n reads KV head n // G: a group is consecutive.

`attend` chooses among three implementations of the same function of (q, k, v, mask):
  einsum     forms the pattern, can return it and be told what it is
  blockwise  causal blocks of queries that skip the future and are recomputed in the backward pass
  fused      jax.nn.dot_product_attention, by cuDNN where a GPU can
"""
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mha_jax.config import kept_heads

BLOCK = 64  # queries of a block: larger blocks waste the skipped future, smaller ones starve the matrix products


def mask(q_pos, k_pos, q_seg=None, k_seg=None, window=None):
    """The one mask: causal by position, inside a segment, inside a window. bool [..., T, S].

    q_pos, q_seg [..., T]; k_pos, k_seg [..., S]. Segment 0 is padding: nobody sees it and it sees nobody.
    """
    ahead_TS = q_pos[..., :, None] - k_pos[..., None, :]
    seen_TS = ahead_TS >= 0
    if window is not None:
        seen_TS &= ahead_TS < window
    if q_seg is not None:
        seen_TS &= (q_seg[..., :, None] == k_seg[..., None, :]) & (k_seg > 0)[..., None, :]
    return seen_TS


def softmax(scores, seen, sink=None):
    """Softmax over the last axis in float32: exactly 0 where not `seen`, all 0 in a row that sees nothing.

    sink: a logit per row (broadcast to scores[..., :1]) that takes mass in the denominator and goes nowhere.
    """
    return _softmax(scores.astype(jnp.float32), seen, jnp.float32(-jnp.inf) if sink is None else sink)[0]


@jax.custom_jvp
def _softmax(scores, seen, sink):
    """Weights, and what the sink takes [..., 1]."""
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.maximum(scores.max(-1, keepdims=True), sink)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights, taken = jnp.exp(scores - top), jnp.exp(sink - top)
    total = weights.sum(-1, keepdims=True) + taken
    total = jnp.where(total == 0, 1.0, total)
    return weights / total, taken / total


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    """The derivative from the weights alone: the backward pass keeps one array of a pattern's size, not four."""
    weights, taken = _softmax(*primals)
    d_scores, _, d_sink = tangents
    mean = (weights * d_scores).sum(-1, keepdims=True) + taken * d_sink
    return (weights, taken), (weights * (d_scores - mean), taken * (d_sink - mean))


def rope(x_BTNH, positions_BT, theta):
    """Rotary positions (Su et al. 2021), half-split layout: width i turns with width i + H/2, as in Llama."""
    half = x_BTNH.shape[-1] // 2
    rate_h = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1h = positions_BT[..., None, None].astype(jnp.float32) * rate_h
    cos, sin = jnp.cos(angle_BT1h), jnp.sin(angle_BT1h)
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def smear(k_BSKH, gate_K, first_BS):
    """k_j <- s k_j + (1 - s) k_{j-1}, s = sigmoid(gate) (Olsson et al. 2022); the first key of a document stays."""
    share_K1 = jax.nn.sigmoid(gate_K)[:, None].astype(k_BSKH.dtype)
    before = jnp.pad(k_BSKH, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    return jnp.where(first_BS[..., None, None], k_BSKH, share_K1 * k_BSKH + (1 - share_K1) * before)


def choose(implementation, *, needs_pattern, sink, length):
    """The implementation that will run. ValueError when the one asked for by name cannot do what is needed."""
    if implementation == "auto":
        # Up to two blocks of queries, skipping the future saves less than recomputing the pattern costs.
        if needs_pattern or length <= 2 * BLOCK:
            return "einsum"
        return "blockwise"
    if needs_pattern and implementation != "einsum":
        raise ValueError(f"attention = {implementation!r} never forms the pattern: allowed are einsum, auto")
    if sink and implementation == "fused":
        raise ValueError("attention = 'fused' cannot add a sink logit: allowed are einsum, blockwise, auto")
    return implementation


def pattern_einsum(q_BTKGH, k_BSKH, seen_BTS, sink_KG):
    """Attention weights [B, K, G, T, S] in float32."""
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    sink = None if sink_KG is None else sink_KG[:, :, None, None].astype(jnp.float32)
    return softmax(scores, seen_BTS[:, None, None], sink)


def read_einsum(pattern_BKGTS, v_BSKH):
    """z [B, T, K, G, H]: what the heads read with the given pattern."""
    return jnp.einsum("BKGTS,BSKH->BTKGH", pattern_BKGTS.astype(v_BSKH.dtype), v_BSKH)


def blockwise(q_BTKGH, k_BSKH, v_BSKH, place, window, sink_KG, batch_shards):
    """z [B, T, K, G, H] by causal blocks of queries; `place` = (positions_bT, segments_bT or None), b = B or 1.

    On CPU the blocks of one row fit the cache, so rows are mapped one by one: over the rows *within* a device's
    shard (the batch seen as [batch_shards, B / batch_shards]), never across shards, which would gather them.
    """

    def block(q, k, v, q_pos, k_pos, q_seg, k_seg):
        seen = mask(q_pos, k_pos, q_seg, k_seg, window)
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
        sink = None if sink_KG is None else sink_KG[:, :, None, None].astype(jnp.float32)
        weights = softmax(scores, seen[:, None, None], sink).astype(v.dtype)
        return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v)

    def rows(q, k, v, pos, seg):
        out = []
        for start in range(0, q.shape[1], BLOCK):
            end = min(start + BLOCK, q.shape[1])
            ahead = None if seg is None else (seg[:, start:end], seg[:, :end])
            out.append(jax.checkpoint(block)(
                q[:, start:end], k[:, :end], v[:, :end], pos[:, start:end], pos[:, :end], *(ahead or (None, None))
            ))  # fmt: skip
        return jnp.concatenate(out, axis=1) if len(out) > 1 else out[0]

    positions_bT, segments_bT = place
    B = q_BTKGH.shape[0]
    if jax.default_backend() != "cpu" or B % batch_shards:
        return rows(q_BTKGH, k_BSKH, v_BSKH, positions_bT, segments_bT)
    full = [x if x is None else jnp.broadcast_to(x, (B, x.shape[1])) for x in (positions_bT, segments_bT)]
    split = jax.tree.map(
        lambda x: x.reshape(batch_shards, B // batch_shards, *x.shape[1:]).swapaxes(0, 1),
        (q_BTKGH, k_BSKH, v_BSKH, *full),
    )
    out = jax.lax.map(lambda xs: rows(*xs), split)
    return out.swapaxes(0, 1).reshape(q_BTKGH.shape)


def fused(q_BTKGH, k_BSKH, v_BSKH, seen_BTS):
    """z [B, T, K, G, H] by jax.nn.dot_product_attention; rows that see nothing, which it averages, made 0."""
    B, T, K, G, H = q_BTKGH.shape
    # Left to choose, JAX takes XLA, which forms the pattern; cuDNN's limits are those it checks itself.
    half = q_BTKGH.dtype in (jnp.bfloat16, jnp.float16)
    cudnn = jax.default_backend() == "gpu" and half and H % 8 == 0 and H <= 128 and T % 2 == 0
    z = jax.nn.dot_product_attention(
        q_BTKGH.reshape(B, T, K * G, H), k_BSKH, v_BSKH, mask=seen_BTS[:, None], scale=1.0,
        implementation="cudnn" if cudnn else "xla",
    ).reshape(q_BTKGH.shape)  # fmt: skip
    return jnp.where(seen_BTS.any(-1)[:, :, None, None, None], z, 0)


@functools.partial(jax.named_call, name="attend")
def attend(q_BTNH, k_BSKH, v_BSKH, positions_bT, segments_bT, *, window=None, sink_N=None, implementation="auto",
           batch_shards=1, need_pattern=False, edit=None):  # fmt: skip
    """Causal attention of N query heads over K KV heads.

    q_BTNH is scaled by 1 / sqrt(H) here. positions_bT and segments_bT (or None) have b = B or 1.
    need_pattern: also return the pattern. edit: function of pattern_BNTS, applied before it is used.
    Returns (z_BTNH, pattern_BNTS or None). ValueError when the implementation cannot do what is asked.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    how = choose(implementation, needs_pattern=need_pattern or edit is not None, sink=sink_N is not None,
                 length=T)  # fmt: skip
    q_BTKGH = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H)
    sink_KG = None if sink_N is None else sink_N.reshape(K, N // K)
    if how == "blockwise":
        place = (positions_bT, segments_bT)
        z = blockwise(q_BTKGH, k_BSKH, v_BSKH, place, window, sink_KG, batch_shards)
        return z.reshape(B, T, N, H), None
    seen_bTS = mask(positions_bT, positions_bT, segments_bT, segments_bT, window)
    if how == "fused":
        return fused(q_BTKGH, k_BSKH, v_BSKH, seen_bTS).reshape(B, T, N, H), None
    pattern_BKGTS = pattern_einsum(q_BTKGH, k_BSKH, seen_bTS, sink_KG)
    if edit is not None:
        pattern_BKGTS = edit(pattern_BKGTS.reshape(B, N, T, T)).reshape(pattern_BKGTS.shape)
    z = read_einsum(pattern_BKGTS, v_BSKH).reshape(B, T, N, H)
    return z, pattern_BKGTS.reshape(B, N, T, T) if need_pattern else None


def dense(x_BTD, kernel, bias=None):
    """x @ kernel over the last axis of x, on tokens flattened to two dimensions: on CPU much the faster layout."""
    B, T, D = x_BTD.shape
    y = (x_BTD.reshape(B * T, D) @ kernel.reshape(D, -1).astype(x_BTD.dtype)).reshape(B, T, *kernel.shape[1:])
    return y if bias is None else y + bias.astype(y.dtype)


def rms(x, scale, eps):
    """x / sqrt(mean of squares) * scale, in float32 (Zhang and Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + eps) * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Attention of one layer, with only the heads that remain; all it is told and tells speaks of the original ones.

    heads: original numbers of its query heads. Kernels: wq_DNH, wk_DKH, wv_DKH, wo_NHD, N and K those that remain.
    A layer without heads has no kernels and gives only its bias.
    """

    def __init__(self, cfg, layer: int, rngs: nnx.Rngs):
        group = cfg.num_heads // cfg.num_kv_heads
        self.num_heads = cfg.num_heads
        self.num_kv_heads = cfg.num_kv_heads
        self.heads = kept_heads(cfg)[layer]
        self.kv_heads = tuple(sorted({n // group for n in self.heads}))
        # Static tuples: a numpy array on a module would become state.
        self.kv_of_head = tuple(self.kv_heads.index(n // group) for n in self.heads)
        self.theta = cfg.rope_theta if cfg.positions == "rope" else None
        self.window, self.eps = cfg.window, cfg.norm_eps
        D, N, K, H = cfg.d_model, len(self.heads), len(self.kv_heads), cfg.head_dim
        self.bo_D = nnx.Param(jnp.zeros(D)) if cfg.bias else None
        if not self.heads:
            return
        std = D**-0.5 if cfg.init == "fan_in" else 0.02
        out_std = (N * H) ** -0.5 if cfg.init == "fan_in" else 0.02 * (2 * cfg.num_layers) ** -0.5
        normal = functools.partial(jax.random.normal, dtype=jnp.float32)
        self.wq_DNH = nnx.Param(std * normal(rngs.params(), (D, N, H)))
        self.wk_DKH = nnx.Param(std * normal(rngs.params(), (D, K, H)))
        self.wv_DKH = nnx.Param(std * normal(rngs.params(), (D, K, H)))
        self.wo_NHD = nnx.Param(out_std * normal(rngs.params(), (N, H, D)))
        self.bq_NH = nnx.Param(jnp.zeros((N, H))) if cfg.bias else None
        self.bk_KH = nnx.Param(jnp.zeros((K, H))) if cfg.bias else None
        self.bv_KH = nnx.Param(jnp.zeros((K, H))) if cfg.bias else None
        self.smear_K = nnx.Param(jnp.zeros(K)) if cfg.smeared_key else None
        self.sink_N = nnx.Param(jnp.zeros(N)) if cfg.sink else None
        self.q_scale_H = nnx.Param(jnp.ones(H)) if cfg.qk_norm else None
        self.k_scale_H = nnx.Param(jnp.ones(H)) if cfg.qk_norm else None

    def __call__(self, x_BTD, layer, positions_bT, segments_bT, shift_bTD, interventions, capture, implementation,
                 batch_shards):  # fmt: skip
        """Returns (output_BTD, dict of what `capture` names: pattern_BNTS, z_BTNH, q_BTNH, k_BSKH, v_BSKH)."""
        if not self.heads:
            out = jnp.zeros_like(x_BTD) if self.bo_D is None else jnp.broadcast_to(self.bo_D[...], x_BTD.shape)
            return out.astype(x_BTD.dtype), {}
        get = lambda p: None if p is None else p[...]  # noqa: E731
        at_BTD = x_BTD if shift_bTD is None else x_BTD + shift_bTD.astype(x_BTD.dtype)
        q_BTNH = dense(at_BTD, self.wq_DNH[...], get(self.bq_NH))
        k_BSKH = dense(at_BTD, self.wk_DKH[...], get(self.bk_KH))
        v_BSKH = dense(x_BTD, self.wv_DKH[...], get(self.bv_KH))
        if self.smear_K is not None:
            k_BSKH = smear(k_BSKH, self.smear_K[...], starts(positions_bT, segments_bT))
        if self.q_scale_H is not None:
            q_BTNH, k_BSKH = rms(q_BTNH, self.q_scale_H[...], self.eps), rms(k_BSKH, self.k_scale_H[...], self.eps)
        if self.theta is not None:
            q_BTNH, k_BSKH = (rope(x, positions_bT, self.theta) for x in (q_BTNH, k_BSKH))
        kv = (k_BSKH, v_BSKH)
        N, K = len(self.heads), len(self.kv_heads)
        if self.kv_of_head != tuple(n * K // N for n in range(N)) or N % K:
            kv = tuple(x[:, :, jnp.array(self.kv_of_head)] for x in kv)  # groups of unequal size
        z_BTNH, pattern_BNTS = attend(
            q_BTNH, *kv, positions_bT, segments_bT, window=self.window, sink_N=get(self.sink_N),
            implementation=implementation, batch_shards=batch_shards, need_pattern="pattern" in capture,
            edit=self._pattern_edit(interventions, layer),
        )  # fmt: skip
        z_BTNH = self._edit_z(z_BTNH, interventions, layer)
        B, T = x_BTD.shape[:2]
        out_BTD = dense(z_BTNH.reshape(B, T, -1), self.wo_NHD[...].reshape(-1, x_BTD.shape[-1]), get(self.bo_D))
        found = {
            "pattern": (pattern_BNTS, 1, self.heads, self.num_heads), "z": (z_BTNH, 2, self.heads, self.num_heads),
            "q": (q_BTNH, 2, self.heads, self.num_heads), "k": (k_BSKH, 2, self.kv_heads, self.num_kv_heads),
            "v": (v_BSKH, 2, self.kv_heads, self.num_kv_heads),
        }  # fmt: skip
        return out_BTD, {name: _on_original_heads(*found[name]) for name in capture if name in found}

    def _pattern_edit(self, iv, layer):
        if iv is None or not iv.touches_pattern:
            return None
        heads = jnp.array(self.heads)

        def edit(pattern_BNTS):
            if iv.mix_LNN is not None:
                mix_NM = iv.mix_LNN[layer][heads][:, heads].astype(pattern_BNTS.dtype)
                pattern_BNTS = jnp.einsum("NM,BMTS->BNTS", mix_NM, pattern_BNTS, precision="highest")
            if iv.force_LN is not None:
                force_N11 = iv.force_LN[layer][heads][:, None, None]
                forced_BNTS = iv.pattern_LBNTS[layer][:, heads].astype(pattern_BNTS.dtype)
                pattern_BNTS = jnp.where(force_N11, forced_BNTS, pattern_BNTS)
            return pattern_BNTS

        return edit

    def _edit_z(self, z_BTNH, iv, layer):
        heads = jnp.array(self.heads)
        if iv is not None and iv.replace_LN is not None:
            value_BTNH = iv.value_LBTNH[layer][:, :, heads].astype(z_BTNH.dtype)
            z_BTNH = jnp.where(iv.replace_LN[layer][heads][:, None], value_BTNH, z_BTNH)
        if iv is not None and iv.gate_LN is not None:
            z_BTNH = z_BTNH * iv.gate_LN[..., layer, :][..., heads, None].astype(z_BTNH.dtype)
        return z_BTNH


def starts(positions_bT, segments_bT):
    """Where a document starts, bool [b, T]: there is no token before it to smear into its key."""
    first_bT = jnp.broadcast_to(jnp.arange(positions_bT.shape[1]) == 0, positions_bT.shape)
    if segments_bT is not None:
        first_bT = first_bT | jnp.pad(segments_bT[:, 1:] != segments_bT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return first_bT


def _on_original_heads(x, axis, heads, num):
    """x with its head axis widened to the original heads, NaN where a head is gone."""
    if len(heads) == num:
        return x
    shape = list(x.shape)
    shape[axis] = num
    index = (slice(None),) * axis + (jnp.array(heads),)
    return jnp.full(shape, jnp.nan, x.dtype).at[index].set(x)
