"""Heads physically gone: smaller arrays that compute the same function as the whole model with those heads cut off.

A head is (layer, number), always the number it had in the whole model. A KV head goes with the last of its query
heads; groups may become unequal; a layer that loses all its heads keeps only its output bias.
"""
import dataclasses
import re

import numpy as np
from flax import traverse_util

from mha_jax.config import ConfigError, ModelConfig, kept_heads
from mha_jax.model.transformer import layer_key

HEAD = re.compile(r"L(-?[0-9]+)H(-?[0-9]+)|(-?[0-9]+)\.(-?[0-9]+)", re.IGNORECASE)


def parse_heads(text: str, num_layers: int, num_heads: int, key: str = "--heads") -> list[tuple[int, int]]:
    """[(layer, head), ...] of '0.1,1.3' or 'L0H1,L1H3', in the order given.

    ConfigError naming `key` and what exists, for what is no head, does not exist, or is named twice.
    """
    found = []
    for word in (word.strip() for word in text.split(",")):
        match = HEAD.fullmatch(word)
        if match is None:
            raise _wrong(key, text, f"{word!r} is no head", num_layers, num_heads)
        head = tuple(int(n) for n in match.groups() if n is not None)
        if head in found:
            raise _wrong(key, text, f"{word!r} is named twice", num_layers, num_heads)
        found.append(head)
    check_heads(found, num_layers, num_heads, key)
    return found


def check_heads(heads, num_layers: int, num_heads: int, key: str = "heads"):
    """ConfigError naming `key` and what exists, for a (layer, head) that the whole model does not have."""
    for layer, head in heads:
        if not (0 <= layer < num_layers and 0 <= head < num_heads):
            named = ",".join(f"{i}.{n}" for i, n in heads)
            raise _wrong(key, named, f"'{layer}.{head}' does not exist", num_layers, num_heads)


def _wrong(key, text, what, num_layers, num_heads) -> ConfigError:
    return ConfigError(f"{key} = {text!r}: {what}; allowed are different heads written 0.1 or L0H1, layers 0 to "
                       f"{num_layers - 1}, heads 0 to {num_heads - 1}")  # fmt: skip


def already_gone(cfg: ModelConfig, heads) -> list[tuple[int, int]]:
    """Those of `heads` that were removed before: removing them again does nothing, which the caller says.

    ConfigError for a head that never existed.
    """
    check_heads(heads, cfg.num_layers, cfg.num_heads)
    return [(layer, head) for layer, head in heads if head not in kept_heads(cfg)[layer]]


def remove_heads(tree: dict, cfg: ModelConfig, heads) -> tuple[dict, ModelConfig]:
    """(tree, cfg) without the (layer, head) pairs in `heads`; those that are gone already change nothing.

    tree: nested dict with the parameters of `cfg` anywhere in it: `transformer.init_params`, a moment of the
    optimizer, or a whole training state, all of whose parts are then cut alike. The names say which axis is
    cut: N query heads, K KV heads. The new config lists the heads that remain by their original numbers.
    ConfigError for a head that never existed, ValueError for a tree that is not of `cfg`.
    """
    check_heads(heads, cfg.num_layers, cfg.num_heads)
    group, gone = cfg.num_heads // cfg.num_kv_heads, set(heads)
    old = kept_heads(cfg)
    new = tuple(tuple(n for n in kept if (layer, n) not in gone) for layer, kept in enumerate(old))
    layer_of = {layer_key(i): i for i in range(cfg.num_layers)}
    out = {}
    for path, x in traverse_util.flatten_dict(tree, keep_empty_nodes=True).items():
        if path[-2:-1] == ("attention",):
            name, layer = path[-1], layer_of[path[-3]]
            if not new[layer] and name != "bo_D":
                continue  # a dict that loses its last array goes too, as in a model made without the heads
            x = _take(x, name, old[layer], new[layer], group)
        out[path] = x
    return traverse_util.unflatten_dict(out), dataclasses.replace(cfg, kept_heads=new)


def _take(x, name, old, new, group):
    """The part of one array of an attention layer that belongs to the heads `new` among `old`."""
    letters = name.rpartition("_")[2]
    for letter, size in (("N", 1), ("K", group)):
        if letter in letters:
            axis = letters.index(letter)
            before, after = (sorted({n // size for n in heads}) for heads in (old, new))
            if x.shape[axis] != len(before):
                raise ValueError(f"{name} has shape {x.shape}, the config has {len(before)} heads on axis {axis}")
            x = x.take(np.array([before.index(n) for n in after]), axis=axis)
    return x


def kv_cache_bytes(cfg: ModelConfig, length: int, bytes_per_value: int) -> int:
    """Bytes of the keys and values that decoding one sequence of `length` tokens must hold.

    2 K H values a token and layer, K the KV heads that remain (Shazeer 2019, section 3); with a window, of the
    tokens that the next query still sees.
    """
    group = cfg.num_heads // cfg.num_kv_heads
    tokens = length if cfg.window is None else min(length, cfg.window)
    kv_heads = sum(len({n // group for n in heads}) for heads in kept_heads(cfg))
    return 2 * kv_heads * cfg.head_dim * tokens * bytes_per_value
