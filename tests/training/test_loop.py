"""Resuming loses nothing and repeats nothing; what is not finite stops the run; the device is never waited for."""
import itertools
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax import run
from mha_jax.config import ConfigError
from mha_jax.data.source import make_source
from mha_jax.training import loop, optimizer, sharding, state, step
from mha_jax.training.checkpoint import CheckpointError, Checkpoints
from tests.training import tiny

pytestmark = [
    pytest.mark.usefixtures("shared_programs"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # Orbax, after a failed restore
]


class Killed(BaseException):
    """kill -9, as far as the files are concerned."""


def stop_at(monkeypatch, at: int, how):
    """Calls `how` after the device call that reaches step `at`; a run that never reaches it fails the test."""
    advance = loop.Training._advance

    def and_stop(self):
        advance(self)
        if self.progress.step == at:
            monkeypatch.setattr(loop.Training, "_advance", advance)
            how()
        assert self.progress.step <= at or loop.Training._advance is advance

    monkeypatch.setattr(loop.Training, "_advance", and_stop)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def kill():
    raise Killed


def interrupted(monkeypatch, cfg, workdir, at, how):
    stop_at(monkeypatch, at, how)
    with pytest.raises((loop.Stopped, Killed)) as caught:
        tiny.train(cfg, workdir)
    if caught.type is loop.Stopped:
        assert caught.value.code == 143
        assert Checkpoints(workdir, cfg.checkpoint).steps()[-1] == at


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """kv_heads -> folder of a run that nothing interrupted."""
    made = {}

    def folder(kv_heads):
        if kv_heads not in made:
            made[kv_heads] = tmp_path_factory.mktemp(f"whole{kv_heads}")
            tiny.train(tiny.config(**{"model.num_kv_heads": kv_heads}), made[kv_heads])
        return made[kv_heads]

    return folder


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(("kv_heads", "stops"), [
    (4, [(14, terminate), (25, terminate)]),  # nothing is due at 14; at 25 a light probe
    (4, [(25, terminate), (29, kill), (29, terminate)]),  # begins twice where a light probe stands already
    (1, [(10, terminate), (19, kill), (20, terminate), (24, kill)]),
    (4, [(4, kill), (9, kill)]),
], ids=["terminated", "light probe", "panel, MQA", "killed"])  # fmt: skip
def test_fc_11_a_resumed_run_is_the_run_it_would_have_been(whole, tmp_path, monkeypatch, kv_heads, stops):
    cfg, expected = tiny.config(**{"model.num_kv_heads": kv_heads}), whole(kv_heads)
    for at, how in stops:
        interrupted(monkeypatch, cfg, tmp_path, at, how)
    _, said = tiny.train(cfg, tmp_path)
    assert any(line.startswith("resumes exactly from step ") for line in said)
    tiny.assert_same_run(cfg, expected, tmp_path)


@pytest.mark.usefixtures("one_device")
def test_what_a_run_logs(whole):
    events = tiny.events(whole(4))
    at = lambda key: [e["step"] for e in events if key in e]  # noqa: E731
    assert at("eval/loss") == [0, 10, 20, 30]
    assert at("induction/max") == [0, 5, 10, 15, 20, 25, 30]
    assert at("train/loss") == [0, 10, 20]
    assert [e["step"] for e in events] == sorted(e["step"] for e in events)
    assert all(e["tokens"] == e["step"] * tiny.BATCH * tiny.LENGTH for e in events)
    assert sorted(tiny.probes(whole(4))) == [f"{s:06d}.npz" for s in (0, 10, 20, 30)]
    rate = optimizer.learning_rate(tiny.config().optimizer, tiny.STEPS)
    assert [e["train/learning_rate"] for e in events if "train/loss" in e] == pytest.approx(
        [float(rate(s)) for s in (0, 10, 20)], rel=1e-6)  # fmt: skip


@pytest.mark.usefixtures("one_device")
def test_a_finished_run_started_again_changes_nothing(whole, tmp_path):
    cfg = tiny.config()
    first, _ = tiny.train(cfg, tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text()
    again, said = tiny.train(cfg, tmp_path)
    assert "resumes exactly from step 30" in said
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    timed = {"seconds", "compile_seconds", "tokens_per_second", "probe_share"}
    assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in again.items() if k not in timed}
    tiny.assert_same_run(cfg, whole(4), tmp_path)


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
    for at, how in [(14, terminate), (24, kill)]:
        interrupted(monkeypatch, tiny.config(), tmp_path / "cut", at, how)
    tiny.train(tiny.config(), tmp_path / "cut")


@pytest.mark.usefixtures("one_device")
def test_a_saved_checkpoint_gives_the_probe_of_its_step_bit_for_bit(whole):
    opened = run.open_run(whole(4))
    for at in (10, 30):
        reading, meta = opened.measure(at)
        logged = tiny.probes(whole(4))[f"{at:06d}.npz"]
        assert logged.pop("step") == meta["step"] == at
        tiny.assert_same_bits(reading.arrays, logged)
        (line,) = [e for e in tiny.events(whole(4)) if e["step"] == at and "eval/loss" in e]
        assert {k: line[k] for k in reading.values} == reading.values
        assert meta["eval_loss"] == line["eval/loss"]


@pytest.mark.usefixtures("one_device")
def test_fc_13_equal_seeds_agree_and_others_differ_in_parameters_and_batches():
    def start(seed):
        cfg = tiny.config(seed=seed)
        mesh = sharding.make_mesh(cfg)
        batch = make_source(cfg, mesh).batches(0, 1)["inputs_BT"][0]
        params = state.sharded_init(cfg, mesh)["params"]
        return np.asarray(batch).tobytes(), np.asarray(params["unembed_DV"]).tobytes()

    zero, one = start(0), start(1)
    assert zero == start(0)
    assert zero[0] != one[0] and zero[1] != one[1]


@pytest.mark.usefixtures("one_device")
def test_fc_13_the_step_is_traced_and_compiled_once_and_read_one_call_late(tmp_path, monkeypatch):
    cfg = tiny.config(**{"optimizer.b1": 0.8, "probes.panel": "at:30", "checkpoint.save": "at:30",
                         "probes.induction_every": 30})  # fmt: skip
    traces, compiled, order = [], [], []
    train_step, compile_train_steps, log_train = step.train_step, step.compile_train_steps, loop.Training._log_train

    def traced(*args, **kwargs):
        traces.append(1)
        return train_step(*args, **kwargs)

    def compile_and_watch(*args):
        compiled.append(1)
        run = compile_train_steps(*args)

        def dispatch(state, batches, count):
            order.append(("dispatch", len([o for o in order if o[0] == "dispatch"]) * 4))
            return run(state, batches, count)

        return dispatch

    def read(self, waiting):
        if waiting is not None:
            order.append(("read", waiting[0]))
        return log_train(self, waiting)

    monkeypatch.setattr(step, "train_step", traced)
    monkeypatch.setattr(step, "compile_train_steps", compile_and_watch)
    monkeypatch.setattr(loop.Training, "_log_train", read)
    after_compile = []
    run_loop = loop.Training._loop
    monkeypatch.setattr(loop.Training, "_loop", lambda self: (after_compile.append(len(traces)), run_loop(self)))
    tiny.train(cfg, tmp_path)
    assert compiled == [1]
    assert len(traces) == after_compile[0] >= 1
    starts = list(range(0, 30, 4))
    expected = [("dispatch", 0)]
    for before, at in itertools.pairwise(starts):
        expected += [("dispatch", at), ("read", before)]
    assert order == [*expected, ("read", starts[-1])]


class Poisoned:
    """A source whose batch of one step has infinite weights, hence a loss that is not finite."""

    def __init__(self, source, at):
        self._source, self._at = source, at

    def __getattr__(self, name):
        return getattr(self._source, name)

    def batches(self, first, n):
        batches = self._source.batches(first, n)
        if first <= self._at < first + n:
            batches["weights_BT"] = batches["weights_BT"].at[self._at - first].set(jnp.inf)
        return batches


@pytest.mark.usefixtures("one_device")
def test_fc_12_a_loss_that_is_not_finite_stops_the_run_at_its_step(whole, tmp_path, monkeypatch):
    cfg = tiny.config()
    monkeypatch.setattr(loop, "make_source", lambda *args: Poisoned(make_source(*args), 17))
    for _ in range(2):  # started again it fails again, and says so once
        with pytest.raises(loop.NonFinite, match=r"step 17: loss (inf|nan).*last checkpoint is step 10") as caught:
            tiny.train(cfg, tmp_path)
        assert caught.value.step == 17
        assert [e for e in tiny.events(tmp_path) if "failed_at" in e] == [
            {"step": 17, "tokens": 17 * tiny.BATCH * tiny.LENGTH, "failed_at": 17}]  # fmt: skip
    assert max(e["step"] for e in tiny.events(tmp_path)) == 17
    assert [e["train/loss"] for e in tiny.events(tmp_path) if e["step"] == 17 and "train/loss" in e] == [None]
    assert Checkpoints(tmp_path, cfg.checkpoint).steps() == [0, 10]
    tiny.assert_same_bits(tiny.saved(cfg, tmp_path, 10), tiny.saved(cfg, whole(4), 10))
    assert all(np.isfinite(x).all() for x in tiny.saved(cfg, tmp_path, 10).values())
    monkeypatch.setattr(loop, "make_source", make_source)  # a good source again: as if nothing had happened
    tiny.train(cfg, tmp_path)
    tiny.assert_same_run(cfg, whole(4), tmp_path)


@pytest.mark.usefixtures("one_device")
def test_fc_12_a_run_that_fails_at_its_first_step_has_no_checkpoint_to_name(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "make_source", lambda *args: Poisoned(make_source(*args), 0))
    with pytest.raises(loop.NonFinite, match=r"step 0: .*there is no checkpoint"):
        tiny.train(tiny.config(**{"checkpoint.save": "at:30"}), tmp_path)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(("save", "expected"), [("log:100", [0, 1, 2, 4, 8, 16, 30]), ("at:7", [7, 30]), ("never", [])])
def test_fc_15_the_last_step_is_saved_though_no_multiple(tmp_path, save, expected):
    # Without a panel schedule the first light probe has no panel before it.
    cfg = tiny.config(**{"checkpoint.save": save, "probes.panel": "never"})
    summary, _ = tiny.train(cfg, tmp_path)
    assert Checkpoints(tmp_path, cfg.checkpoint).steps() == [s for s in range(31) if s in expected or s in {
        "log:100": {64}, "at:7": set(), "never": set()}[save]]  # fmt: skip
    assert summary["steps"] == 30 and np.isfinite(summary["final_eval_loss"])
    assert "000030.npz" in tiny.probes(tmp_path)


@pytest.mark.usefixtures("one_device")
def test_fc_09_a_new_horizon_is_said_and_followed(whole, tmp_path, monkeypatch):
    interrupted(monkeypatch, tiny.config(), tmp_path, 20, terminate)
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
    interrupted(monkeypatch, old, tmp_path, 20, terminate)
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
    interrupted(monkeypatch, old, tmp_path, 20, terminate)
    stop_at(monkeypatch, 24, kill)
    with pytest.raises(Killed):
        tiny.train(new, tmp_path, restore="params")
    with pytest.raises(ConfigError, match=r"checkpoint 20 .*config.optimizer.b2 was 0.95, is 0.9"):
        tiny.train(new, tmp_path)


@pytest.mark.usefixtures("one_device")
def test_parameters_alone_of_a_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"--restore=params: .* has no checkpoint"):
        tiny.train(tiny.config(), tmp_path / "new", restore="params")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("one_device")
