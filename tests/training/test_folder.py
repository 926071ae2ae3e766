"""The run folder: one spelling, whole files, and what a resumed run may change."""
import json
import os
import pathlib
import types

import pytest

from mha_jax import config as configs
from mha_jax.config import ConfigError
from mha_jax.training import folder, sharding
from tests.training import tiny


def written(workdir, cfg):
    folder.write_json(workdir / "config.json", configs.to_dict(cfg))
    folder.write_json(workdir / "environment.json", {"versions": {"mha_jax": "0.0.7"}})


def test_fc_15_every_spelling_of_a_folder_is_the_same_place(tmp_path, monkeypatch):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to("runs/a")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "runs"))
    spellings = ["runs/a", "./runs/a/", "~/a", "link", "runs/../runs/a", pathlib.Path("runs/a"), tmp_path / "link"]
    assert {folder.absolute(s) for s in spellings} == {(tmp_path / "runs" / "a").resolve()}
    assert folder.absolute("new/one") == tmp_path.resolve() / "new" / "one"  # need not exist yet


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "config.json"
    folder.write_json(path, {"a": [1, 2]})
    assert json.loads(path.read_text()) == {"a": [1, 2]}

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        folder.write_json(path, {"a": "new"})
    assert json.loads(path.read_text()) == {"a": [1, 2]}


def test_the_config_comes_back_as_it_was(tmp_path):
    cfg = tiny.config(**{"model.kept_heads": ((0, 2), (1, 3)), "mesh.data": 1})
    written(tmp_path, cfg)
    assert folder.read_config(tmp_path) == cfg
    assert folder.differences(cfg, folder.read_config(tmp_path)) == {}


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/no: not a run folder"):
        folder.read_config(tmp_path / "no")


def test_fc_18_a_key_of_another_version_names_the_version(tmp_path):
    written(tmp_path, tiny.config())
    values = json.loads((tmp_path / "config.json").read_text())
    values["model"]["rotary"] = True
    folder.write_json(tmp_path / "config.json", values)
    with pytest.raises(ConfigError, match=r"config.json was written by mha_jax 0.0.7: config.model.rotary: no such"):
        folder.read_config(tmp_path)
    (tmp_path / "environment.json").unlink()
    with pytest.raises(ConfigError, match=r"written by mha_jax of an unknown version: config.model.rotary: no such"):
        folder.read_config(tmp_path)


@pytest.mark.parametrize(("text", "message"), [
    (b'{"model": ', "config.json: not JSON"),
    (b"", "config.json: not JSON"),
    (b"\xff\xfe\x00", "config.json: not JSON"),
    (b"null", "config.json: holds null, allowed is an object"),
    (b"[]", r"config.json: holds \[\], allowed is an object"),
    (b'{"model": 3}', "config.json was written by mha_jax 0.0.7: config.model = 3: allowed is a section"),
    (b'{"steps": "10"}', "config.json was written by mha_jax 0.0.7: config.steps = '10': allowed is int"),
])  # fmt: skip
def test_a_damaged_config_is_one_line(tmp_path, text, message):
    written(tmp_path, tiny.config())
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        folder.read_config(tmp_path)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


GARBAGE = ["not JSON", '{"versions": ', "null", "[]", "3", "{}", '{"versions": null}', '{"versions": []}']


@pytest.mark.parametrize("text", GARBAGE)
def test_a_damaged_environment_does_not_hide_what_is_wrong_with_the_config(tmp_path, text):
    folder.write_json(tmp_path / "config.json", {"stpes": 3})
    (tmp_path / "environment.json").write_text(text)
    with pytest.raises(ConfigError, match=r"written by mha_jax of an unknown version: config.stpes: no such key"):
        folder.read_config(tmp_path)


@pytest.mark.usefixtures("one_device")
def test_the_environment_keeps_those_before_and_a_damaged_one_is_put_aside(tmp_path):
    mesh, path, said = sharding.make_mesh(tiny.config()), tmp_path / "environment.json", []
    steps = lambda: [e["from_step"] for e in json.loads(path.read_text())["earlier"]]  # noqa: E731
    for step in (0, 10, 20):
        folder.write_environment(tmp_path, mesh, step, pytest.fail)
    assert steps() == [0, 10]
    damaged = ["nonsense", "null", '{"earlier": null}', '{"earlier": 3}']
    for text in damaged:
        path.write_text(text)
        folder.write_environment(tmp_path, mesh, 30, said.append)
        assert steps() == []
    assert [p.read_text() for p in sorted((tmp_path / "damaged").iterdir())] == damaged
    assert len(said) == 4 and all("environment.json" in m and "damaged" in m and "\n" not in m for m in said)
    path.write_text("{}")  # nothing to tell, and nothing wrong
    folder.write_environment(tmp_path, mesh, 40, pytest.fail)
    assert json.loads(path.read_text())["earlier"] == [{}]


