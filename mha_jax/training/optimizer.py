"""AdamW with warm-up and decay; weight decay on matrices alone, by name."""
import re

import jax
import jax.numpy as jnp
import optax

from mha_jax.config import OptimizerConfig
from mha_jax.training.sharding import path_name

DECAYED = r"embed_VD|unembed_DV|wq_DNH|w[kv]_DKH|wo_NHD|w_(gate|up)_DF|w_down_FD"


def learning_rate(cfg: OptimizerConfig, steps: int):
    """step -> rate of the update that makes parameters step + 1; `steps` includes the warm-up.

    Linear from 0 to the peak over warmup_steps, then a cosine (or nothing) to end_learning_rate at `steps`.
    """
    warm = max(cfg.warmup_steps, 1)

    def rate(step):
        rising = cfg.learning_rate * step / warm
        if cfg.schedule == "constant":
            falling = cfg.learning_rate
        else:
            share = jnp.clip((step - cfg.warmup_steps) / max(steps - cfg.warmup_steps, 1), 0.0, 1.0)
            depth = 0.5 * (1 + jnp.cos(jnp.pi * share))
            falling = cfg.end_learning_rate + (cfg.learning_rate - cfg.end_learning_rate) * depth
        return jnp.where(step < cfg.warmup_steps, rising, falling)

    return rate


def decay_mask(params):
    """True for every parameter that weight decay touches: kernels and embeddings.

    By name and not by rank: per-head biases and position tables have two axes too.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: re.fullmatch(DECAYED, path_name(path).rpartition("/")[2]) is not None, params
    )


def make(cfg: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW (Loshchilov and Hutter 2019)."""
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(
            learning_rate(cfg, steps), cfg.b1, cfg.b2, cfg.eps, weight_decay=cfg.weight_decay, mask=decay_mask
        ),
    )
