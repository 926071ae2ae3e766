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


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """The rows of a batch of `rows` that this process's devices hold, ascending."""
    where = batch_sharding(mesh).addressable_devices_indices_map((rows,))
    return np.unique(np.concatenate([np.arange(rows)[index] for index in where.values()]))


def put_local(mesh: Mesh, local: np.ndarray, at: np.ndarray, rows: int) -> jax.Array:
    """[n, rows, ...] on the mesh from the rows `at` alone, [n, len(at), ...]: those of `local_rows`."""

    def of_device(index):
        first, stop, _ = index[1].indices(rows)
        return local[:, np.searchsorted(at, first) : np.searchsorted(at, stop)]

    return jax.make_array_from_callback((len(local), rows, *local.shape[2:]), batch_sharding(mesh, 1), of_device)
