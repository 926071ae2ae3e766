"""A config as a nested and as a flat dict, and the error for a key that it does not have."""
import dataclasses
import json

import pytest

from mha_jax.config import Config, flat, from_dict, to_dict, unknown_key
from mha_jax.validation import resolve
from tests.test_validation import make, message


@pytest.mark.parametrize(("wrong", "right"), [
    ("model.num_head", "model.num_heads"), ("model.dmodel", "model.d_model"), ("model.n_layers", "model.num_layers"),
    ("optimizer.learning_rat", "optimizer.learning_rate"), ("optimiser.learning_rate", "optimizer.learning_rate"),
    ("data.batchsize", "data.batch_size"), ("sed", "seed"), ("step", "steps"), ("step_per_call", "steps_per_call"),
    ("tracking.wanbd", "tracking.wandb"), ("learning_rate", "optimizer.learning_rate"),
    ("num_kv_heads", "model.num_kv_heads"), ("model.position", "model.positions"),
])  # fmt: skip
def test_fc_31_misspelt_keys_name_the_nearest(wrong, right):
    assert str(unknown_key(wrong)) == f"config.{wrong}: no such key; did you mean config.{right}?"


def test_fc_31_keys_that_a_saved_config_invents():
    assert "config.model.num_heads?" in message({"model": {"num_head": 4}}, from_dict)
    assert message({"optimiser": {}}, from_dict).startswith("config.optimiser: no such key")
    assert message({"model": 5}, from_dict).startswith("config.model = 5: allowed is a section")


def test_saved_configs_with_unknown_keys_are_refused():
    values = to_dict(resolve(Config()))
    values["model"]["dropout"] = 0.1
    assert "config.model.dropout" in message(values, from_dict)


def test_json_round_trip():
    """Through the text of config.json: tuples come back as tuples, so that configs compare equal."""
    config = resolve(make(model__kept_heads=((0, 2), ()), probes__periods=(8, 12), optimizer__learning_rate=1))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert config.model.kept_heads == ((0, 2), ())


def test_flat_names_every_field_once():
    keys = list(flat(Config()))
    count = sum(
        len(dataclasses.fields(getattr(Config(), f.name))) if dataclasses.is_dataclass(f.type) else 1
        for f in dataclasses.fields(Config)
    )
    assert len(keys) == len(set(keys)) == count
    assert keys[0] == "name" and "model.kept_heads" in keys
