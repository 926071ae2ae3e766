"""Every fault of a config is met before anything compiles, by one line that names keys and numbers."""
import dataclasses
import math
import os
from typing import Optional

import pytest

from mha_jax import validation
from mha_jax.config import Config, ConfigError, flat
from mha_jax.validation import check_devices, resolve


def make(**values) -> Config:
    """A config with values set as a config file or a flag does it: `model__num_heads=2`."""
    config = Config()
    for key, value in values.items():
        section, _, field = key.rpartition("__")
        setattr(getattr(config, section) if section else config, field, value)
    return config


def message(config, call=resolve) -> str:
    with pytest.raises(ConfigError) as error:
        call(config)
    assert isinstance(error.value, ValueError)
    text = str(error.value)
    assert "\n" not in text and text.startswith("config.")
    return text


def test_defaults_resolve_to_a_complete_config():
    config = resolve(Config())
    assert (config.model.head_dim, config.model.vocab_size, config.model.max_length) == (16, 64, 64)
    assert config.model.d_mlp is None
    assert resolve(config) == config, "what is resolved resolves to itself"


def test_resolve_leaves_what_it_is_given_alone():
    config = Config()
    resolve(config)
    assert config == Config() and config.model.head_dim is None


def test_every_choice_key_exists_and_each_choice_is_taken():
    values = flat(Config())
    assert set(validation.CHOICES) | set(validation.POSITIVE) | set(validation.NOT_NEGATIVE) <= set(values)
    for key, allowed in validation.CHOICES.items():
        assert values[key] in allowed
        for choice in allowed:
            extra = {"data__vocab_size": 512} if choice == "text" else {}
            assert flat(resolve(make(**{key.replace(".", "__"): choice}, **extra)))[key] == choice


@pytest.mark.parametrize(("values", "derived"), [
    ({"model__d_model": 96, "model__num_heads": 3, "model__num_kv_heads": 1}, {"model.head_dim": 32}),
    ({"model__head_dim": 10}, {"model.head_dim": 10}),
    ({"model__d_model": 30, "model__head_dim": 8}, {"model.head_dim": 8}),
    ({"model__mlp": "gelu"}, {"model.d_mlp": 256}),
    ({"model__mlp": "swiglu"}, {"model.d_mlp": 176}),  # 8/3 x 64 = 170.67, up to a multiple of 8
    ({"model__mlp": "swiglu", "model__d_model": 96}, {"model.d_mlp": 256}),  # 8/3 x 96 = 256 exactly
    ({"model__mlp": "swiglu", "model__d_mlp": 100}, {"model.d_mlp": 100}),
    ({"data__length": 100}, {"model.max_length": 100}),
    ({"data__vocab_size": 99}, {"model.vocab_size": 99}),
    ({"model__vocab_size": 70}, {"model.vocab_size": 70}),
    ({"data__task": "text", "data__tokenizer": "bytes"}, {"data.vocab_size": 257, "model.vocab_size": 257}),
    ({"data__task": "text", "data__vocab_size": 9, "data__dataset": "files:a/../b/*.txt", "data__tokenizer": "t.json"},
     {"data.dataset": f"files:{os.getcwd()}/b/*.txt", "data.tokenizer": f"{os.getcwd()}/t.json"}),
    ({"model__positions": "none", "model__max_length": 8}, {"model.max_length": 8}),
])  # fmt: skip
def test_derived_values(values, derived):
    resolved = flat(resolve(make(**values)))
    assert {key: resolved[key] for key in derived} == derived


def test_fc_06_numbers_that_do_not_divide():
    for values, parts in (
        ({"model__d_model": 30}, ("model.d_model = 30", "model.num_heads = 4", "model.head_dim")),
        ({"model__num_kv_heads": 3}, ("model.num_heads = 4", "model.num_kv_heads = 3", "1, 2, 4")),
        ({"model__num_kv_heads": 8}, ("model.num_heads = 4", "model.num_kv_heads = 8", "1, 2, 4")),
        ({"model__head_dim": 5}, ("model.head_dim = 5", "even", "rope")),
        (
            {"data__batch_size": 8, "optimizer__accumulation": 3},
            ("data.batch_size = 8", "optimizer.accumulation = 3"),
        ),
    ):
        text = message(make(**values))
        assert all(part in text for part in parts), text


