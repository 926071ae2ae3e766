"""Hard-concrete gates: the closed form against draws, and models in which it is known what must survive."""
import copy
import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

from mha_jax.config import ConfigError
from mha_jax.data.source import to_batch
from mha_jax.probes.subject import Subject
from mha_jax.pruning import gates
from mha_jax.training.loop import NonFinite
from tests.model import oracle

pytestmark = pytest.mark.usefixtures("quick_module")
KINDS = pytest.mark.parametrize("K", [4, 2, 1])
N, MATTERS = 4, 2
HOW = dict(steps=40, learning_rate=0.2, seed=0)
SGD = optax.sgd(0.1)


def mesh(devices=1):
    return Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), ("data", "fsdp", "tensor"),
                axis_types=(AxisType.Auto,) * 3)  # fmt: skip


def one_head_matters(K, devices=1):
    """A model that always predicts token 0: loss ln(1 + e^-4) = 0.018 with head MATTERS, ln 2 without it."""
    cfg = oracle.model_config(d_model=8, num_heads=N, num_kv_heads=K, vocab_size=2, norm="none", positions="none")
    params = jax.tree.map(np.zeros_like, oracle.random_params(cfg, 0))
    params["embed_VD"][:, 2] = 1
    params["unembed_DV"][[0, 1], [0, 1]] = 1
    attention = params["layers"]["layer_00"]["attention"]
    attention["wv_DKH"][2, :, 0] = 1
    attention["wo_NHD"][MATTERS, 0, :2] = 2, -2
    return Subject(cfg, jax.tree.map(jax.numpy.asarray, params), mesh(devices))


def zeros(step):
    return to_batch(np.zeros((2, 4), np.int32))


def random_rows(step):
    return to_batch(np.random.default_rng(step).integers(0, 2, (2, 4)).astype(np.int32))


def test_open_probability_against_draws():
    """The share of draws above 0, and Voita's figure ln(0.1 / 1.1) x -0.33 = 0.791."""
    log_alpha_J = np.array([-3.0, -0.791, 0.0, 2.0])
    u_SJ = np.random.default_rng(0).uniform(gates.EPS, 1 - gates.EPS, (200_000, 4))
    s_SJ = 1 / (1 + np.exp(-(np.log(u_SJ / (1 - u_SJ)) + log_alpha_J) / 0.33))
    drawn_SJ = np.clip(1.2 * s_SJ - 0.1, 0, 1)
    np.testing.assert_allclose(gates.sample(log_alpha_J, u_SJ), drawn_SJ, atol=1e-4)
    found_J = gates.open_probability(log_alpha_J)
    np.testing.assert_allclose(found_J, (drawn_SJ > 0).mean(0), atol=0.004)
    assert found_J[1] == pytest.approx(0.5, abs=1e-3)
    np.testing.assert_allclose(gates.evaluate(np.array([-9.0, 0.0, 9.0])), [0, 0.5, 1])


