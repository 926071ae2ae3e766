"""How arrays lie on a mesh of axes (data, fsdp, tensor): batches over data and fsdp together, the rest whole."""
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH = ("data", "fsdp")  # the axes that cut the batch


def replicated(mesh: Mesh) -> NamedSharding:
    """On every device whole."""
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Of an array whose batch axis follows `leading` others."""
    return NamedSharding(mesh, P(*(None,) * leading, BATCH))


def residual_sharding(mesh: Mesh) -> NamedSharding:
    """Of x_BTD."""
    return NamedSharding(mesh, P(BATCH, None, None))


def put_rows(mesh: Mesh, rows: np.ndarray, leading: int = 0) -> jax.Array:
    """A host array onto the mesh, each process placing only the rows its devices hold."""
    return jax.make_array_from_callback(rows.shape, batch_sharding(mesh, leading), lambda index: rows[index])
