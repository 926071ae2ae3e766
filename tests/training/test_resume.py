"""A resumed run loses nothing and repeats nothing, and says what it does not take up."""
import shutil

import jax
import numpy as np
import pytest

from mha_jax import run
from mha_jax.config import ConfigError
from mha_jax.data.source import make_source
from mha_jax.data.tokenizer import Tokenizer
from mha_jax.training import loop, optimizer, step
from mha_jax.training.checkpoint import Checkpoints
from tests.training import tiny

pytestmark = [
    pytest.mark.usefixtures("shared_programs"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # Orbax, after a failed restore
]


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(("kv_heads", "stops"), [
    (4, [(14, tiny.terminate), (25, tiny.terminate)]),  # nothing is due at 14; at 25 a light probe
    pytest.param(4, [(25, tiny.terminate), (29, tiny.kill), (29, tiny.terminate)], marks=pytest.mark.slow),
    (1, [(10, tiny.terminate), (19, tiny.kill), (20, tiny.terminate), (24, tiny.kill)]),
    pytest.param(4, [(4, tiny.kill), (9, tiny.kill)], marks=pytest.mark.slow),
], ids=["terminated", "light probe", "panel, MQA", "killed"])  # fmt: skip
def test_fc_11_a_resumed_run_is_the_run_it_would_have_been(whole, tmp_path, monkeypatch, kv_heads, stops):
    cfg, expected = tiny.config(**{"model.num_kv_heads": kv_heads}), whole(kv_heads)
    for at, how in stops:
        tiny.interrupted(monkeypatch, cfg, tmp_path, at, how)
    _, said = tiny.train(cfg, tmp_path)
    assert any(line.startswith("resumes exactly from step ") for line in said)
    tiny.assert_same_run(cfg, expected, tmp_path)


@pytest.mark.usefixtures("one_device")
def test_a_finished_run_started_again_changes_nothing(whole, tmp_path):
    cfg = tiny.config()
    first, _ = tiny.train(cfg, tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text()
    again, said = tiny.train(cfg, tmp_path)
    assert "resumes exactly from step 30" in said
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    timed = {"seconds", "compile_seconds", "tokens_per_second", "probe_share", "input_share"}
    assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in again.items() if k not in timed}
    tiny.assert_same_run(cfg, whole(4), tmp_path)


@pytest.mark.usefixtures("one_device")
def test_fc_11_a_resumed_run_reads_its_data_with_its_own_tokenizer(tmp_path, monkeypatch):
    given = []

    def recording(cfg, mesh, tokenizer):
        given.append(tokenizer)
        return make_source(cfg, mesh)

    monkeypatch.setattr(loop, "make_source", recording)
    tiny.train(tiny.config(), tmp_path)
    own = Tokenizer()
    own.save(tmp_path / "tokenizer.json")
    tiny.train(tiny.config(), tmp_path)
    assert given[0] is None and given[1].fingerprint == own.fingerprint


@pytest.mark.usefixtures("one_device")
def test_fc_11_every_step_has_its_batch_whatever_was_interrupted(tmp_path, monkeypatch):
    seen = {}
    compile_train_steps = step.compile_train_steps

    def recording(cfg, *args):
        run = compile_train_steps(cfg, *args)

        def train_steps(state, batches, count):
            for i in range(int(count)):
                tokens = np.asarray(batches["inputs_BT"][i]).tobytes()
                assert seen.setdefault(int(state["step"]) + i, tokens) == tokens  # a repeated step, the same batch
            return run(state, batches, count)

        return train_steps

    monkeypatch.setattr(step, "compile_train_steps", recording)
    tiny.train(tiny.config(), tmp_path / "whole")
    assert sorted(seen) == list(range(30)) and len(set(seen.values())) == 30
    for at, how in [(14, tiny.terminate), (24, tiny.kill)]:
        tiny.interrupted(monkeypatch, tiny.config(), tmp_path / "cut", at, how)
    tiny.train(tiny.config(), tmp_path / "cut")


@pytest.mark.usefixtures("one_device")
def test_fc_09_a_new_horizon_is_said_and_followed(whole, tmp_path, monkeypatch):
    tiny.interrupted(monkeypatch, tiny.config(), tmp_path, 20, tiny.terminate)
    longer = tiny.config(steps=40)
    _, said = tiny.train(longer, tmp_path)
    assert "warning: config.steps was 30 and is now 40: the learning rate follows the new total, 40" in said
    rates = {e["step"]: e["train/learning_rate"] for e in tiny.events(tmp_path) if "train/loss" in e}
    old, new = (optimizer.learning_rate(longer.optimizer, steps) for steps in (30, 40))
    expected = {0: old(0), 10: old(10), 20: new(20), 30: new(30)}
    assert rates == pytest.approx({step: float(rate) for step, rate in expected.items()}, rel=1e-6)
    with pytest.raises(ConfigError, match=r"config.steps = 30 is less than the saved step 40"):
        tiny.train(tiny.config(), tmp_path)


@pytest.mark.usefixtures("one_device")
def test_fc_18_parameters_alone_start_a_fresh_optimizer_where_they_stand(whole, tmp_path, monkeypatch):
    old, new = tiny.config(), tiny.config(**{"optimizer.b2": 0.9, "checkpoint.save": "at:20,21"})
    tiny.interrupted(monkeypatch, old, tmp_path, 20, tiny.terminate)
    before = {p: (tmp_path / p).read_bytes() for p in ("config.json", "environment.json", "metrics.jsonl")}
    with pytest.raises(ConfigError, match=r"config.optimizer.b2 was 0.95, is 0.9; .*--restore=params"):
        tiny.train(new, tmp_path)
    assert before == {p: (tmp_path / p).read_bytes() for p in before}
    _, said = tiny.train(new, tmp_path, restore="params")
    assert "resumes parameters alone, with a fresh optimizer from step 20" in said
    a, b = tiny.saved(new, tmp_path, 20), tiny.saved(new, tmp_path, 21)
    rate = optimizer.learning_rate(new.optimizer, 30)
    (line,) = [e for e in tiny.events(tmp_path) if e["step"] == 20 and "train/loss" in e]
    assert line["train/learning_rate"] == pytest.approx(float(rate(20)), rel=1e-6)
    # Adam's first update moves every parameter by the rate, in the direction of its gradient: the rate that was
    # logged is the one that was applied, and the moments were fresh. Weight decay takes a share of the value.
    name = "['params']['layers']['layer_00']['attention']['wq_DNH']"
    moved = b[name] - a[name] * (1 - rate(20) * new.optimizer.weight_decay)
    np.testing.assert_allclose(np.abs(moved), rate(20), rtol=1e-2)
    assert b["['optimizer']['1']['0']['count']"] == 1


@pytest.mark.usefixtures("one_device")
def test_fc_18_optimizer_state_of_other_settings_is_never_taken_for_exact(whole, tmp_path, monkeypatch):
    old, new = tiny.config(), tiny.config(**{"optimizer.b2": 0.9})
    tiny.interrupted(monkeypatch, old, tmp_path, 20, tiny.terminate)
    tiny.stop_at(monkeypatch, 24, tiny.kill)
    with pytest.raises(tiny.Killed):
        tiny.train(new, tmp_path, restore="params")
    with pytest.raises(ConfigError, match=r"checkpoint 20 .*config.optimizer.b2 was 0.95, is 0.9"):
        tiny.train(new, tmp_path)


@pytest.mark.usefixtures("one_device")
def test_parameters_alone_of_a_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"--restore=params: .* has no checkpoint"):
        tiny.train(tiny.config(), tmp_path / "new", restore="params")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("one_device")
