"""The table of heads: what training logged, what NumPy finds, and nothing that is not in the model."""
import jax
import numpy as np
import pytest

from mha_jax.laboratory import heads
from mha_jax.probes import behaviour, reading
from mha_jax.training.tracking import read_metrics
from tests.laboratory import small
from tests.model import oracle


@pytest.fixture(scope="module")
def found():
    return heads.heads(small.snapshot())


@pytest.fixture(scope="module")
def table(found):
    return {r["head"]: r for r in found.tables["heads"]}


def test_every_head_has_a_row_with_what_was_logged_of_it(table):
    assert list(table) == [f"L{i}H{n}" for i, n in small.ALL]
    (logged,) = [e for e in read_metrics(small.run().workdir) if e["step"] == small.STEPS and "eval/loss" in e]
    for name, row in table.items():
        assert row["induction"] == logged[f"induction/{name}"]
        assert {s: row[s] for s in behaviour.HEAD_SCORES} == {s: logged[f"{s}/{name}"] for s in behaviour.HEAD_SCORES}
        assert row["reading"] in reading.ORDER and row["rule"]


def test_heads_zeroed_alone(table):
    whole = small.loss_without([]).mean()
    for head in ((0, 2), (1, 0)):
        change = table["L{}H{}".format(*head)]["zeroed_loss_change"]
        assert change == pytest.approx(small.loss_without([head]).mean() - whole, abs=1e-5) and change != 0


def test_what_a_head_adds_to_the_logit_of_the_next_token(table):
    """The final norm frozen: a head's output centred, over the residual stream's standard deviation, times the gain."""
    snapshot, rows = small.snapshot(), small.snapshot().panel.evaluation.tokens_RU[:8]
    cfg, params = snapshot.run.config.model, jax.device_get(snapshot.params)
    _, layers, residuals = oracle.forward(cfg, params, rows[:, :-1])
    scale = np.sqrt(residuals[-1].var(-1, keepdims=True) + cfg.norm_eps)
    unembed_DV = params["final_norm"]["scale_D"][:, None] * params["unembed_DV"]
    for layer, head in ((0, 1), (1, 3)):
        written = layers[layer]["z"][:, :, head] @ params["layers"][f"layer_{layer:02d}"]["attention"]["wo_NHD"][head]
        logits = (written - written.mean(-1, keepdims=True)) / scale @ unembed_DV
        wanted = np.take_along_axis(logits, rows[:, 1:, None], -1).mean()
        assert table[f"L{layer}H{head}"]["direct_logit"] == pytest.approx(wanted, abs=1e-5)


def test_the_lens_ends_at_the_loss_and_begins_at_the_embedding(found):
    snapshot, rows = small.snapshot(), small.snapshot().panel.evaluation.tokens_RU[:8]
    cfg, params = snapshot.run.config.model, jax.device_get(snapshot.params)
    _, _, residuals = oracle.forward(cfg, params, rows[:, :-1])
    lens = found.tables["logit_lens"]
    assert [r["after"] for r in lens] == ["embedding", "layer 0", "layer 1"]
    for row, x in zip(lens, residuals, strict=True):
        logits = oracle.norm(cfg, params["final_norm"], x) @ params["unembed_DV"]
        assert row["loss"] == pytest.approx(small.token_loss(logits, rows[:, 1:]).mean(), abs=1e-5)


def test_pairs_of_heads_go_upwards(found):
    """The baseline is that of 31 dimensions: LayerNorm leaves none for the mean."""
    pairs = found.tables["composition"]
    assert len(pairs) == 16 * 5 and {r["through"] for r in pairs} == {"q", "k", "v", "q_offsets", "k_offsets"}
    assert {(r["from"][:2], r["to"][:2]) for r in pairs} == {("L0", "L1")}
    assert all(np.isfinite([r["score"], r["z"]]).all() and r["baseline"] == 31**-0.5 for r in pairs)


def test_random_heads_are_shown_beside_the_best(found, table):
    shown = [tuple(h) for h in found.arrays["shown"]]
    drawn = small.parse(" ".join(found.facts["drawn_at_random"]))
    strongest = sorted(small.ALL, key=lambda h: -table["L{}H{}".format(*h)]["induction_strength"])[:3]
    assert shown[:3] == strongest and shown[3:] == drawn and len(set(shown)) == 6
    pattern_STT, tokens_T = found.arrays["pattern_STT"], small.snapshot().panel.repeats["induction"][1][0][:1]
    _, layers, _ = oracle.forward(small.run().config.model, small.snapshot().params, tokens_T)
    for i, (layer, head) in enumerate(shown):
        np.testing.assert_allclose(pattern_STT[i], layers[layer]["pattern"][0, head], atol=1e-5)
        # Two query heads read one KV head.
        size_S = np.linalg.norm(layers[layer]["v"][0, :, head // 2], axis=-1)
        weighted_TT = layers[layer]["pattern"][0, head] * size_S / size_S.mean()
        np.testing.assert_allclose(found.arrays["weighted_STT"][i], weighted_TT, atol=1e-5)


def test_what_has_no_reading_is_counted(found, table):
    none = [r for r in table.values() if r["reading"] == "none"]
    assert found.facts["share_without_reading"] == len(none) / 8
    assert found.facts["induction_heads"] == [] and found.facts["periods"] == [4, 8]
    assert found.facts["chance"]["copying_eigenvalues"] == 0


def test_before_and_after_only_where_there_was_a_formation(found, table, monkeypatch):
    assert {r["before_after"] for r in table.values()} == {None}
    monkeypatch.setattr(heads, "formation_rise", lambda _: (16.0, 22.0))
    snapshot, frozen_LNT = small.snapshot(), heads.zeroed(small.snapshot())[1]
    got_LN = heads.before_after(snapshot, frozen_LNT)
    start, end = (small.snapshot(s).reading.arrays["loss_by_position_T"] for s in (small.HALF, small.STEPS))
    along_T = (end - start) / np.sqrt(((end - start) ** 2).sum())
    np.testing.assert_allclose(got_LN, (frozen_LNT - end) @ along_T, rtol=1e-9)
    np.testing.assert_allclose(frozen_LNT[1, 2], small.loss_without([(1, 2)]).mean(0), atol=1e-5)
    np.testing.assert_allclose(frozen_LNT[0, 1], loss_with_patterns_held(1).mean(0), atol=1e-5)
    assert np.abs(frozen_LNT[0, 1] - small.loss_without([(0, 1)]).mean(0)).max() > 1e-3


def loss_with_patterns_held(head):
    """loss_RT without a head of layer 0, while layer 1 looks where it looked: its values alone are those without."""
    rows, params = small.snapshot().panel.evaluation.tokens_RU, jax.device_get(small.snapshot().params)
    cfg, block = small.run().config.model, params["layers"]["layer_01"]
    _, layers, residuals = oracle.forward(cfg, params, rows[:, :-1])
    kernel_HD = params["layers"]["layer_00"]["attention"]["wo_NHD"][head]
    x = residuals[1] - layers[0]["z"][:, :, head] @ kernel_HD
    v = np.einsum("btd,dkh->btkh", oracle.norm(cfg, block["attention_norm"], x), block["attention"]["wv_DKH"])
    z = np.einsum("bnts,bsnh->btnh", layers[1]["pattern"], v.repeat(2, axis=2))
    x = x + np.einsum("btnh,nhd->btd", z, block["attention"]["wo_NHD"])
    return small.token_loss(oracle.norm(cfg, params["final_norm"], x) @ params["unembed_DV"], rows[:, 1:])
