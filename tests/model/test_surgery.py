"""Taking heads out: the right ones, by their first numbers, from parameters and moments; the same function after."""
import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import serialization

from mha_jax.config import Config, ConfigError, ModelConfig, OptimizerConfig
from mha_jax.model import transformer
from mha_jax.model.interventions import ablate
from mha_jax.model.surgery import already_gone, kept_heads, kv_cache_bytes, parse_heads, remove_heads
from mha_jax.training import optimizer as optimizers
from mha_jax.training import state
from tests.model import oracle
from tests.model.test_removed_heads import KEPT, B, N, T, gone, removed, run, whole_config


def same_bits(a, b):
    """Two trees of the same structure hold the same bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def shapes_of(cfg):
    return jax.tree.map(np.shape, jax.eval_shape(lambda: transformer.init_params(cfg, 0)))


def constant_heads():
    """One layer of 4 heads, each adding a constant of its own to the logits; and logits(heads that remain)."""
    cfg = oracle.model_config(d_model=8, num_heads=4, num_kv_heads=4, bias=True, norm="none")
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B, T)
    attention = params["layers"]["layer_00"]["attention"]
    attention["wv_DKH"][:] = 0

    def logits(heads):
        written_D = sum(attention["bv_KH"][n] @ attention["wo_NHD"][n] for n in heads) + attention["bo_D"]
        return (params["embed_VD"][tokens] + written_D) @ params["unembed_DV"]

    return cfg, params, tokens, logits


def test_fc_24_numbers_are_those_of_the_whole_model():
    cfg, params, tokens, logits = constant_heads()
    results = []
    for cuts in ([[0], [1]], [[1], [0]], [[0, 1]], [[0], [0], [1, 0]]):
        tree, small = params, cfg
        for heads in cuts:
            tree, small = remove_heads(tree, small, [(0, n) for n in heads])
        assert small.kept_heads == ((2, 3),)
        results.append(tree)
        same_bits(tree, results[0])
    got = run(oracle.graphdef(small), results[0], tokens)[0]
    np.testing.assert_allclose(got, logits([2, 3]), rtol=1e-5, atol=1e-5)
    assert np.abs(got - logits([1, 3])).max() > 1e-2


def test_fc_24_a_head_that_is_gone_is_named():
    cfg, params, _, _ = constant_heads()
    assert already_gone(cfg, [(0, 0)]) == []
    tree, small = remove_heads(params, cfg, [(0, 0)])
    assert already_gone(small, [(0, 0), (0, 1)]) == [(0, 0)]
    again, same = remove_heads(tree, small, [(0, 0)])
    assert same == small
    same_bits(again, tree)


@pytest.mark.parametrize("head", [(0, 4), (0, -1), (1, 0), (-1, 0)])
def test_fc_24_a_head_that_never_was(head):
    cfg, params, _, _ = constant_heads()
    smaller = remove_heads(params, cfg, [(0, 3)])
    for act in (lambda: remove_heads(params, cfg, [(0, 1), head]), lambda: remove_heads(*smaller, [head]),
                lambda: already_gone(cfg, [head])):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"'{head[0]}\.{head[1]}' does not exist.*layers 0 to 0, heads 0 to 3"):
            act()


def test_heads_are_read_in_either_spelling():
    assert parse_heads("0.1,1.3", 2, 4) == parse_heads("L0H1, l1h3", 2, 4) == [(0, 1), (1, 3)]
    assert parse_heads("11.10, 0.1", 12, 12) == [(11, 10), (0, 1)]


@pytest.mark.parametrize(("text", "what"), [
    ("0.4", "'0.4' does not exist"), ("2.0", "'2.0' does not exist"), ("0.-1", "'0.-1' does not exist"),
    ("0.0,L-1H0", "'-1.0' does not exist"), ("0.1,L0H1", "'L0H1' is named twice"), ("", "'' is no head"),
    ("0.1,", "'' is no head"), ("0.1 1.3", "'0.1 1.3' is no head"), ("3", "'3' is no head"), ("L0.1", "'L0.1' is no"),
])  # fmt: skip
def test_heads_that_cannot_be_read(text, what):
    with pytest.raises(ConfigError) as error:
        parse_heads(text, 2, 4, key="config.interventions.heads")
    message = str(error.value)
    assert message.startswith("config.interventions.heads = ") and what in message and "\n" not in message
    assert message.endswith("layers 0 to 1, heads 0 to 3")


@pytest.mark.parametrize("K", [1, 2, 8])
@pytest.mark.parametrize("name", KEPT)
def test_fc_27_what_is_left_belongs_to_the_heads_that_are_left(name, K):
    """Bit for bit what NumPy takes from the whole, in one cut or in two, in the shapes of a model made that small."""
    cfg = whole_config(K, smeared_key=True, qk_norm=True, sink=True)
    params = oracle.random_params(cfg, 0)
    wanted_cfg, wanted = removed(cfg, params, KEPT[name])
    heads = gone(KEPT[name])
    tree, small = remove_heads(params, cfg, heads)
    assert small == wanted_cfg and jax.tree.map(np.shape, tree) == shapes_of(small)
    same_bits(tree, wanted)
    by_two, two_cfg = remove_heads(*remove_heads(params, cfg, heads[::2]), heads[1::2])
    assert two_cfg == small
    same_bits(by_two, wanted)
    assert sum(x.size for x in jax.tree.leaves(tree)) == transformer.count_params(small)


def test_fc_27_half_of_mqa_leaves_four_heads_and_one_key():
    cfg = whole_config(1)
    tree, small = remove_heads(oracle.random_params(cfg, 0), cfg, [(i, n) for i in (0, 1) for n in (0, 2, 5, 7)])
    assert small.kept_heads == ((1, 3, 4, 6),) * 2
    for attention in (block["attention"] for block in tree["layers"].values()):
        assert attention["wq_DNH"].shape == (16, 4, 4) and attention["wo_NHD"].shape == (4, 4, 16)
        assert attention["wk_DKH"].shape == attention["wv_DKH"].shape == (16, 1, 4)
    assert kv_cache_bytes(small, 10, 2) == kv_cache_bytes(cfg, 10, 2)


@pytest.mark.parametrize(("K", "name", "fields"), [
    (8, "unequal_groups", dict(positions="learned", norm="rms", mlp="gelu", bias=False)),
    (4, "one_group_left", dict(positions="shortformer", norm="none", smeared_key=True, tied=True)),
    (2, "emptied_first", dict(positions="none", mlp="swiglu", sink=True, window=3)),
    (1, "emptied_last", dict(norm="none", bias=False, qk_norm=True)),
])  # fmt: skip
def test_fc_27_removed_equals_masked(K, name, fields):
    """In models that tests of removed heads leave out; rope with LayerNorm and every per-head extra is theirs."""
    cfg = dataclasses.replace(whole_config(K), **fields)
    cfg = oracle.model_config(**dataclasses.asdict(cfg) | {"d_mlp": None})
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B, T)
    tree, small = remove_heads(params, cfg, gone(KEPT[name]))
    assert jax.tree.map(np.shape, tree) == shapes_of(small)
    masked = run(oracle.graphdef(cfg), params, tokens, interventions=ablate(2, N, gone(KEPT[name])))[0]
    got = run(oracle.graphdef(small), tree, tokens)[0]
    np.testing.assert_allclose(got, masked, rtol=1e-5, atol=1e-5)
    assert np.abs(got - run(oracle.graphdef(cfg), params, tokens)[0]).max() > 1e-2


def test_fc_27_every_head_of_the_model():
    """Without bias, norm and MLP nothing is left between embedding and unembedding, and that still runs."""
    cfg = oracle.model_config(num_layers=2, d_model=16, num_kv_heads=2, norm="none")
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, B, T)
    tree, small = remove_heads(params, cfg, gone(((), ())))
    assert jax.tree.map(np.shape, tree) == shapes_of(small)
    got = run(oracle.graphdef(small), tree, tokens)[0]
    np.testing.assert_allclose(got, params["embed_VD"][tokens] @ params["unembed_DV"], rtol=1e-5, atol=1e-6)
    assert kv_cache_bytes(small, 100, 2) == 0


@pytest.mark.parametrize("K", [1, 2, 4])
def test_a_whole_training_state_is_cut_alike(K):
    """An update after the cut equals the cut after an update: moments stayed with their heads."""
    fields = dict(num_layers=2, d_model=8, num_heads=4, num_kv_heads=K, vocab_size=11, bias=True, sink=True, mlp="gelu")
    model = oracle.model_config(**fields)
    config = Config(model=model, optimizer=OptimizerConfig(clip_norm=1e9, weight_decay=0.1, warmup_steps=1))
    shapes = jax.eval_shape(lambda: state.init_state(config, 0))
    rng = np.random.default_rng(3)
    whole = jax.tree.map(lambda x: rng.uniform(0.1, 1, x.shape).astype(x.dtype), shapes)
    grads = oracle.random_params(model, 4)
    heads = [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    cut, small = remove_heads(whole, model, heads)
    small_config = dataclasses.replace(config, model=small)
    small_shapes = jax.eval_shape(lambda: state.init_state(small_config, 0))
    assert jax.tree.map(np.shape, cut) == jax.tree.map(np.shape, small_shapes)

    @oracle.quick_jit
    def update(now, grads):
        optimizer = optimizers.make(config.optimizer, config.steps)
        moments = serialization.from_state_dict(jax.eval_shape(optimizer.init, now["params"]), now["optimizer"])
        updates, _ = optimizer.update(grads, moments, now["params"])
        return optax.apply_updates(now["params"], updates)

    want, _ = remove_heads(update(whole, grads), model, heads)
    got = update(cut, remove_heads(grads, model, heads)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_a_tree_of_another_model_is_refused():
    cfg = whole_config(2)
    tree, small = remove_heads(oracle.random_params(cfg, 0), cfg, [(0, 0)])
    with pytest.raises(ValueError, match=r"NH.*7.*the config has 8 heads on axis"):
        remove_heads(tree, cfg, [(0, 1)])
    with pytest.raises(ValueError, match=r"8.*the config has 7 heads on axis"):
        remove_heads(oracle.random_params(cfg, 0), small, [(0, 1)])


def test_device_arrays_stay_device_arrays():
    cfg = oracle.model_config(d_model=8, num_heads=4, num_kv_heads=2)
    params = oracle.random_params(cfg, 0)
    on_device, _ = remove_heads(jax.tree.map(jax.numpy.asarray, params), cfg, [(0, 2), (0, 3)])
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(on_device))
    same_bits(on_device, remove_heads(params, cfg, [(0, 2), (0, 3)])[0])


@pytest.mark.parametrize(("K", "gibibytes"), [(32, 2.0), (8, 0.5), (1, 1 / 16)])
def test_published_cache_sizes(K, gibibytes):
    """32 layers, 4096 tokens, 32 heads of width 128, two bytes a value: GQA with 8 KV heads holds a quarter of MHA."""
    cfg = ModelConfig(num_layers=32, num_heads=32, num_kv_heads=K, head_dim=128)
    assert kv_cache_bytes(cfg, 4096, 2) == gibibytes * 2**30
    assert kv_cache_bytes(dataclasses.replace(cfg, window=1024), 4096, 2) == gibibytes * 2**30 / 4


def test_cache_is_the_keys_and_values_that_there_are():
    cfg = dataclasses.replace(whole_config(4), kept_heads=((0, 2, 5), ()))
    params, tokens = oracle.random_params(cfg, 0), oracle.random_tokens(cfg, 1, 1, T)
    aux = run(oracle.graphdef(cfg), params, tokens, capture=("k", "v"))[1]
    assert kv_cache_bytes(cfg, T, 4) == sum(x[~np.isnan(x)].nbytes for x in (aux.k_LBSKH, aux.v_LBSKH))
    assert kept_heads(whole_config(4)) == (tuple(range(N)),) * 2