def test_fc_16_a_run_resumes_before_damaged_checkpoints_and_saves_them_again(whole, tmp_path, monkeypatch):
    cfg = tiny.config()
    tiny.train(cfg, tmp_path)
    folder = tmp_path / "checkpoints"
    for array in (folder / "30" / "params").rglob("d/*"):
        array.unlink()
    for path in sorted((folder / "20").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "40.orbax-checkpoint-tmp").mkdir()
    _, said = tiny.train(cfg, tmp_path)
    warned = [line for line in said if line.startswith("warning: checkpoint ")]
    assert [line.split()[2] for line in warned] == ["30", "20"]
    assert "resumes exactly from step 10" in said
    assert sorted(p.name for p in (tmp_path / "damaged").iterdir()) == ["20", "30"]
    assert Checkpoints(tmp_path, cfg.checkpoint).steps() == [0, 10, 20, 30]
    tiny.assert_same_run(cfg, whole(4), tmp_path)


@pytest.mark.slow
def test_fc_14_other_meshes_read_and_continue_a_run(tmp_path, monkeypatch):
    def mesh(**sizes):
        return tiny.config(**{f"mesh.{k}": v for k, v in sizes.items()} | {
            "steps": 12, "model.num_layers": 1, "probes.panel": "6", "checkpoint.save": "6", "tracking.log_every": 1,
            "probes.induction_every": 100})  # fmt: skip

    tiny.train(mesh(data=2, fsdp=2, tensor=2), tmp_path / "222")
    expected = tiny.events(tmp_path / "222")
    for name, sizes in {"181": {"data": 1, "fsdp": 8}, "811": {"data": 8}}.items():
        copy = tmp_path / name
        shutil.copytree(tmp_path / "222", copy)
        shutil.rmtree(copy / "checkpoints" / "12")
        _, said = tiny.train(mesh(**sizes), copy)
        assert "resumes exactly from step 6" in said
        for a, b in zip(expected, tiny.events(copy), strict=True):
            assert a.keys() == b.keys() and a["step"] == b["step"]
            for key in ("train/loss", "eval/loss"):
                assert abs(a.get(key, 0) - b.get(key, 0)) < 1e-4
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:1])
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    alone = run.open_run(tmp_path / "222")
    assert alone.mesh.devices.size == 1
    loss = {e["step"]: e["eval/loss"] for e in expected if "eval/loss" in e}
    for at in (6, 12):
        assert abs(alone.at(at).reading.values["eval/loss"] - loss[at]) < 1e-5
