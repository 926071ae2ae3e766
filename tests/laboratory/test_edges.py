"""The table of edges: which pairs it has, and one edge of each input against NumPy."""
import dataclasses

import jax
import numpy as np
import pytest

from mha_jax.laboratory import edges
from mha_jax.probes import circuits
from tests.laboratory import small
from tests.model import oracle


@pytest.fixture(scope="module")
def table():
    return {(r["from"], r["into"]): r for r in small.ablated().tables["edges"]}


def loss_with_cut(source, target, into):
    """loss_RT of the probe's rows where layer-1 head `target` has `into` computed without layer-0 head `source`."""
    found, rows = small.snapshot(), small.snapshot().panel.evaluation.tokens_RU[:8]
    cfg, params = found.run.config.model, jax.tree.map(lambda x: np.asarray(x, np.float64), found.params)
    _, layers, residuals = oracle.forward(cfg, params, rows[:, :-1])
    block = params["layers"]["layer_01"]
    written = layers[0]["z"][:, :, source] @ params["layers"]["layer_00"]["attention"]["wo_NHD"][source]
    places = np.broadcast_to(np.arange(32), (8, 32))

    def attention(x):
        return oracle.attention_layer(cfg, block["attention"], 1, oracle.norm(cfg, block["attention_norm"], x), places,
                                      None, None)  # fmt: skip

    out, whole = attention(residuals[1])
    _, cut = attention(residuals[1] - written)
    parts = {"query": "q", "key": "k", "value": "v"}
    q, k, v = (cut[x] if into == name else whole[x] for name, x in parts.items())
    z, _ = oracle.attend(q, k, v, np.stack([oracle.seen(32)] * 8))
    out = out + (z - whole["z"])[:, :, target] @ block["attention"]["wo_NHD"][target]
    return small.token_loss(oracle.norm(cfg, params["final_norm"], residuals[1] + out) @ params["unembed_DV"],
                            rows[:, 1:])  # fmt: skip


def test_without_induction_heads_the_strongest_upper_head_is_looked_at(table):
    snapshot = small.snapshot()
    strength_LN = snapshot.panel.prefix_matching(snapshot.reading.arrays).strength_LN
    best = f"L1H{strength_LN[1].argmax()}"
    assert set(table) == {(f"L0H{n}", into) for n in range(4) for into in ("query", "key", "value")}
    assert {r["to"] for r in table.values()} == {best}


@pytest.mark.parametrize("into", ["query", "key", "value"])
def test_a_cut_costs_what_numpy_says(table, into):
    row = table["L0H2", into]
    wanted = loss_with_cut(2, int(row["to"][3]), into).mean() - loss_with_cut(2, int(row["to"][3]), None).mean()
    assert row["loss_change"] == pytest.approx(wanted, abs=1e-5) and abs(wanted) > 1e-4
    assert row["loss_change_low"] <= row["loss_change"] <= row["loss_change_high"]


def test_beside_each_cut_stands_what_the_weights_say(table):
    snapshot = small.snapshot()
    composed = circuits.composition(snapshot.params, snapshot.run.config.model)
    for (source, into), row in table.items():
        c, at = composed[into[0]], (0, int(source[3]), 1, int(row["to"][3]))
        assert (row["composition"], row["composition_z"]) == (c.score_LNLN[at], c.z_LNLN[at])
    whole = {r["prefix_matching"] for r in table.values()}
    logged = snapshot.panel.prefix_matching(snapshot.reading.arrays).score_LN[1]
    assert len(whole) == 1 and np.abs(logged - whole.pop()).min() < 1e-6
    assert all(r["prefix_matching_cut"] == r["prefix_matching"] for r in table.values() if r["into"] == "value")
    assert all(r["prefix_matching_cut"] != r["prefix_matching"] for r in table.values() if r["into"] != "value")


def test_the_strongest_induction_heads_are_the_targets(monkeypatch):
    snapshot = small.snapshot()
    monkeypatch.setattr(type(snapshot.panel), "induction_heads", lambda *_: [(1, 0), (1, 2)])
    found = edges.edge_table(snapshot)
    assert len(found) == 24 and {r["to"] for r in found} == {"L1H0", "L1H2"}


def test_one_layer_has_no_edges():
    snapshot = small.snapshot()
    cfg = dataclasses.replace(snapshot.subject.cfg, kept_heads=((0, 1, 2, 3), ()))
    alone = dataclasses.replace(snapshot, subject=dataclasses.replace(snapshot.subject, cfg=cfg))
    vars(alone)["reading"] = snapshot.reading
    assert edges.edge_table(alone) == []
