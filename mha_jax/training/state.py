"""What training carries from step to step: a plain nested dict, born sharded."""
import functools

import jax
import jax.numpy as jnp
from flax import serialization

from mha_jax.config import Config
from mha_jax.model import transformer
from mha_jax.training import optimizer, sharding


def init_state(config: Config, seed) -> dict:
    """{'params', 'optimizer', 'step', 'failed_at'}: a pure function of the seed, which may be traced.

    step counts updates made; failed_at is the first step whose loss or gradient was not finite, else -1.
    """
    params = transformer.init_params(config.model, seed)
    moments = optimizer.make(config.optimizer, config.steps).init(params)
    return {
        "params": params,
        # A plain dict instead of optax's named tuples: it saves, restores and shards by the same paths anywhere.
        "optimizer": serialization.to_state_dict(moments),
        "step": jnp.int32(0),
        "failed_at": jnp.int32(-1),
    }


def decayed_names(config: Config) -> list[str]:
    """Names of the parameters that weight decay touches, each once."""
    params = jax.eval_shape(functools.partial(transformer.init_params, config.model), 0)
    flags = jax.tree_util.tree_leaves_with_path(optimizer.decay_mask(params))
    return sorted({sharding.path_name(path).rpartition("/")[2] for path, decayed in flags if decayed})


def abstract_state(config: Config, mesh) -> dict:
    """Shapes, dtypes and shardings of the state, without making it."""
    shapes = jax.eval_shape(functools.partial(init_state, config), 0)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, sharding.shardings(shapes, mesh)
    )


def sharded_init(config: Config, mesh) -> dict:
    """The state at step 0, every array made where it will lie."""
    out = jax.tree.map(lambda x: x.sharding, abstract_state(config, mesh))
    return jax.jit(functools.partial(init_state, config), out_shardings=out)(config.seed)
