"""metrics.jsonl and probes/ are complete, whole and rewound exactly."""
import json

import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.training import tracking
from mha_jax.training.tracking import Tracker, drop_after, read_metrics
from tests.training import tiny


def test_events_are_flat_lines_of_plain_numbers(tmp_path):
    tracker = Tracker(tmp_path, tiny.config(), print)
    tracker.log(3, 96, 1.23456, {
        "a": jnp.bfloat16(1.5), "b": float("nan"), "c": np.float32("inf"), "d": jnp.int32(7), "e": np.float64(2.0),
        "f": 1e300, "g": jnp.asarray([2.5])[0],
    })  # fmt: skip
    tracker.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 3, "tokens": 96, "seconds": 1.235, "a": 1.5, "b": None, "c": None, "d": 7, "e": 2, "f": 1e300, "g": 2.5,
    }  # fmt: skip


def test_an_event_is_on_disk_when_log_returns(tmp_path):
    tracker = Tracker(tmp_path, tiny.config(), print)
    for step in (0, 1):
        tracker.log(step, 0, 0.0, {"a": 1.0})
        assert read_metrics(tmp_path)[-1]["step"] == step
    tracker.close()


def test_a_line_cut_short_by_a_kill_is_left_out_and_any_other_damage_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert [e["step"] for e in read_metrics(tmp_path)] == [0, 1]
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not JSON"):
        read_metrics(tmp_path)
    assert read_metrics(tmp_path / "nowhere") == []


@pytest.mark.parametrize("line", ["null", "[]", "3", '{"loss": 1}', '{"step": "3"}', '{"step": 3, "loss": "low"}'])
def test_a_line_that_is_no_event_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": null}\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/metrics.jsonl, line 2: not an event"):
        read_metrics(tmp_path)


def test_files_of_others_in_probes_are_named_and_left_alone(tmp_path, capsys):
    (tmp_path / "probes").mkdir()
    for name in ("000000.npz", "000020.npz", "1000000.npz", "foo.npz", "-5.npz", "000020 copy.npz"):
        (tmp_path / "probes" / name).touch()
    said = []
    assert drop_after(tmp_path, 10, said.append) == 0
    left = {"000000.npz", "foo.npz", "-5.npz", "000020 copy.npz"}
    assert {p.name for p in (tmp_path / "probes").iterdir()} == left
    assert len(said) == 3 and all(str(tmp_path / "probes") in m and "STEP.npz" in m for m in said)
    assert [p.name for p in tracking.probe_files(tmp_path).values()] == ["000000.npz"]
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_arrays_are_whole_files(tmp_path):
    tracker = Tracker(tmp_path, tiny.config(), print)
    tracker.arrays(40, {"x_LN": np.eye(2)})
    tracker.close()
    assert [p.name for p in (tmp_path / "probes").iterdir()] == ["000040.npz"]
    found = np.load(tmp_path / "probes" / "000040.npz")
    assert found["step"] == 40 and (found["x_LN"] == np.eye(2)).all()


def test_rewinding_drops_what_the_restored_parameters_have_not_done(tmp_path):
    lines = [{"step": 0, "eval/loss": 3.0}, {"step": 0, "train/loss": 3.0}, {"step": 5, "induction/max": 0.1},
             {"step": 10, "eval/loss": 2.0}, {"step": 10, "train/loss": 2.0}, {"step": 10, "failed_at": 10},
             {"step": 12, "train/loss": 2.0}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"step": 13, "tr')
    (tmp_path / "probes").mkdir()
    for step in (0, 10, 20):
        (tmp_path / "probes" / f"{step:06d}.npz").touch()
    assert drop_after(tmp_path, 10) == 7
    assert read_metrics(tmp_path) == lines[:4]
    assert sorted(p.name for p in (tmp_path / "probes").iterdir()) == ["000000.npz", "000010.npz"]
    assert drop_after(tmp_path, 10) == 4  # again changes nothing
    assert read_metrics(tmp_path) == lines[:4]


def test_variant_names():
    named = [tracking.variant(tiny.config(**{"model.num_kv_heads": k}).model) for k in (4, 2, 1)]
    assert named == ["MHA", "GQA-2", "MQA"]
