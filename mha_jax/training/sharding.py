"""Devices, the mesh and where every array lies on it: one table, matched by name."""
import os
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mha_jax.config import Config, ConfigError
from mha_jax.training import hosts
from mha_jax.validation import check_devices

KV = "kv"  # in the table: `tensor` where K divides by it, else replicated

# Parameter name (the last part of its path) -> axes. Optimizer moments carry the same names.
RULES = (
    (r"embed_VD|positions_PD", P(None, "fsdp")),
    (r"unembed_DV", P("fsdp", None)),
    (r"wq_DNH", P("fsdp", "tensor", None)),
    (r"w[kv]_DKH", P("fsdp", KV, None)),
    (r"wo_NHD", P("tensor", None, "fsdp")),
    (r"w_(gate|up)_DF", P("fsdp", "tensor")),
    (r"w_down_FD", P("tensor", "fsdp")),
    (r"bq_NH", P("tensor", None)),
    (r"b[kv]_KH", P(KV, None)),
    (r"sink_N|b_up_F", P("tensor")),
    (r"smear_K", P(KV)),
    (r"(scale|bias|bo|b_down)_D|[qk]_scale_H", P()),
    (r"count|step|failed_at", P()),
)


def use_cpu_devices(config: Config):
    """One virtual CPU device per core, batch over them: small models train nearly twice as fast.

    Must come before JAX starts; a count the user set through XLA_FLAGS or JAX_NUM_CPU_DEVICES stands. A mesh
    that names its sizes gets what it names; else the largest number of cores by which the rows divide.
    """
    asked = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if asked or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jax.config.update("jax_num_cpu_devices", cpu_devices(config, cores, hosts.expected()))


def cpu_devices(config: Config, cores: int, processes: int = 1) -> int:
    """How many virtual devices `use_cpu_devices` makes on `cores` cores, in each of `processes`."""
    mesh = config.mesh
    if mesh.data:
        return max(1, mesh.data * mesh.fsdp * mesh.tensor // processes)
    rows = (config.data.batch_size // config.optimizer.accumulation, config.data.eval_rows, config.probes.rows,
            config.probes.repeats)  # fmt: skip
    fits = [d for d in range(1, cores + 1) if all(r % (d * processes * mesh.fsdp) == 0 for r in rows)]
    return max(fits, default=1) * mesh.fsdp * mesh.tensor


def make_mesh(config: Config) -> Mesh:
    """The mesh of (data, fsdp, tensor) over all devices. ConfigError when it does not fit them, or no such platform."""
    platform = config.mesh.platform
    devices = jax.devices()
    if platform not in ("auto", devices[0].platform):
        raise ConfigError(f"config.mesh.platform = {platform!r}: this machine's devices are {devices[0].platform!r}; "
                          f"allowed are auto, {devices[0].platform}")  # fmt: skip
    sizes = check_devices(config, len(devices))
    for key, size in (("d_model", config.model.d_model), ("d_mlp", config.model.d_mlp)):
        axis = "fsdp" if key == "d_model" else "tensor"
        by = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))[axis]
        if size is not None and size % by:
            raise ConfigError(f"config.model.{key} = {size} does not divide by config.mesh.{axis} = {by}")
    # Explicit axes, jax.make_mesh's default, refuse the reshape N -> (K, G) for some K: Auto by name.
    return jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def evaluation_mesh(config: Config) -> Mesh:
    """The run's own mesh where its sizes fit this machine, else as many devices as divide the probes' rows."""
    try:
        return make_mesh(config)
    except ConfigError:
        rows = (config.data.eval_rows, config.probes.rows, config.probes.repeats)
        count = max(d for d in range(1, jax.device_count() + 1) if all(r % d == 0 for r in rows))
        return Mesh(np.array(jax.devices()[:count]).reshape(count, 1, 1), ("data", "fsdp", "tensor"),
                    axis_types=(AxisType.Auto,) * 3)  # fmt: skip


def path_name(path) -> str:
    """'layers/layer_00/attention/wq_DNH' of a jax key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def shardings(abstract, mesh: Mesh):
    """NamedSharding of every leaf of a tree of parameters or optimizer state. ValueError unless one rule matches."""

    def of_leaf(path, leaf):
        name = path_name(path)
        found = [spec for pattern, spec in RULES if re.fullmatch(pattern, name.rpartition("/")[2])]
        if len(found) != 1:
            raise ValueError(f"{name}: {len(found)} sharding rules match it, allowed is exactly 1")
        axes = ["tensor" if a == KV and dim % mesh.shape["tensor"] == 0 else None if a == KV else a
                for a, dim in zip(found[0], leaf.shape, strict=False)]  # fmt: skip
        return NamedSharding(mesh, P(*axes))

    return jax.tree_util.tree_map_with_path(of_leaf, abstract)
