"""Gradient importance against finite differences of the NumPy model and against values worked out by hand."""
import copy
import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from mha_jax.config import ConfigError
from mha_jax.data.source import to_batch
from mha_jax.probes.subject import Subject
from mha_jax.pruning.importance import importance, per_layer_l2, weight_magnitude
from tests.model import oracle

pytestmark = pytest.mark.usefixtures("quick_module")
KINDS = pytest.mark.parametrize("K", [4, 2, 1])
L, N, T = 2, 4, 6


def mesh(devices=1):
    return Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), ("data", "fsdp", "tensor"),
                axis_types=(AxisType.Auto,) * 3)  # fmt: skip


def two_layers(K, seed=0, **fields):
    cfg = oracle.model_config(num_layers=L, d_model=16, num_heads=N, num_kv_heads=K, bias=True, **fields)
    return Subject(cfg, oracle.random_params(cfg, seed), mesh())


def padded_batch(cfg, rows=3):
    """Rows of random tokens, the last of which ends in two tokens without weight."""
    batch = to_batch(oracle.random_tokens(cfg, 1, rows, T + 1))
    batch["weights_BT"][-1, -2:] = 0
    return batch


def switches(c_N, K=4):
    """A model whose head n adds c_n to one logit and takes it from the other, so that they come out equal.

    Loss ln(1 + e^-d) for target 0 and ln(1 + e^d) for target 1, d = 2 (a + sum of gate_n c_n), a = -sum of c_n: at
    gates of 1 head n's derivative is -c_n and +c_n.
    """
    cfg = oracle.model_config(d_model=8, num_heads=4, num_kv_heads=K, vocab_size=2, norm="none", positions="none")
    params = jax.tree.map(np.zeros_like, oracle.random_params(cfg, 0))
    a = -sum(c_N)
    params["embed_VD"][:, :3] = a, -a, 1
    params["unembed_DV"][[0, 1], [0, 1]] = 1
    attention = params["layers"]["layer_00"]["attention"]
    attention["wv_DKH"][2, :, 0] = 1
    for n, c in enumerate(c_N):
        attention["wo_NHD"][n, 0, :2] = c, -c
    return Subject(cfg, params, mesh())


def rows_of(*targets, padding=0):
    """A batch of these rows of targets, with `padding` tokens without weight behind each."""
    tokens = np.pad(np.array(targets, np.int32), ((0, 0), (1, padding)))
    batch = to_batch(tokens)
    batch["inputs_BT"] = np.zeros_like(batch["inputs_BT"])
    batch["weights_BT"][:, len(targets[0]) :] = 0
    return batch


@KINDS
def test_fc_28_plus_one_and_minus_one_are_one(K):
    found = importance(switches([1, 0, -0.5, 2], K), rows_of([1, 1, 1], [0, 0, 0]))
    for score in (found.token_LN, found.example_LN):
        np.testing.assert_allclose(score, [[1, 0, 0.5, 2]], atol=1e-6)
    for score in (found.batch_LN, found.signed_LN):
        np.testing.assert_allclose(score, 0, atol=1e-6)
    # Inside a row the signs cancel before the row's absolute value, after the token's.
    found = importance(switches([1, 0, -0.5, 2], K), rows_of([1, 0, 1], [1, 0, 1]))
    np.testing.assert_allclose(found.token_LN, [[1, 0, 0.5, 2]], atol=1e-6)
    np.testing.assert_allclose(found.example_LN, [[1 / 3, 0, 1 / 6, 2 / 3]], atol=1e-6)
    np.testing.assert_allclose(found.signed_LN, [[1 / 3, 0, -1 / 6, 2 / 3]], atol=1e-6)


def test_fc_28_duplicates_and_padding_change_nothing():
    subject = switches([1, 0, -0.5, 2])
    plain = importance(subject, rows_of([1, 0, 1], [1, 1, 1]))
    assert plain.example_LN[0, 0] == pytest.approx(2 / 3)
    padded = rows_of([1, 0, 1], [1, 1, 1], [1, 1, 1], padding=2)
    padded["weights_BT"][2] = 0  # a row of padding alone is not an example
    for batch in (rows_of([1, 0, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1]), padded):
        for score, other in zip(plain, importance(subject, batch), strict=True):
            np.testing.assert_allclose(other, score, atol=1e-6)