@pytest.mark.parametrize(("values", "parts"), [
    ({"mesh__data": 2, "mesh__fsdp": 2}, ("mesh.data = 2", "mesh.fsdp = 2", "mesh.tensor = 1", "4", "devices, 8")),
    ({"mesh__data": 3}, ("mesh.data = 3", "devices, 8")),
    ({"mesh__data": 16}, ("mesh.data = 16", "devices, 8")),
    ({"mesh__data": 4, "mesh__fsdp": 2, "mesh__tensor": 2}, ("16", "devices, 8")),
    ({"mesh__fsdp": 3}, ("mesh.fsdp = 3", "devices, 8")),
    ({"mesh__fsdp": 16}, ("mesh.fsdp = 16", "devices, 8")),
    ({"data__batch_size": 6, "mesh__data": 4, "mesh__tensor": 2}, ("data.batch_size = 6", "mesh.data", "= 4")),
    (
        {"data__batch_size": 24, "optimizer__accumulation": 6},
        ("data.batch_size = 24", "optimizer.accumulation = 6", "4 rows", "mesh.data x config.mesh.fsdp = 8"),
    ),
    ({"data__eval_rows": 100}, ("data.eval_rows = 100", "= 8")),
    ({"probes__rows": 4}, ("probes.rows = 4", "= 8")),
    ({"probes__repeats": 12}, ("probes.repeats = 12", "= 8")),
    (
        {"model__num_heads": 6, "model__num_kv_heads": 6, "model__head_dim": 8, "mesh__tensor": 4},
        ("model.num_heads = 6", "mesh.tensor = 4"),
    ),
    (
        {"model__kept_heads": ((0, 1), (3,)), "mesh__tensor": 2},
        ("model.num_heads = 1", "layer 1", "mesh.tensor = 2"),
    ),
])  # fmt: skip
def test_fc_06_meshes_that_do_not_fit_eight_devices(values, parts):
    config = resolve(make(**values))
    text = message(config, lambda c: check_devices(c, 8))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(("values", "axes"), [
    ({}, (8, 1, 1)),
    ({"mesh__fsdp": 2}, (4, 2, 1)),
    ({"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}, (2, 2, 2)),
    ({"mesh__fsdp": 8}, (1, 8, 1)),
    ({"mesh__tensor": 4, "model__num_kv_heads": 2}, (2, 1, 4)),  # fewer KV heads than the axis: replicated
    ({"mesh__tensor": 2, "model__kept_heads": ((0, 1), ())}, (4, 1, 2)),
])  # fmt: skip
def test_fc_06_meshes_that_fit(values, axes):
    assert check_devices(resolve(make(**values)), 8) == axes


def test_one_device_takes_any_batch():
    assert check_devices(resolve(make(data__batch_size=7, data__eval_rows=5, probes__rows=3)), 1) == (1, 1, 1)


LEAVES = [(section, key) for section, _, key in (k.rpartition(".") for k in flat(Config())) if section]
SECTIONS = sorted({section for section, _ in LEAVES})


@pytest.mark.parametrize("section", SECTIONS)
def test_fc_31_right_key_in_the_wrong_section(section):
    for key in sorted({key for _, key in LEAVES}):
        if not hasattr(getattr(Config(), section), key):
            text = message(make(**{f"{section}__{key}": 1}))
            assert text.startswith(f"config.{section}.{key}: no such key")
            homes = {h for h, k in LEAVES if k == key}
            assert text.partition("did you mean ")[2] in {f"config.{h}.{key}?" for h in homes}, text


def test_fc_31_keys_that_a_file_invents():
    assert "config.model.num_heads?" in message(make(model__num_head=2))
    assert "config.seed?" in message(make(sede=1))


@pytest.mark.parametrize(("key", "value", "allowed"), [
    ("model__num_heads", "four", "int"), ("model__num_heads", 3.5, "int"), ("model__num_heads", 4.0, "int"),
    ("model__num_heads", True, "int"), ("model__num_heads", None, "int"), ("model__head_dim", "16", "Optional[int]"),
    ("model__bias", 0, "bool"), ("model__bias", "true", "bool"), ("optimizer__learning_rate", "1e-3", "float"),
    ("optimizer__learning_rate", True, "float"), ("optimizer__learning_rate", math.nan, "finite"),
    ("optimizer__clip_norm", math.inf, "finite"), ("optimizer__eps", 10**400, "finite"),
    ("model__mlp", None, "str"), ("probes__panel", 50, "str"),
    ("model__kept_heads", [[0], [1]], "tuple"), ("model__kept_heads", ((0,), (1.0,)), "tuple"),
    ("probes__periods", (8, "9"), "tuple"), ("steps", "10", "int"), ("name", 3, "str"), ("model", None, "ModelConfig"),
    ("model", {"num_heads": 4}, "ModelConfig"),
])  # fmt: skip
def test_fc_31_wrong_types(key, value, allowed):
    text = message(make(**{key: value}))
    assert text.startswith(f"config.{key.replace('__', '.')} = {value!r}: allowed is ") and allowed in text


@pytest.mark.parametrize("key", ["optimizer__learning_rate", "optimizer__clip_norm", "tracking__timeout"])
def test_fc_31_an_int_is_a_float(key):
    assert flat(resolve(make(**{key: 1})))[key.replace("__", ".")] == 1


@pytest.mark.parametrize(("values", "parts"), [
    ({"model__mlp": "gelou"}, ("model.mlp = 'gelou'", "none, gelu, swiglu", "did you mean 'gelu'")),
    ({"data__task": "repeats"}, ("data.task = 'repeats'", "did you mean 'repeat'")),
    ({"model__attention": "flash"}, ("model.attention = 'flash'", "auto, einsum, blockwise, fused")),
    ({"model__attention": "fused", "model__sink": True}, ("model.attention = 'fused'", "model.sink = True", "einsum")),
    ({"steps": -1}, ("steps = -1", "0 or more")),
    ({"steps": 2**26 + 1}, ("steps = 67108865", "data.batch_size = 64", "at most 2^32 rows")),
    ({"model__num_layers": 0}, ("model.num_layers = 0", "above 0")),
    ({"model__window": 0}, ("model.window = 0", "above 0")),
    ({"optimizer__learning_rate": 0.0}, ("optimizer.learning_rate = 0.0", "above 0")),
    ({"optimizer__end_learning_rate": 0.1}, ("end_learning_rate = 0.1", "learning_rate = 0.002")),
    ({"optimizer__b2": 1.0}, ("optimizer.b2 = 1.0", "below 1")),
    ({"data__length": 1, "data__task": "markov"}, ("data.length = 1", "2 or more")),
    ({"data__period_min": 40}, ("data.period_min = 40", "data.period_max = 32")),
    ({"data__vocab_size": 20}, ("data.period_max = 32", "data.vocab_size = 20", "iid")),
    ({"data__length": 32}, ("data.period_max = 32", "data.length = 32", "period_max < length")),
    ({"data__period_min": 1}, ("data.period_min = 1", "period_min >= 2")),
    ({"data__task": "trigger", "data__num_triggers": 63}, ("data.num_triggers = 63", "vocab_size - 2 = 62")),
    ({"data__trigger_rate": 1.0}, ("data.trigger_rate = 1.0", "between 0 and 1")),
    ({"data__trigger_prior": 0.0}, ("data.trigger_prior = 0.0", "between 0 and 1")),
    ({"data__task": "markov", "data__vocab_size": 1}, ("data.vocab_size = 1", "2 or more")),
    ({"data__task": "text", "data__vocab_size": 100}, ("data.vocab_size = 100", "257")),
    ({"data__task": "text", "data__tokenizer": "wordpiece"}, ("data.tokenizer = 'wordpiece'", "bpe, bytes, or the ")),
    *(({"data__task": "text", "data__vocab_size": 512, "data__validation": bad}, (f"data.validation = {bad!r}", "auto"))
      for bad in ("0%", "100%", "0", "five", "5 %", "-1", "1.5", "")),
    ({"model__vocab_size": 60}, ("model.vocab_size = 60", "data.vocab_size = 64")),
    ({"model__positions": "learned", "model__max_length": 60}, ("data.length = 64", "model.max_length = 60")),
    ({"model__positions": "shortformer", "model__max_length": 9}, ("data.length = 64", "model.max_length = 9")),
    ({"model__kept_heads": ((0,),)}, ("kept_heads names 1", "model.num_layers = 2")),
    ({"model__kept_heads": ((1, 0), ())}, ("kept_heads[0] = (1, 0)", "model.num_heads = 4")),
    ({"model__kept_heads": ((), (2, 2))}, ("kept_heads[1] = (2, 2)",)),
    ({"model__kept_heads": ((), (4,))}, ("kept_heads[1] = (4,)", "model.num_heads = 4")),
    ({"model__kept_heads": ((-1,), ())}, ("kept_heads[0] = (-1,)",)),
    ({"probes__periods": (2, 8)}, ("probes.periods = (2, 8)", "3", "data.length = 64")),
    ({"probes__periods": (8, 33)}, ("probes.periods = (8, 33)",)),
    ({"probes__panel": "often"}, ("probes.panel = 'often'", "log:N")),
    ({"checkpoint__save": "all"}, ("checkpoint.save = 'all'", "never")),
    ({"checkpoint__keep": "best"}, ("checkpoint.keep = 'best'", "at:A,B,C")),
])  # fmt: skip
def test_values_that_are_not_allowed(values, parts):
    text = message(make(**values))
    assert all(part in text for part in parts), text


INTS = [(f"{section.name}__{f.name}", f"{section.name}.{f.name}")
        for section in dataclasses.fields(Config) if dataclasses.is_dataclass(section.type)
        for f in dataclasses.fields(section.type) if f.type in (int, Optional[int])]  # fmt: skip
INTS += [(f.name, f.name) for f in dataclasses.fields(Config) if f.type is int]


@pytest.mark.parametrize(("field", "key"), INTS)
def test_fc_31_every_int_has_a_lower_bound_and_stays_below_2_to_the_31(field, key):
    for value in (2**31, 10**12):
        assert message(make(**{field: value})) == f"config.{key} = {value}: allowed is below 2^31"
    assert message(make(**{field: -1})) in [f"config.{key} = -1: allowed is {x}" for x in ("above 0", "0 or more")]


def test_what_is_allowed_at_the_edges():
    resolve(make(data__length=33))
    resolve(make(data__block="iid", data__vocab_size=2))
    resolve(make(data__task="trigger", data__num_triggers=62))
    resolve(make(steps=0, optimizer__warmup_steps=0, optimizer__end_learning_rate=0.0, checkpoint__keep_best=0))
    resolve(make(checkpoint__keep="at:0,5", checkpoint__save="never", probes__periods=(3, 32)))
    resolve(make(model__kept_heads=((), (0, 1, 2, 3)), model__head_dim=5, model__positions="none"))
    most = 2**31 - 1
    resolve(make(seed=most, data__table_seed=most, model__window=most, optimizer__warmup_steps=most))
    resolve(make(steps=2**26, data__batch_size=64))
    resolve(make(steps=most, data__task="text", data__vocab_size=257))