@KINDS
def test_the_head_that_matters_survives_a_price_and_all_survive_none(K):
    subject = one_head_matters(K)
    before = gates._step._cache_size()
    free, dear, too_dear = gates.front(subject, zeros, [0, 0.1, 10], **HOW)
    assert gates._step._cache_size() == before + 1
    assert (free.penalty, free.kept, free.names) == (0.0, 4, ["L0H0", "L0H1", "L0H2", "L0H3"])
    assert (dear.kept, dear.names, dear.result.survivors) == (1, ["L0H2"], [(0, 2)])
    assert too_dear.kept == 0
    assert dear.result.open_LN.shape == (1, N) and dear.result.losses_S.shape == (40,)
    assert dear.result.losses_S[-1] < 0.1 < too_dear.result.losses_S[-1]
    by_group = gates.train_gates(subject, zeros, penalty=0.1, unit="group", **HOW)
    assert by_group.log_alpha_LN.shape == (1, K)
    group = N // K
    assert by_group.survivors == [(0, n) for n in range(N) if n // group == MATTERS // group]


def test_penalty_alone_moves_a_gate_that_the_loss_does_not_feel():
    """Whatever its size, Adam's first step is the learning rate, downhill; without one, none."""
    subject = one_head_matters(4)
    found = [gates.train_gates(subject, zeros, penalty=p, **HOW | {"steps": 1}).log_alpha_LN[0] for p in (0, 1e-3, 1)]
    dead = np.arange(N) != MATTERS
    np.testing.assert_array_equal(found[0][dead], gates.INITIAL)  # no price, no effect: no slope at all
    for log_alpha_N in found[1:]:
        np.testing.assert_allclose(log_alpha_N[dead], gates.INITIAL - 0.2, atol=1e-4)


def test_same_seed_same_gates_and_the_frozen_model_stays():
    subject = one_head_matters(2)
    kept = jax.tree.map(np.array, subject.params)
    a, b, other = (gates.train_gates(subject, random_rows, penalty=0.02, **HOW | {"steps": 5, "seed": seed})
                   for seed in (0, 0, 1))  # fmt: skip
    assert a.log_alpha_LN.tobytes() == b.log_alpha_LN.tobytes() and a.losses_S.tobytes() == b.losses_S.tobytes()
    assert a.log_alpha_LN.tobytes() != other.log_alpha_LN.tobytes()
    for params in (a.params, subject.params):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x).view(np.int32), y.view(np.int32)), params,
                     kept)  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2])
def test_the_model_trained_along_moves_and_the_one_given_does_not(devices):
    subject = one_head_matters(2, devices)
    kept = jax.tree.map(np.array, subject.params)
    before, told = gates._step._cache_size(), []
    how = HOW | {"steps": 4, "of_params": SGD}
    a, b = (gates.train_gates(subject, random_rows, penalty=0.1, progress=told.append, **how) for _ in range(2))
    assert gates._step._cache_size() == before + 1 and told == [1] * 8
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a.params, b.params)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), y), subject.params, kept)
    assert (np.asarray(a.params["unembed_DV"]) != kept["unembed_DV"]).any()


def test_heads_that_are_gone_have_no_gate():
    """Nor a price: the others' gates are those of the same model with the head dead."""
    whole = one_head_matters(2)
    params = copy.deepcopy(whole.params)
    attention = params["layers"]["layer_00"]["attention"]
    attention["wq_DNH"], attention["wo_NHD"] = attention["wq_DNH"][:, 1:], attention["wo_NHD"][1:]
    left = Subject(dataclasses.replace(whole.cfg, kept_heads=((1, 2, 3),)), params, whole.mesh)
    found = gates.train_gates(left, zeros, penalty=0.1, **HOW)
    assert found.survivors == [(0, 2)]
    for of_head in (found.log_alpha_LN, found.open_LN, found.gate_LN):
        assert np.isnan(of_head[0, 0]) and np.isfinite(of_head[0, 1:]).all()
    alike = gates.train_gates(whole, zeros, penalty=0.1, **HOW)
    np.testing.assert_allclose(found.log_alpha_LN[0, 1:], alike.log_alpha_LN[0, 1:], atol=1e-5)


def test_bad_input_is_refused():
    subject = one_head_matters(4)
    for change, message in (
        ({"penalty": -1}, "penalty = -1: allowed is a finite number, 0 or more"),
        ({"penalty": float("nan")}, "penalty = nan"),
        ({"learning_rate": 0}, "learning_rate = 0: allowed is a finite number above 0"),
        ({"steps": 0}, "steps = 0: allowed is 1 or more"),
        ({"unit": "heads"}, "unit = 'heads': allowed are head, group; did you mean 'head'"),
    ):
        with pytest.raises(ConfigError, match=message):
            gates.train_gates(subject, zeros, **{"penalty": 0.1} | HOW | change)
    poisoned = lambda step: zeros(step) | {"weights_BT": np.full((2, 3), np.inf if step == 2 else 1, np.float32)}  # noqa: E731
    with pytest.raises(NonFinite, match="gates at penalty 0.1, step 2: loss nan") as caught:
        gates.train_gates(subject, poisoned, penalty=0.1, **HOW)
    assert caught.value.step == 2