def test_fc_15_a_save_that_fails_stops_the_run_and_the_earlier_one_loads(whole, tmp_path, monkeypatch):
    cfg = tiny.config()

    def block():  # rights would not stop root
        (tmp_path / "checkpoints").rename(tmp_path / "moved")
        (tmp_path / "checkpoints").write_text("in the way")

    stop_at(monkeypatch, 14, block)
    with pytest.raises(CheckpointError, match=rf"step 20 to {tmp_path}/checkpoints failed"):
        tiny.train(cfg, tmp_path)
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "moved").rename(tmp_path / "checkpoints")
    tiny.assert_same_bits(tiny.saved(cfg, tmp_path, 10), tiny.saved(cfg, whole(4), 10))


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


@pytest.mark.usefixtures("one_device")
def test_sigterm_is_left_alone_before_and_after(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before[1])
    tiny.train(tiny.config(), tmp_path)
    assert (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == before
    signal.set_wakeup_fd(before[1])


def test_fc_14_other_meshes_read_and_continue_a_run(tmp_path, monkeypatch):
    def mesh(**sizes):
        return tiny.config(**{f"mesh.{k}": v for k, v in sizes.items()} | {"steps": 12, "probes.panel": "6",
                           "checkpoint.save": "6", "tracking.log_every": 1, "probes.induction_every": 100})  # fmt: skip

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
        assert abs(alone.measure(at)[0].values["eval/loss"] - loss[at]) < 1e-5
