"""Cut one edge: head e's result is taken from the query, key or value input of a later head l, and from nothing else.

The causal form of the composition scores (Elhage et al. 2021): a K-composition score says that head l's keys *could*
read head e; this says what happens when they do not. Everything between the two heads stays as it was, and what head l
then writes goes on downstream live. Under GQA head l alone gets the keys or values without e: the other heads of its
group keep theirs.
"""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.config import kept_heads
from mha_jax.model import attention, transformer
from mha_jax.model.interventions import Interventions
from mha_jax.probes import icl, induction
from mha_jax.probes.subject import Subject

INPUTS = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class Edge:
    """From head `source` to the `into` input of head `target`; both (layer, query head), source in a lower layer."""

    source: tuple[int, int]
    target: tuple[int, int]
    into: str


def between(heads, targets) -> list[Edge]:
    """Every edge from a lower head of `heads` into one of `targets`."""
    return [Edge(e, t, into) for t in targets for e in heads if e[0] < t[0] for into in INPUTS]


@functools.partial(jax.jit, static_argnums=0)
def _whole(graph, params, inputs_BT):
    _, aux, _ = transformer.forward(graph, params, inputs_BT, capture=("resid", "z", "q", "k", "v"))
    return aux.resid_MBTD, jax.tree.map(lambda x: jnp.nan_to_num(x, nan=0.0), (aux.z_LBTNH, aux.q_LBTNH, aux.k_LBSKH,
                                                                             aux.v_LBSKH))  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _cut(graph, num_layers, layer, group, window, params, tokens_BU, resid_BTD, qkv, result_BTD, head, sink, into_3):
    """(loss_BT, the cut head's pattern_BTS). head: its number, traced; sink: its logit or None; into_3: which inputs
    lose `result_BTD`."""
    inputs_BT = tokens_BU[:, :-1]
    at = functools.partial(transformer.forward, graph, params, inputs_BT, start=layer)
    # Layer by layer a forward entered with another residual stream says what its projections would be, with rotation,
    # smearing and normalisation as the model has them.
    aux = at(x_BTD=resid_BTD - result_BTD, capture=("q", "k", "v"))[1]
    cut = aux.q_LBTNH[0], aux.k_LBSKH[0], aux.v_LBSKH[0]
    q_BTH, k_BSH, v_BSH = (
        jnp.where(into_3[i], cut[i], qkv[i])[:, :, head if i == 0 else head // group] for i in range(3)
    )
    positions_bT = jnp.arange(inputs_BT.shape[1])[None]
    z_BTNH, pattern_BNTS = attention.attend(
        q_BTH[:, :, None], k_BSH[:, :, None], v_BSH[:, :, None], positions_bT, None, window=window, sink_N=sink,
        need_pattern=True,
    )  # fmt: skip
    (B, T, N, H), L = qkv[0].shape, num_layers
    replace_LN = jnp.zeros((L, N), bool).at[layer, head].set(True)
    value_LBTNH = jnp.broadcast_to(z_BTNH, (L, B, T, N, H))
    logits_BTV, _, _ = at(x_BTD=resid_BTD, interventions=Interventions(replace_LN=replace_LN, value_LBTNH=value_LBTNH))
    return icl.token_loss(logits_BTV, tokens_BU[:, 1:]), pattern_BNTS[:, 0]


def _place(cfg, layer: int, head: int) -> int:
    """Where a head stands among those that remain in its layer."""
    return kept_heads(cfg)[layer].index(head)


@dataclasses.dataclass(frozen=True)
class Cuts:
    """For every edge E: loss_ERT in nats with it cut, and the target's prefix matching on Q repeat lengths without and
    with the cut."""

    whole_RT: np.ndarray
    loss_ERT: np.ndarray
    whole_EQ: np.ndarray
    prefix_EQ: np.ndarray


def cut_edges(subject: Subject, tokens_RU, edges: list[Edge], repeats_QRT, progress=lambda done: None) -> Cuts:
    """Cuts each edge alone. tokens_RU: rows of U = T + 1 tokens. ValueError for an edge that does not go upwards, into
    no input there is, or between heads that do not exist."""
    for edge in edges:
        for head in (edge.source, edge.target):
            if head not in subject.heads:
                raise ValueError(f"{edge}: head {head} is not in this model")
        if edge.source[0] >= edge.target[0]:
            raise ValueError(f"{edge}: the source must lie in a lower layer than the target")
        if edge.into not in INPUTS:
            raise ValueError(f"{edge}: into {edge.into!r}: allowed are {', '.join(INPUTS)}")
    loss_ERT = np.empty((len(edges), len(tokens_RU), tokens_RU.shape[1] - 1), np.float32)
    whole_RT = np.empty(loss_ERT.shape[1:], np.float32)
    for rows in subject.chunks(len(tokens_RU)):
        whole_RT[rows], loss_ERT[:, rows] = (x for x in _each(subject, tokens_RU[rows], edges, progress)[:2])
    # A last token that nothing reads makes rows of T tokens into rows of T + 1, of which patterns see T.
    padded = [np.pad(tokens, ((0, 0), (0, 1))) for tokens in repeats_QRT]
    found = [_each(subject, tokens, edges, progress)[2:] for tokens in padded]
    return Cuts(whole_RT, loss_ERT, *(np.stack([f[i] for f in found], axis=1) for i in range(2)))


def _each(subject: Subject, tokens_BU, edges: list[Edge], progress):
    """(loss_BT of the whole model, loss_EBT, prefix matching of each target without the cut and with it [E])."""
    graph, cfg, params, tokens_BU = subject.graph, subject.cfg, subject.params, subject.place(tokens_BU)
    targets_BTS = induction.prefix_targets(tokens_BU[:, :-1])
    losses, before, after = [], [], []
    with jax.default_matmul_precision("highest"):
        resid_MBTD, (z_LBTNH, *qkv) = _whole(graph, params, tokens_BU[:, :-1])
        whole = {}

        def run(target, result_BTD, into):
            layer, head = target
            sink_N = params["layers"][transformer.layer_key(layer)]["attention"].get("sink_N")
            sink = None if sink_N is None else sink_N[_place(cfg, layer, head)][None]
            loss_BT, pattern_BTS = _cut(
                graph, cfg.num_layers, layer, subject.group, cfg.window, params, tokens_BU, resid_MBTD[layer],
                [x[layer] for x in qkv],
                result_BTD, head, sink, jnp.array([into == name for name in INPUTS]))  # fmt: skip
            score = induction.target_mass(pattern_BTS[None, :, None], targets_BTS)[0, 0]
            return np.asarray(loss_BT), float(score)

        for edge in edges:
            layer, head = edge.source
            wo_NHD = params["layers"][transformer.layer_key(layer)]["attention"]["wo_NHD"]
            result_BTD = z_LBTNH[layer][:, :, head] @ wo_NHD[_place(cfg, layer, head)]
            if edge.target not in whole:
                whole[edge.target] = run(edge.target, jnp.zeros_like(result_BTD), None)
            loss_BT, score = run(edge.target, result_BTD, edge.into)
            losses.append(loss_BT)
            before.append(whole[edge.target][1])
            after.append(score)
            progress(len(tokens_BU))
    return next(iter(whole.values()))[0], np.stack(losses), np.array(before), np.array(after)
