"""The front of learned gates, and the same heads trained from scratch beside it."""
import dataclasses
import json

import numpy as np
import pytest

from mha_jax.config import Config, ConfigError, InterventionsConfig
from mha_jax.laboratory import gates
from mha_jax.training import loop
from mha_jax.training.folder import read_config
from tests.laboratory import small

OPTIONS = {"penalties": (0.0, 1000.0), "gate_steps": 25}  # 25 steps of 0.1 from 2: enough to close


@pytest.fixture(scope="module")
def front():
    """The result, and what it was told on the way."""
    said, done = [], []
    found = gates.gates(small.snapshot(), **OPTIONS, say=said.append, progress=lambda n, total: done.append((n, total)))
    return found, said, done


def test_a_row_a_penalty_with_the_loss_of_what_survives(front):
    found, _, done = front
    free, dear = found.tables["front"]
    whole = small.loss_without([]).mean()
    assert (free["penalty"], dear["penalty"]) == (0.0, 1000.0) and (dear["kept"], dear["survivors"]) == (0, "")
    for row in (free, dear):
        kept = small.parse(row["survivors"])
        loss = small.loss_without([h for h in small.ALL if h not in kept]).mean()
        assert row["kept"] == len(kept) and row["of"] == 8
        assert row["loss"] == pytest.approx(loss, abs=1e-5)
        assert row["loss_change"] == pytest.approx(loss - whole, abs=1e-5)
    assert free["kept"] > 0 and dear["from_scratch_loss"] is None
    assert found.arrays["open_PLN"].shape == (2, 2, 4) and found.arrays["gate_losses_PS"].shape == (2, 25)
    assert (found.arrays["open_PLN"][1] < 0.6).all() and sum(n for n, _ in done) == done[0][1] == 50
    assert found.task == "prune" and found.facts["method"] == "gates"


def test_the_same_heads_from_scratch_are_a_run_made_once(front, monkeypatch):
    found, said, _ = front
    row = found.tables["front"][0]
    kept = small.parse(row["survivors"])
    assert len(said) == 1 and said[0].startswith(f"training {len(kept)} heads from scratch for 30 steps, as long as")
    (folder,) = (small.run().workdir / "eval" / "prune" / "scratch").iterdir()
    own, made = read_config(small.run().workdir), read_config(folder)
    assert made.model.kept_heads == tuple(tuple(n for i, n in kept if i == layer) for layer in range(2))
    assert (made.steps, made.data, made.optimizer) == (own.steps, own.data, own.optimizer)
    assert made.seed != own.seed, "other parameters to start from, and other rows"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["tokens"] == small.snapshot().meta["tokens"]
    assert row["from_scratch_loss"] == pytest.approx(summary["final_eval_loss"], abs=1e-6)
    monkeypatch.setattr(loop, "train", lambda *_, **__: pytest.fail("it was there"))
    again = gates.gates(small.snapshot(), **OPTIONS)
    assert again.tables == found.tables


def test_a_change_of_loss_is_on_the_rows_that_were_asked_for():
    (row,) = gates.gates(small.snapshot(), penalties=(1000.0,), gate_steps=25, rows=5).tables["front"]
    rows = small.snapshot().panel.evaluation.tokens_RU[:5]
    whole, empty = small.loss_without([], rows).mean(), small.loss_without(small.ALL, rows).mean()
    assert (row["loss"], row["loss_change"]) == (pytest.approx(empty, abs=1e-5), pytest.approx(empty - whole, abs=1e-5))


def test_the_model_may_learn_along():
    found = gates.gates(small.snapshot(), penalties=(0.0,), gate_steps=2, train_params=True, from_scratch=False)
    (row,) = found.tables["front"]
    assert row["kept"] == 8 and row["from_scratch_loss"] is None
    assert row["loss_change"] != 0 and abs(row["loss_change"]) < 0.1, "the parameters moved, by two small steps"
    assert found.facts["train_params"] and found.facts["from_scratch"].endswith("30 steps + 2")


def test_each_set_of_heads_has_a_folder_and_is_trained_freely(monkeypatch):
    """Also 1, 2, 13 and 12, 13, and in a run whose own heads were held."""
    class Seen(Exception):
        pass

    def train(config, folder, **_):
        raise Seen(folder.name, config)

    monkeypatch.setattr(loop, "train", train)
    run = small.run()
    held = dataclasses.replace(run.config, interventions=InterventionsConfig(heads="0.0"), model=dataclasses.replace(
        run.config.model, num_heads=16, num_kv_heads=2))  # fmt: skip
    snapshot = dataclasses.replace(small.snapshot(), run=dataclasses.replace(run, config=held))
    names = set()
    for heads in ((1, 2, 13), (12, 13), (1, 2), (0,)):
        with pytest.raises(Seen) as seen:
            gates.train_from_scratch(snapshot, [(1, n) for n in heads], 30, None)
        name, config = seen.value.args
        names.add(name)
        assert config.model.kept_heads == ((), heads) and config.interventions == InterventionsConfig()
        assert isinstance(config, Config) and config.tracking.wandb == "disabled"
    assert len(names) == 4


def test_models_that_cannot_be_trained_here_are_refused_before_anything_is(monkeypatch):
    snapshot, begun = small.snapshot(), []
    config = dataclasses.replace(snapshot.run.config, mesh=dataclasses.replace(snapshot.run.config.mesh, data=64))
    elsewhere = dataclasses.replace(snapshot, run=dataclasses.replace(snapshot.run, config=config))
    monkeypatch.setattr(gates.hard_concrete, "front", lambda *_, **__: begun.append(1))
    with pytest.raises(ConfigError, match="models from scratch cannot be trained here: .*--noscratch leaves them out"):
        gates.gates(elsewhere, **OPTIONS)
    assert not begun


@pytest.mark.parametrize("options", [{"penalties": ()}, {"penalties": (0.1, -1.0)}, {"penalties": (np.nan,)},
                                     {"gate_steps": 0}])  # fmt: skip
def test_what_cannot_be_learned_is_refused_before_anything_is_trained(options):
    begun = []
    with pytest.raises(ConfigError, match="allowed are some finite penalties of 0 or more, and 1 or more steps"):
        gates.gates(small.snapshot(), **options, progress=lambda *_: begun.append(1))
    assert not begun
