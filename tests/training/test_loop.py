"""What a run logs and saves; what is not finite stops it; the device is never waited for."""
import itertools
import signal

import numpy as np
import pytest

from mha_jax import run
from mha_jax.config import ConfigError
from mha_jax.data.source import make_source
from mha_jax.probes import induction
from mha_jax.probes.panel import Reading
from mha_jax.training import loop, optimizer, sharding, state, step, summary
from mha_jax.training.checkpoint import CheckpointError, Checkpoints
from tests.training import tiny

pytestmark = [
    pytest.mark.usefixtures("shared_programs"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # Orbax, after a failed restore
]


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
def test_a_saved_checkpoint_gives_the_probe_of_its_step_bit_for_bit(whole):
    opened = run.open_run(whole(4))
    for at in (10, 30):
        reading, meta = opened.at(at).reading, opened.at(at).meta
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


@pytest.mark.usefixtures("one_device")
def test_fc_12_a_loss_that_is_not_finite_stops_the_run_at_its_step(whole, tmp_path, monkeypatch):
    cfg = tiny.config()
    monkeypatch.setattr(loop, "make_source", lambda *args: tiny.Poisoned(make_source(*args), 17))
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
    monkeypatch.setattr(loop, "make_source", lambda *args: tiny.Poisoned(make_source(*args), 0))
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
def test_fc_15_a_save_that_fails_stops_the_run_and_the_earlier_one_loads(whole, tmp_path, monkeypatch):
    cfg = tiny.config()

    def block():  # rights would not stop root
        (tmp_path / "checkpoints").rename(tmp_path / "moved")
        (tmp_path / "checkpoints").write_text("in the way")

    tiny.stop_at(monkeypatch, 14, block)
    with pytest.raises(CheckpointError, match=rf"step 20 to {tmp_path}/checkpoints failed"):
        tiny.train(cfg, tmp_path)
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "moved").rename(tmp_path / "checkpoints")
    tiny.assert_same_bits(tiny.saved(cfg, tmp_path, 10), tiny.saved(cfg, whole(4), 10))


@pytest.mark.usefixtures("one_device")
def test_sigterm_is_left_alone_before_and_after(tmp_path, monkeypatch):
    def now():
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        return signal.getsignal(signal.SIGTERM), fd

    before = now()
    tiny.train(tiny.config(), tmp_path / "ends")
    assert now() == before
    monkeypatch.setattr(loop, "make_source", lambda *args: tiny.Poisoned(make_source(*args), 0))
    with pytest.raises(loop.NonFinite):
        tiny.train(tiny.config(), tmp_path / "fails")
    assert now() == before


# ------------------------------------------------------------------------------------------------ what a run says


class Watched(tiny.Screen):
    """A console that keeps what the live line showed, as {step: numbers}."""

    def __init__(self):
        super().__init__()
        self.shown = {}

    def show(self, step, steps, numbers, *_):
        self.shown[step] = numbers


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_the_live_line_and_the_summary_name_the_same_head(tmp_path, kv_heads):
    screen, cfg = Watched(), tiny.config(**{"model.num_kv_heads": kv_heads})
    found = loop.train(cfg, tmp_path, console=screen)["induction"]
    assert screen.shown[30][found["best_head"]] == f"{found['score']:.2f}"
    for name, arrays in tiny.probes(tmp_path).items():
        chance_P = arrays["induction_chance_P"][:, None, None]
        strength_LN = ((arrays["induction_PLN"] - chance_P) / (1 - chance_P)).min(0)
        layer, head = np.unravel_index(strength_LN.argmax(), strength_LN.shape)
        assert f"L{layer}H{head}" in screen.shown[int(name[:6])]


def test_the_strongest_head_need_not_have_the_highest_score():
    class TwoPeriods:  # by hand: of chance 0.2 and 0.05
        def prefix_matching(self, arrays):
            return induction.prefix_matching(arrays["induction_PLN"], [0.2, 0.05])

    scores_PLN = np.array([[[0.30, 0.50, np.nan]], [[0.30, 0.29, np.nan]]])
    name, figures = summary.strongest(TwoPeriods(), Reading({}, {"induction_PLN": scores_PLN}))
    assert name == "L0H1"  # (0.29 - 0.05) / 0.95 = 0.253, against (0.30 - 0.2) / 0.8 = 0.125
    assert figures == pytest.approx({"score": 0.29, "chance": 0.05, "strength": 0.24 / 0.95})
    gone = Reading({}, {"induction_PLN": np.full((2, 1, 3), np.nan)})
    assert summary.strongest(TwoPeriods(), gone) == (None, {"score": None, "chance": None, "strength": None})


@pytest.mark.usefixtures("one_device")
def test_a_finished_run_keeps_the_times_of_its_making(tmp_path):
    made, _ = tiny.train(tiny.config(), tmp_path)
    assert made["seconds"] > 0 and made["compile_seconds"] > 0 and 0 < made["probe_share"] < 1
    text = (tmp_path / "summary.json").read_text()
    for _ in range(2):
        assert tiny.train(tiny.config(), tmp_path)[0] == made
        assert (tmp_path / "summary.json").read_text() == text
    longer, _ = tiny.train(tiny.config(steps=34), tmp_path)  # what is trained since does count
    assert longer["seconds"] > made["seconds"] and longer["tokens_per_second"] != made["tokens_per_second"]
    none, _ = tiny.train(tiny.config(steps=0), tmp_path / "none")
    assert none["seconds"] > 0


@pytest.mark.usefixtures("one_device")
def test_fewer_steps_than_were_trained_are_refused_and_no_more_is_said(whole):
    screen, before = tiny.Screen(), (whole(4) / "config.json").read_text()
    with pytest.raises(ConfigError, match=r"config.steps = 20 is less than the saved step 30"):
        loop.train(tiny.config(steps=20), whole(4), console=screen)
    assert not [line for line in screen.lines if "warning" in line or "20" in line]
    assert (whole(4) / "config.json").read_text() == before


@pytest.mark.usefixtures("one_device")
def test_rows_that_cannot_give_an_icl_score_are_refused_before_compiling(tmp_path):
    cfg = tiny.config(**{"data.task": "trigger", "data.length": 8, "data.eval_rows": 2, "data.trigger_rate": 0.01,
                         "probes.periods": (4,), "probes.rows": 2})  # fmt: skip
    screen = tiny.Screen()
    with pytest.raises(ConfigError, match=r"config.data.eval_rows = 2, config.data.length = 8: .* ICL window"):
        loop.train(cfg, tmp_path, console=screen)
    assert "compiling" not in screen.lines and not (tmp_path / "config.json").exists()


@pytest.mark.usefixtures("one_device")
def test_a_resumed_run_says_what_is_odd_in_its_folder_and_goes_on(whole, tmp_path, monkeypatch):
    cfg = tiny.config()
    tiny.interrupted(monkeypatch, cfg, tmp_path, 14, tiny.terminate)
    (tmp_path / "probes" / "foo.npz").write_bytes(b"mine")
    (tmp_path / "environment.json").write_text("nonsense")
    _, said = tiny.train(cfg, tmp_path)
    warned = [line for line in said if line.startswith("warning: ")]
    assert len(warned) == 2 and "probes/foo.npz is not used" in warned[0] and "environment.json" in warned[1]
    (tmp_path / "probes" / "foo.npz").unlink()
    tiny.assert_same_run(cfg, whole(4), tmp_path)
