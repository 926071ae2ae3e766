"""The model under study: its parameters on a mesh, and the forward pass that all analyses use."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mha_jax.config import ModelConfig, kept_heads
from mha_jax.layout import BATCH, put_rows, replicated, residual_sharding
from mha_jax.model import transformer

ROWS = 32  # rows looked at together: what a laptop's memory holds of patterns of every head


@functools.partial(jax.jit, static_argnums=0, static_argnames=("capture", "start"))
def _forward(graph, params, tokens_BT, **kwargs):
    return transformer.forward(graph, params, tokens_BT, **kwargs)[:2]


@dataclasses.dataclass(frozen=True)
class Subject:
    """cfg: the run's model, here always in float32 at the highest matrix precision, like the panel."""

    cfg: ModelConfig
    params: dict
    mesh: Mesh

    @functools.cached_property
    def graph(self):
        """The static half of the model."""
        return transformer.graphdef(dataclasses.replace(self.cfg, dtype="float32", attention="auto"))

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of every head that exists, by the original numbers."""
        return [(layer, head) for layer, heads in enumerate(kept_heads(self.cfg)) for head in heads]

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.cfg.num_heads // self.cfg.num_kv_heads

    def forward(self, tokens_BT, capture=(), interventions=None, start=0, x_BTD=None):
        """(logits_BTV, Aux) as `Transformer.__call__` says. tokens_BT int, or [T] for one row.

        ValueError for a token outside the vocabulary: the embedding would clamp it.
        """
        tokens_BT = np.atleast_2d(tokens_BT)
        low, high = int(tokens_BT.min()), int(tokens_BT.max())
        if low < 0 or high >= self.cfg.vocab_size:
            raise ValueError(f"tokens from {low} to {high}: the model's vocabulary is 0 to {self.cfg.vocab_size - 1}")
        with jax.default_matmul_precision("highest"):
            return _forward(self.graph, self.params, jnp.asarray(tokens_BT), capture=tuple(capture),
                            interventions=interventions, start=start, x_BTD=x_BTD)  # fmt: skip

    @property
    def shards(self) -> int:
        """Into how many parts the mesh cuts a batch."""
        return int(np.prod([self.mesh.shape[axis] for axis in BATCH]))

    def chunks(self, rows: int) -> list[slice]:
        """Slices of `rows` rows small enough for memory; all but the last divide over the devices."""
        size = self.shards * max(1, ROWS // self.shards)
        return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]

    def place(self, rows: np.ndarray) -> jax.Array:
        """Rows of one chunk onto the devices; a chunk that does not divide over them lies on each whole."""
        rows = np.asarray(rows)
        if len(rows) % self.shards:
            return jax.device_put(rows, replicated(self.mesh))
        return put_rows(self.mesh, rows)

    def residual_sharding(self, rows: int):
        """How the residual stream of a chunk of so many rows lies; None where they do not divide over the devices."""
        return None if rows % self.shards else residual_sharding(self.mesh)
