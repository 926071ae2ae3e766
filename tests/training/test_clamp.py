"""Interventions during training: nothing outside their steps, the named heads and patterns inside, one program."""
import functools

import jax
import numpy as np
import pytest

from mha_jax.config import ConfigError, InterventionsConfig
from mha_jax.model import transformer
from mha_jax.model.interventions import ablate
from mha_jax.probes import icl
from mha_jax.training import clamp
from tests.model import oracle
from tests.training import tiny

B, T, L, N = 2, 8, 2, 4
START, END = 3, 6
KINDS = ("zero", "previous_token", "induction")


def model(**fields):
    return oracle.model_config(**{"num_layers": L, "d_model": 16, "num_heads": N, "num_kv_heads": 2} | fields)


def inputs(cfg):
    tokens = np.random.default_rng(1).integers(0, 4, (B, T + 1)).astype(np.int32)  # few tokens, so that they repeat
    return oracle.random_params(cfg, 0), tokens[:, :-1], tokens[:, 1:]


def loss_and_grads(cfg, clamped, jit):
    """Jitted (params, tokens, targets, step) -> (loss, gradient)."""
    graph = oracle.graphdef(cfg)

    def loss(params, tokens, targets, step):
        logits, _, _ = transformer.forward(graph, params, tokens, interventions=clamped(step, tokens))
        return icl.token_loss(logits, targets).mean()

    return jit(jax.value_and_grad(loss))


def by_loops(kind, tokens, segments=None, window=None):
    """[B, T, S] of the perfect head, one query at a time."""
    out = np.zeros((len(tokens), tokens.shape[1], tokens.shape[1]))
    for b, row in enumerate(tokens):
        segment = np.ones(len(row), int) if segments is None else segments[b]
        for t in range(len(row)):
            if segment[t] == 0:
                continue
            keys = [s for s in range(t + 1) if segment[s] == segment[t] and (window is None or t - s < window)]
            if kind == "previous_token":
                wanted = [s for s in keys if s == t - 1]
            else:
                wanted = [s for s in keys if 0 < s < t and row[s - 1] == row[t] and segment[s - 1] == segment[t]]
            wanted = wanted or [t]
            out[b, t, wanted] = 1 / len(wanted)
    return out


@pytest.mark.parametrize(("kind", "K", "jit"), [
    ("zero", 1, oracle.quick_jit), ("zero", 4, oracle.plain_jit),
    ("previous_token", 4, oracle.quick_jit), ("induction", 2, oracle.plain_jit),
])  # fmt: skip
def test_outside_its_steps_training_is_free_bit_for_bit(kind, K, jit):
    """And inside it is not; one program for all steps."""
    cfg = model(num_layers=1, num_kv_heads=K, attention="einsum")
    make = clamp.make(InterventionsConfig("0.1,0.3", kind, START, END), cfg)
    traced = []

    def counted(step, tokens):
        traced.append(step)
        return make(step, tokens)

    free = loss_and_grads(cfg, clamp.make(InterventionsConfig(), cfg), jit)(*inputs(cfg), 0)
    held = loss_and_grads(cfg, counted, jit)
    for step in (0, START - 1, START, END - 1, END, 10**6):
        loss, grads = held(*inputs(cfg), np.int32(step))
        if START <= step < END:
            assert abs(loss - free[0]) > 1e-4
        else:
            assert loss == free[0]
            assert all(jax.tree.leaves(jax.tree.map(np.array_equal, grads, free[1])))
    assert len(traced) == 1


