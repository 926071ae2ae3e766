"""Interventions during training: named heads silenced, or told where to look, from one step to another.

They are data: the step is traced, so one program serves every step. Outside [start, end) the arrays are the
identity, and loss and gradients are those of free training. Probes and evaluations see the free model.
"""
import jax.numpy as jnp
import numpy as np

from mha_jax.config import ConfigError
from mha_jax.model.attention import mask, starts
from mha_jax.model.interventions import Interventions
from mha_jax.model.surgery import already_gone, parse_heads
from mha_jax.probes.induction import prefix_targets


def make(section, model_cfg):
    """The function (step, tokens_BT, positions_bT=None, segments_BT=None) -> Interventions, or None of no heads.

    section: `config.interventions`, with heads '1.0,1.3' (none: ''), kind, and the steps [start, end), an end of
    None being the last. kind:
      zero            z times 0: the head writes nothing (Michel et al. 2019)
      previous_token  the pattern A[t, t - 1] = 1
      induction       the pattern spread equally over the tokens that followed earlier copies of the query's
    The patterns keep to the document and the window; a query without such a key looks at itself. A head that is
    told so gives its query and key weights no gradient; its values and outputs train (clamping, after Singh et al.
    2024, arXiv 2404.07129). For that the whole run forms the patterns: `auto` takes `einsum` at any length.
    ConfigError for heads that do not exist or are gone, and for settings that would be ignored.
    """
    key = "config.interventions"
    if not section.heads:
        if section != type(section)():
            raise ConfigError(f"{key}.heads = '': names no head, but other keys of {key} are set; name heads, as in "
                              "0.1,1.3, or leave them all")  # fmt: skip
        return lambda *_: None
    shape = (model_cfg.num_layers, model_cfg.num_heads)
    heads = parse_heads(section.heads, *shape, key=f"{key}.heads")
    gone = already_gone(model_cfg, heads)
    if gone:
        raise ConfigError(f"{key}.heads = {section.heads!r}: {gone[0][0]}.{gone[0][1]} was removed from this model")
    if section.kind != "zero" and model_cfg.attention not in ("auto", "einsum"):
        raise ConfigError(f"{key}.kind = {section.kind!r}: config.model.attention = {model_cfg.attention!r} never "
                          "forms the pattern; allowed are auto, einsum")  # fmt: skip
    named_LN = np.zeros(shape, bool)
    named_LN[tuple(zip(*heads, strict=True))] = True

    def clamp(step, tokens_BT, positions_bT=None, segments_BT=None):
        active = step >= section.start
        if section.end is not None:
            active &= step < section.end
        now_LN = jnp.asarray(active) & named_LN
        if section.kind == "zero":
            return Interventions(gate_LN=jnp.where(now_LN, 0.0, 1.0))
        T = tokens_BT.shape[1]
        positions_bT = jnp.arange(T)[None] if positions_bT is None else positions_bT
        pattern_BTS = wanted_pattern(section.kind, tokens_BT, positions_bT, segments_BT, model_cfg.window)
        pattern_LBNTS = jnp.broadcast_to(pattern_BTS[None, :, None], (shape[0], len(tokens_BT), shape[1], T, T))
        return Interventions(force_LN=now_LN, pattern_LBNTS=pattern_LBNTS)

    return clamp


def wanted_pattern(kind, tokens_BT, positions_bT, segments_BT=None, window=None):
    """float32 [B, T, S]: the perfect head of this kind. Padding sees nothing, as without it."""
    T = tokens_BT.shape[1]
    seen_BTS = jnp.broadcast_to(mask(positions_bT, positions_bT, segments_BT, segments_BT, window),
                                (len(tokens_BT), T, T))  # fmt: skip
    if kind == "previous_token":
        wanted_BTS = seen_BTS & np.eye(T, k=-1, dtype=bool)
    else:
        # The first token of a document follows nothing in it: the copy before it would be another document's.
        wanted_BTS = seen_BTS & prefix_targets(tokens_BT) & ~starts(positions_bT, segments_BT)[:, None]
    wanted_BTS = jnp.where(wanted_BTS.any(-1, keepdims=True), wanted_BTS, seen_BTS & np.eye(T, dtype=bool))
    return wanted_BTS / jnp.maximum(wanted_BTS.sum(-1, keepdims=True), 1).astype(jnp.float32)
