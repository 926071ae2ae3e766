"""What can be done to heads during a forward pass, as arrays; None does nothing and costs nothing.

Every field speaks of the original N query heads, whatever K is and whichever heads have been removed. The
identity value of each field leaves the logits bit-equal to no intervention at all.
"""
import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Interventions:
    """Arrays that change what heads do.

    gate_LN      z times a gate; also [B, T, L, N], a gate of its own for every token. The value bias goes with z.
    replace_LN   bool: take z from value_LBTNH (mean and resample ablation)
    force_LN     bool: take the pattern from pattern_LBNTS (frozen, uniform or clamped patterns)
    mix_LNN      pattern of head n becomes sum over m of mix[l, n, m] times pattern m (identity: eye)
    """

    gate_LN: jax.Array | None = None
    replace_LN: jax.Array | None = None
    value_LBTNH: jax.Array | None = None
    force_LN: jax.Array | None = None
    pattern_LBNTS: jax.Array | None = None
    mix_LNN: jax.Array | None = None

    def __post_init__(self):
        if (self.replace_LN is None) != (self.value_LBTNH is None):
            raise ValueError("replace_LN and value_LBTNH are given together")
        if (self.force_LN is None) != (self.pattern_LBNTS is None):
            raise ValueError("force_LN and pattern_LBNTS are given together")

    @property
    def touches_pattern(self) -> bool:
        """Whether the pattern itself is needed, so that only the `einsum` implementation will do."""
        return self.force_LN is not None or self.mix_LNN is not None

    def check(self, num_layers: int, num_heads: int):
        """ValueError unless layers and heads are the model's own: indexing clamps and broadcasts, and would then
        change other heads than was asked. None below is an axis of the batch or of the head width."""
        L, N = num_layers, num_heads
        wanted = {
            "gate_LN": (L, N), "replace_LN": (L, N), "value_LBTNH": (L, None, None, N, None),
            "force_LN": (L, N), "pattern_LBNTS": (L, None, N, None, None), "mix_LNN": (L, N, N),
        }  # fmt: skip
        if self.gate_LN is not None and self.gate_LN.ndim == 4:
            wanted["gate_LN"] = (None, None, L, N)
        for name, want in wanted.items():
            value = getattr(self, name)
            if value is None:
                continue
            fits = value.ndim == len(want) and all(w in (None, n) for w, n in zip(want, value.shape, strict=True))
            if not fits:
                raise ValueError(f"{name} has shape {value.shape}, the model has (layers, heads) = {(L, N)}")


def ablate(num_layers: int, num_heads: int, heads) -> Interventions:
    """Zero ablation of the (layer, head) pairs in `heads`; IndexError for a head that does not exist."""
    gate_LN = jnp.ones((num_layers, num_heads))
    for layer, head in heads:
        if not (0 <= layer < num_layers and 0 <= head < num_heads):
            raise IndexError(f"head {layer}.{head}: layers are 0..{num_layers - 1}, heads 0..{num_heads - 1}")
        gate_LN = gate_LN.at[layer, head].set(0.0)
    return Interventions(gate_LN=gate_LN)
