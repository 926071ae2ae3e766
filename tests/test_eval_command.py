"""eval.py on a run made by train.py's own loop: the folder alone, any device count, the same numbers."""
import json

import jax
import numpy as np
import pytest

from mha_jax.config import Config, ConfigError, DataConfig, ModelConfig, ProbesConfig
from mha_jax.report import evaluation
from mha_jax.run import open_run
from mha_jax.training import loop
from mha_jax.validation import resolve

pytestmark = pytest.mark.usefixtures("quick_module")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, quick_module):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    config = resolve(Config(
        name="tiny", steps=6, steps_per_call=3, model=ModelConfig(d_model=32, num_heads=4, num_kv_heads=1),
        data=DataConfig(length=32, batch_size=8, period_min=4, period_max=8, eval_rows=16),
        probes=ProbesConfig(panel="3", rows=8, repeats=8),
    ))  # fmt: skip
    config.checkpoint.save = "3"
    config.tracking.wandb = "disabled"
    loop.train(config, folder)
    return folder


def test_a_saved_checkpoint_gives_the_probe_logged_at_its_step_bit_for_bit(workdir):
    run = open_run(workdir)
    for step in (0, 3, 6):
        reading, meta = run.at(step).reading, run.at(step).meta
        assert meta["step"] == step
        with np.load(workdir / "probes" / f"{step:06d}.npz") as logged:
            assert set(logged) == {"step", *reading.arrays}
            for name, value in reading.arrays.items():
                np.testing.assert_array_equal(logged[name], value, err_msg=name)


def test_heads_and_icl_write_json_and_pictures(workdir, tmp_path, capsys):
    (heads,) = evaluation.evaluate(workdir, "heads", "6", tmp_path)
    (icl,) = evaluation.evaluate(workdir, "icl", "best", tmp_path)
    printed = capsys.readouterr().out
    assert json.loads((tmp_path / "heads" / "000006.json").read_text()) == heads
    assert (tmp_path / "heads" / "000006.png").exists()
    assert np.shape(heads["scores"]["induction"]) == (2, 4) and "L1H3" in printed
    events = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    logged = {k: v for e in events if e["step"] == 6 for k, v in e.items()}
    assert heads["scores"]["copying"][1][2] == logged["copying/L1H2"]
    assert icl["icl_score"] == logged["icl/score"] and len(icl["loss_by_position"]) == 32
    assert f"{icl['icl_score']:+.4f}" in printed and icl["icl_bayes"] == logged["icl/bayes"]


def test_all_steps(workdir, tmp_path):
    assert [r["step"] for r in evaluation.evaluate(workdir, "icl", "all", tmp_path)] == [0, 3, 6]


def test_a_wrong_step_or_folder_names_what_exists(workdir, tmp_path):
    with pytest.raises(ConfigError, match=r"--step=5: allowed are last, best, all and the saved steps 0, 3, 6"):
        evaluation.evaluate(workdir, "heads", "5")
    with pytest.raises(ConfigError, match="not a run folder"):
        evaluation.evaluate(tmp_path, "heads")


def test_fc_14_another_number_of_devices(workdir, monkeypatch):
    eight = open_run(workdir).at(6).reading
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: first)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    one_run = open_run(workdir)
    one = one_run.at(6).reading
    assert one_run.mesh.size == 1
    assert one.values["eval/loss"] == pytest.approx(eight.values["eval/loss"], abs=1e-5)
