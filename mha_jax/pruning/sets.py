"""Which heads are ablated together, by name, and the random sets they are compared with. Host code.

A set is a tuple of (layer, query head) by the original numbers.
"""
import dataclasses
import itertools
import math

import numpy as np

from mha_jax.probes.panel import head_name
from mha_jax.probes.subject import Subject

CONTROLS = 200  # random sets a named set is compared with: all there are up to this number


@dataclasses.dataclass(frozen=True)
class Named:
    """A set and what it is: kind is head, group, layer, only (one head left in its layer) or named."""

    name: str
    kind: str
    heads: tuple[tuple[int, int], ...]


def single_heads(subject: Subject) -> list[Named]:
    """Every query head alone."""
    return [Named(head_name(*head), "head", (head,)) for head in subject.heads]


def groups(subject: Subject) -> list[Named]:
    """Every KV head with all query heads that read it, where that is more than one."""
    found = by_group(subject) if subject.group > 1 else {}
    return [Named(f"L{layer}K{k}", "group", heads) for (layer, k), heads in found.items()]


def layers(subject: Subject) -> list[Named]:
    """All heads of each layer."""
    return [Named(f"layer {layer}", "layer", tuple(heads)) for layer, heads in by_layer(subject.heads).items()]


def all_but_one(subject: Subject) -> list[Named]:
    """All heads of a layer but one (Michel et al. 2019, table 2), where a layer has several."""
    return [
        Named(f"only {head_name(*head)}", "only", tuple(h for h in heads if h != head))
        for heads in by_layer(subject.heads).values() if len(heads) > 1 for head in heads
    ]  # fmt: skip


def by_group(subject: Subject) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """{(layer, KV head): the query heads that read it}, of those that exist."""
    found = {}
    for layer, head in subject.heads:
        found.setdefault((layer, head // subject.group), []).append((layer, head))
    return {key: tuple(heads) for key, heads in found.items()}


def by_layer(heads) -> dict[int, list[tuple[int, int]]]:
    """Heads of each layer, layers ascending."""
    found = {}
    for layer, head in sorted(heads):
        found.setdefault(layer, []).append((layer, head))
    return found


def mask(subject: Subject, sets) -> np.ndarray:
    """bool [S, L, N] of sets of heads. ValueError for a head that is not in the model: taking away one that has gone
    changes nothing, and a number below 0 would mean another head."""
    present = set(subject.heads)
    out_SLN = np.zeros((len(sets), subject.cfg.num_layers, subject.cfg.num_heads), bool)
    for i, heads in enumerate(sets):
        for head in heads:
            if head not in present:
                raise ValueError(f"head {head} is not in this model")
            out_SLN[i, *head] = True
    return out_SLN


def controls(subject: Subject, heads, never, seed: int, most: int = CONTROLS):
    """(random sets with as many heads in each layer as `heads`, None) or ([], why there are none).

    They hold no head of `heads` and none of `never` (the induction heads). All such sets where there are no more than
    `most`, else `most` different ones.
    """
    choices, count = [], 1
    for layer, chosen in by_layer(heads).items():
        spare = [h for h in subject.heads if h[0] == layer and h not in heads and h not in never]
        if len(spare) < len(chosen):
            return [], f"layer {layer} has {len(spare)} spare head(s), the set takes {len(chosen)}"
        choices.append((spare, len(chosen)))
        count *= math.comb(len(spare), len(chosen))
    if count <= most:
        parts = [list(itertools.combinations(spare, n)) for spare, n in choices]
        return [tuple(itertools.chain(*picked)) for picked in itertools.product(*parts)], None
    rng, found = np.random.default_rng(seed), set()
    while len(found) < most:
        picked = [sorted(rng.choice(len(spare), n, replace=False)) for spare, n in choices]
        found.add(tuple(spare[i] for (spare, _), index in zip(choices, picked, strict=True) for i in index))
    return sorted(found), None