def test_of_a_long_error_both_ends_are_said():
    short = folder.first_line(ValueError("too short\nand more"))
    assert short == "ValueError: too short" and folder.first_line(KeyError()) == "KeyError"
    text = folder.first_line(OSError("Error writing" + 300 * "x" + "No space left on device"))
    assert text.startswith("OSError: Error writing") and text.endswith("No space left on device") and len(text) < 220


def test_fc_18_every_differing_key_is_listed_with_both_values(tmp_path):
    written(tmp_path, tiny.config())
    other = tiny.config(**{"model.num_layers": 3, "model.num_kv_heads": 2, "data.period_max": 9, "seed": 4})
    with pytest.raises(ConfigError) as caught:
        folder.check_same_run(tmp_path, other, params_only=False)
    message = str(caught.value)
    for part in ("config.model.num_layers was 2, is 3", "config.model.num_kv_heads was 4, is 2",
                 "config.data.period_max was 8, is 9", "config.seed was 0, is 4", str(tmp_path)):  # fmt: skip
        assert part in message
    assert "--restore=params" not in message and "\n" not in message
    with pytest.raises(ConfigError, match=r"config.model.num_layers was 2, is 3"):
        folder.check_same_run(tmp_path, other, params_only=True)


def test_fc_18_another_optimizer_needs_a_fresh_one(tmp_path):
    written(tmp_path, tiny.config())
    other = tiny.config(**{"optimizer.b1": 0.5, "optimizer.learning_rate": 1.0})
    with pytest.raises(ConfigError, match=r"config.optimizer.learning_rate was 0.002, is 1.0; config.optimizer.b1 was "
                                          r"0.9, is 0.5; .*\(--restore=params"):  # fmt: skip
        folder.check_same_run(tmp_path, other, params_only=False)
    assert folder.check_same_run(tmp_path, other, params_only=True) == []
    assert folder.check_same_run(tmp_path, tiny.config(seed=1), params_only=True) == []


def test_fc_09_what_does_not_make_another_run_may_change(tmp_path):
    written(tmp_path, tiny.config())
    other = tiny.config(**{"name": "b", "steps_per_call": 1, "mesh.tensor": 2, "tracking.log_every": 3,
                           "checkpoint.save": "5", "probes.panel": "5", "data.cache_dir": "/x"})  # fmt: skip
    assert folder.check_same_run(tmp_path, other, params_only=False) == []
    (warning,) = folder.check_same_run(tmp_path, tiny.config(steps=99), params_only=False)
    assert "was 30 and is now 99" in warning


@pytest.mark.usefixtures("one_device")
def test_fc_32_the_environment_says_what_the_run_ran_on():
    found = folder.environment(sharding.make_mesh(tiny.config()))
    assert (found["platform"], found["device_count"], found["process_count"]) == ("cpu", 1, 1)
    assert found["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}
    assert found["versions"]["mha_jax"] == folder.version()
    assert all(found["versions"].values())
    json.dumps(found)


def test_other_data_under_the_same_config_is_refused_by_both_fingerprints_and_what_differs():
    def check(saved, now, name="markov"):
        folder.check_same_data({"step": 3, "data": saved}, types.SimpleNamespace(fingerprint=now, name=name))

    check("abc", "abc")
    with pytest.raises(ConfigError, match=r"markov, is not that of step 3 \(task\): .* is xyz, the .*'s abc$"):
        check("abc", "xyz")
    a, b = "0123456789abcdef", "fedcba9876543210"
    for now, named in (((b, a, a), "tokenizer"), ((a, a, b), "validation tokens"), ((b, b, a), "tokenizer, tr")):
        with pytest.raises(ConfigError, match=rf"not that of step 3 \({named}"):
            check("-".join((a, a, a)), "-".join(now), "files:x")
    with pytest.raises(ConfigError, match="'stdlib' is the library of the Python that runs"):
        check("-".join((a, a, a)), "-".join((a, b, a)), "stdlib")