@pytest.mark.parametrize("K", [1, 4])
def test_zero_is_zero_ablation(K):
    cfg = model(num_kv_heads=K)
    params, tokens, _ = inputs(cfg)
    run = oracle.quick_jit(functools.partial(transformer.forward, oracle.graphdef(cfg)), static_argnames="capture")
    held = clamp.make(InterventionsConfig("0.1,1.3", start=START), cfg)
    cut = run(params, tokens, interventions=ablate(L, N, [(0, 1), (1, 3)]))[0]
    for step in (START, 10**6):  # without an end, to the last step
        np.testing.assert_array_equal(run(params, tokens, interventions=held(step, tokens))[0], cut)
    assert np.abs(run(params, tokens, interventions=held(START - 1, tokens))[0] - cut).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_named_heads_look_where_they_are_told(kind):
    cfg = model()
    params, tokens, _ = inputs(cfg)
    held = clamp.make(InterventionsConfig("L0H1,L1H3", kind, start=START), cfg)
    run = oracle.quick_jit(lambda step: transformer.forward(
        oracle.graphdef(cfg), params, tokens, capture=("pattern",), interventions=held(step, tokens))[1])  # fmt: skip
    told, free = (run(step).pattern_LBNTS for step in (START, START - 1))
    for layer, head in ((0, 1), (1, 3)):
        np.testing.assert_allclose(told[layer, :, head], by_loops(kind, tokens), rtol=1e-6)
    np.testing.assert_allclose(told[0, :, [0, 2, 3]], free[0, :, [0, 2, 3]], rtol=1e-6)
    assert np.abs(told[0, :, 1] - free[0, :, 1]).max() > 0.1


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_patterns_keep_to_the_document_and_the_window(kind, window):
    """Two documents and padding in a row: the last token of one is not the copy that the next one's first follows."""
    places = [oracle.packed(lengths, 12) for lengths in ((5, 6), (12,), (1, 2, 9))]
    positions, segments = (np.stack(x) for x in zip(*places, strict=True))
    tokens = np.random.default_rng(2).integers(0, 3, (3, 12)).astype(np.int32)
    got = np.asarray(clamp.wanted_pattern(kind, tokens, positions, segments, window))
    np.testing.assert_allclose(got, by_loops(kind, tokens, segments, window), rtol=1e-6)
    assert (got[0, 11] == 0).all() and got.dtype == np.float32
    whole = np.asarray(clamp.wanted_pattern(kind, tokens, np.arange(12)[None], None, window))
    np.testing.assert_allclose(whole, by_loops(kind, tokens, None, window), rtol=1e-6)