@KINDS
def test_fc_28_dead_head_is_exactly_zero(K):
    subject = two_layers(K)
    params = copy.deepcopy(subject.params)
    params["layers"]["layer_01"]["attention"]["wo_NHD"][2] = 0
    found = importance(dataclasses.replace(subject, params=params), padded_batch(subject.cfg))
    dead_LN = np.arange(L * N).reshape(L, N) == N + 2
    for score in found:
        assert (score[dead_LN] == 0).all() and (score[~dead_LN] != 0).all()
    assert weight_magnitude(params, subject.cfg)[1, 2] == 0


def loss_RT(cfg, params, batch):
    logits = oracle.forward(cfg, params, batch["inputs_BT"])[0]
    chosen = np.take_along_axis(logits, batch["targets_BT"][..., None], -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - chosen


def row_means(loss, batch):
    return (loss * batch["weights_BT"]).sum(1) / batch["weights_BT"].sum(1)


def differences(subject, batch, gates_LN):
    """Central differences [R, L, N] of each row's loss by the gates: a gate on what a head read scales its W_O."""
    out = np.zeros((len(batch["inputs_BT"]), L, N))
    for layer, n in np.ndindex(L, N):
        for sign in (1, -1):
            gates = np.array(gates_LN, np.float64)
            gates[layer, n] += sign * 1e-4
            params = jax.tree.map(lambda x: np.asarray(x, np.float64), subject.params)
            for i in range(L):
                params["layers"][f"layer_{i:02}"]["attention"]["wo_NHD"] *= gates[i][:, None, None]
            out[:, layer, n] += sign * row_means(loss_RT(subject.cfg, params, batch), batch) / 2e-4
    return out


@KINDS
def test_derivatives_are_those_of_the_loss(K):
    subject = two_layers(K, mlp="gelu")
    batch = padded_batch(subject.cfg)
    for mask_LN in (np.ones((L, N), bool), np.array([[1, 0, 1, 1], [1, 1, 1, 0]], bool)):
        wanted_RLN = differences(subject, batch, mask_LN)
        wanted_RLN[:, ~mask_LN] = np.nan
        found = importance(subject, batch, mask_LN=mask_LN)
        np.testing.assert_allclose(found.signed_LN, wanted_RLN.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.batch_LN, abs(wanted_RLN.mean(0)), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.example_LN, abs(wanted_RLN).mean(0), rtol=1e-4, atol=1e-6)
        assert (found.token_LN >= found.example_LN - 1e-7)[mask_LN].all()
        assert (found.example_LN >= found.batch_LN - 1e-7)[mask_LN].all()
        wanted_RLK = np.nansum(wanted_RLN.reshape(len(wanted_RLN), L, K, N // K), -1)
        wanted_RLK[:, ~mask_LN.reshape(L, K, -1).any(-1)] = np.nan
        by_group = importance(subject, batch, unit="group", mask_LN=mask_LN)
        np.testing.assert_allclose(by_group.signed_LN, wanted_RLK.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(by_group.example_LN, abs(wanted_RLK).mean(0), rtol=1e-4, atol=1e-6)


def test_token_importance_of_the_last_layer():
    """There a head's result at one position touches no other position, so that one's loss gives its derivative."""
    subject = two_layers(2)
    cfg, batch = subject.cfg, padded_batch(subject.cfg)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), subject.params)
    _, found, residuals = oracle.forward(cfg, params, batch["inputs_BT"])
    wanted_N = []
    for n in range(N):
        losses = []
        for sign in (1, -1):
            shift = found[1]["z"][:, :, n] @ params["layers"]["layer_01"]["attention"]["wo_NHD"][n]
            x = oracle.norm(cfg, params["final_norm"], residuals[-1] + sign * 1e-4 * shift) @ params["unembed_DV"]
            losses.append(np.log(np.exp(x).sum(-1)) - np.take_along_axis(x, batch["targets_BT"][..., None], -1)[..., 0])
        wanted_N.append(row_means(abs(losses[0] - losses[1]) / 2e-4, batch).mean())
    np.testing.assert_allclose(importance(subject, batch).token_LN[1], wanted_N, rtol=1e-4)


def test_a_group_has_a_gate_of_its_own():
    """Two heads of one group that undo each other matter alone and not together."""
    subject, batch = switches([1, -1, 0.5, 2], 2), rows_of([1, 1, 1], [0, 0, 0])
    np.testing.assert_allclose(importance(subject, batch).example_LN, [[1, 1, 0.5, 2]], atol=1e-6)
    np.testing.assert_allclose(importance(subject, batch, unit="group").example_LN, [[0, 2.5]], atol=1e-6)


@pytest.mark.parametrize(("K", "unit", "gates"), [(2, "head", 8), (2, "group", 2), (1, "group", 1)])
def test_fc_27_tables_are_of_query_heads_whatever_is_gone(K, unit, gates):
    """A head cut off by the mask and one removed for good leave the others the same scores; an emptied layer none."""
    cfg = oracle.model_config(num_layers=L, d_model=16, num_heads=8, num_kv_heads=K, head_dim=4)
    whole = Subject(cfg, oracle.random_params(cfg, 0), mesh())
    batch = padded_batch(cfg)
    kept = (0, 2, 3, 6)
    params = copy.deepcopy(whole.params)
    attention = params["layers"]["layer_00"]["attention"]
    attention["wq_DNH"], attention["wo_NHD"] = attention["wq_DNH"][:, kept], attention["wo_NHD"][kept,]
    params["layers"]["layer_01"]["attention"] = {}
    left = Subject(dataclasses.replace(cfg, kept_heads=(kept, ())), params, mesh())
    mask_LN = np.zeros((L, 8), bool)
    mask_LN[0, kept] = True
    cut = importance(whole, batch, unit=unit, mask_LN=mask_LN)
    for a, b in zip(importance(left, batch, unit=unit), cut, strict=True):
        assert a.shape == (L, gates) and np.isnan(a[1]).all() and np.isfinite(a[0]).sum() == min(gates, 4)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    magnitude = weight_magnitude(params, left.cfg)
    np.testing.assert_allclose(magnitude, np.where(mask_LN, weight_magnitude(whole.params, cfg), np.nan))


def test_packed_rows_and_several_devices():
    """A packed row is one example: its two documents count together. Devices share the rows and change nothing."""
    subject = two_layers(2)
    batch = to_batch(oracle.random_tokens(subject.cfg, 2, 4, T + 1))
    positions_T, segments_T = oracle.packed([3, 3], T)
    batch |= {"positions_BT": np.tile(positions_T, (4, 1)), "segments_BT": np.tile(segments_T, (4, 1))}
    batch["weights_BT"][:, 5:] = 0
    apart = [{k: v[:, part] for k, v in batch.items()} for part in (slice(0, 3), slice(3, 6))]
    first, second = (importance(subject, half | {"segments_BT": None}).signed_LN for half in apart)
    found = importance(subject, batch)
    np.testing.assert_allclose(found.signed_LN, (3 * first + 2 * second) / 5, rtol=1e-4, atol=1e-6)
    for a, b in zip(found, importance(dataclasses.replace(subject, mesh=mesh(2)), batch), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_per_layer_l2_by_hand():
    score_LN = [[3, 4], [0, 0], [np.nan, 2], [np.nan, np.nan]]
    np.testing.assert_array_equal(per_layer_l2(score_LN), [[0.6, 0.8], [0, 0], [np.nan, 1], [np.nan, np.nan]])


@KINDS
def test_weight_magnitude_is_the_norm_of_what_a_head_writes(K):
    subject = two_layers(K)
    group, wanted_LN = N // K, np.zeros((L, N))
    for layer, n in np.ndindex(L, N):
        block = subject.params["layers"][f"layer_{layer:02}"]
        gain = np.diag(block["attention_norm"]["scale_D"])
        wv = gain @ block["attention"]["wv_DKH"][:, n // group]
        wanted_LN[layer, n] = np.linalg.norm(wv @ block["attention"]["wo_NHD"][n])
    np.testing.assert_allclose(weight_magnitude(subject.params, subject.cfg), wanted_LN, rtol=1e-5)
    wanted_LK = np.linalg.norm(wanted_LN.reshape(L, K, group), axis=-1)
    np.testing.assert_allclose(weight_magnitude(subject.params, subject.cfg, "group"), wanted_LK, rtol=1e-5)


def test_bad_input_is_refused_before_anything_runs():
    subject = switches([1, 0, 0, 0])
    batch = rows_of([1, 1, 1])
    with pytest.raises(ConfigError, match=r"unit = 'groups': allowed are head, group; did you mean 'group'\?"):
        importance(subject, batch, unit="groups")
    with pytest.raises(ConfigError, match="1 row.* no real token"):
        importance(subject, batch | {"weights_BT": 0 * batch["weights_BT"]})
    with pytest.raises(ValueError, match=r"mask_LN has shape \(4,\).*\(1, 4\)"):
        importance(subject, batch, mask_LN=np.ones(4, bool))