def test_patterns_by_hand():
    tokens = np.array([[5, 7, 5, 9, 5]], np.int32)
    induction = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0.5, 0, 0.5, 0]]
    before = [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
    for kind, want in (("induction", induction), ("previous_token", before)):
        np.testing.assert_array_equal(clamp.wanted_pattern(kind, tokens, np.arange(5)[None])[0], want)


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_clamped_head_does_not_learn_where_to_look(kind, K):
    """Its query gets no gradient, its output does unless it is silenced; in MHA its key gets none either."""
    cfg = model(num_kv_heads=K)
    held = clamp.make(InterventionsConfig("1.3", kind, START, END), cfg)
    _, grads = loss_and_grads(cfg, held, oracle.quick_jit)(*inputs(cfg), np.int32(START))
    of_layer = grads["layers"]["layer_01"]["attention"]
    assert (of_layer["wq_DNH"][:, 3] == 0).all() and (np.abs(of_layer["wq_DNH"][:, :3]).max((0, 2)) > 1e-6).all()
    assert (of_layer["wk_DKH"][:, -1] == 0).all() == (K == 4)
    assert (of_layer["wo_NHD"][3] == 0).all() == (kind == "zero")
    assert np.abs(grads["layers"]["layer_00"]["attention"]["wq_DNH"][:, 3]).max() > 1e-6


def test_heads_of_a_smaller_model_keep_their_numbers():
    cfg = model(kept_heads=((0, 1, 2, 3), (1, 3)))
    params, tokens, _ = inputs(cfg)
    held = clamp.make(InterventionsConfig("1.3", "previous_token"), cfg)
    aux = oracle.quick_jit(lambda: transformer.forward(
        oracle.graphdef(cfg), params, tokens, capture=("pattern",), interventions=held(0, tokens))[1])()  # fmt: skip
    np.testing.assert_allclose(aux.pattern_LBNTS[1, :, 3], by_loops("previous_token", tokens), rtol=1e-6)
    with pytest.raises(ConfigError, match=r"config\.interventions\.heads = '1\.3,1\.0': 1\.0 was removed"):
        clamp.make(InterventionsConfig("1.3,1.0"), cfg)


@pytest.mark.parametrize(("section", "message"), [
    (InterventionsConfig("1.4"),
     r"config\.interventions\.heads = '1\.4': '1\.4' does not exist; .*layers 0 to 1, heads 0 to 3"),
    (InterventionsConfig("", kind="induction"), r"config\.interventions\.heads = ''"),
    (InterventionsConfig("", start=5), r"config\.interventions\.heads = ''"),
    (InterventionsConfig("", end=5), r"config\.interventions\.heads = ''"),
])  # fmt: skip
def test_settings_that_cannot_be_obeyed(section, message):
    with pytest.raises(ConfigError, match=message):
        clamp.make(section, model())


@pytest.mark.parametrize("attention", ["blockwise", "fused"])
def test_patterns_need_an_implementation_that_forms_them(attention):
    cfg = model(attention=attention)
    with pytest.raises(ConfigError, match=rf"kind = 'induction': config\.model\.attention = '{attention}'"):
        clamp.make(InterventionsConfig("1.0", "induction"), cfg)
    clamp.make(InterventionsConfig("1.0", "zero"), cfg)


# ------------------------------------------------------------------------------------------------------- in a run

HELD = {"interventions.heads": "0.1,1.3", "interventions.start": START, "interventions.end": END,
        "tracking.log_every": 1}  # fmt: skip


@pytest.mark.usefixtures("shared_programs", "one_device")
@pytest.mark.parametrize("kind", [pytest.param("zero", marks=pytest.mark.slow), "previous_token"])
def test_a_run_is_free_until_its_heads_are_held(tmp_path, whole, kind):
    """The same bits up to the first clamped step, in the middle of a device call; then another run. Probes are free."""
    free = tiny.train(tiny.config(**{"tracking.log_every": 1}), tmp_path / "free")[1]
    cfg = tiny.config(**HELD, **{"interventions.kind": kind})
    said = tiny.train(cfg, tmp_path / "held")[1]
    loss = {name: {e["step"]: e["train/loss"] for e in tiny.events(tmp_path / name) if "train/loss" in e}
            for name in ("free", "held")}  # fmt: skip
    assert [s for s in range(tiny.STEPS) if loss["free"][s] == loss["held"][s]] == list(range(START))
    assert loss["free"][START] != pytest.approx(loss["held"][START], abs=1e-5)
    tiny.assert_same_bits(tiny.saved(cfg, tmp_path / "held", 0), tiny.saved(cfg, whole(4), 0))
    first = {name: next(e for e in tiny.events(tmp_path / name) if "eval/loss" in e) for name in ("free", "held")}
    assert first["free"] == first["held"] and first["free"]["step"] == 0
    line = f"heads 0.1,1.3 are held at {kind} from step 3 to step 5; probes see the free model"
    assert line in said and not any("held" in message for message in free)


@pytest.mark.usefixtures("shared_programs", "one_device")
def test_held_to_the_end_a_silent_head_never_learns_and_probes_see_it(tmp_path):
    """No gradient reaches it, so Adam leaves it as it was; what is probed is the model with it."""
    cfg = tiny.config(**{"interventions.heads": "1.3", "optimizer.weight_decay": 0.0})
    tiny.train(cfg, tmp_path)
    before, after = (tiny.saved(cfg, tmp_path, step) for step in (0, tiny.STEPS))
    names = {name: axis for letter, axis in (("wq_DNH", 1), ("wo_NHD", 0)) for name in before
             if "params" in name and "layer_01" in name and letter in name}  # fmt: skip
    assert len(names) == 2
    for name, axis in names.items():
        still = [np.array_equal(before[name].take(n, axis), after[name].take(n, axis)) for n in range(4)]
        assert still == [False, False, False, True]
    (line,) = [e for e in tiny.events(tmp_path) if e["step"] == tiny.STEPS and "eval/loss" in e]
    assert 0 < line["previous_token/L1H3"] < 1 and line["copying/L1H3"] > 0


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(("changes", "message"), [
    ({"heads": "0.1", "start": 5, "end": 5}, "config.interventions.start = 5: allowed is below config.interventions.end"
                                             " = 5 and config.steps = 30"),
    ({"heads": "0.1", "start": 30}, "config.interventions.start = 30: allowed is below config.interventions.end = None "
                                    "and config.steps = 30"),
    ({"heads": "0.1", "start": 30, "end": 40}, "config.interventions.start = 30: allowed is below"),
    ({"heads": "0.1", "start": -1}, "config.interventions.start = -1: allowed is 0 or more"),
    ({"heads": "0.1", "end": 0}, "config.interventions.end = 0: allowed is above 0"),
    ({"heads": "0.1", "kind": "mean"}, "config.interventions.kind = 'mean': allowed are zero, previous_token, ind"),
    ({"heads": "0.1", "kind": "indction"}, "did you mean 'induction'?"),
    ({"heads": ((0, 1),)}, "config.interventions.heads = ((0, 1),): allowed is str"),
    ({"heads": "0.1,2.0"}, "config.interventions.heads = '0.1,2.0': '2.0' does not exist; allowed are different heads"),
    ({"heads": "all"}, "config.interventions.heads = 'all': 'all' is no head"),
    ({"start": 3}, "config.interventions.heads = '': names no head, but other keys of config.interventions are set"),
])  # fmt: skip
def test_a_run_that_cannot_hold_its_heads_does_not_start(tmp_path, changes, message):
    with pytest.raises(ConfigError) as error:
        tiny.train(tiny.config(**{f"interventions.{key}": value for key, value in changes.items()}), tmp_path / "run")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("shared_programs", "one_device")
def test_a_run_goes_on_only_with_the_heads_it_held(whole):
    with pytest.raises(ConfigError, match="config.interventions.heads was '', is '0.1'; choose another --workdir"):
        tiny.train(tiny.config(**{"interventions.heads": "0.1"}), whole(4))
