"""In-context learning of a run: the losses are NumPy's, the scores those that training logged."""
import numpy as np
import pytest

from mha_jax.laboratory.icl import icl
from mha_jax.training.tracking import read_metrics
from tests.laboratory import small


def test_losses_by_position_and_the_score_beside_its_lines():
    found, e = icl(small.snapshot()), small.snapshot().panel.evaluation
    table, f = found.tables["positions"], found.facts
    loss_RT = small.loss_without([])
    assert [r["position"] for r in table] == list(range(1, 33))
    np.testing.assert_allclose([r["loss"] for r in table], loss_RT.mean(0), atol=1e-5)
    for name in ("uniform", "unigram", "induction", "bayes"):
        np.testing.assert_allclose([r[name] for r in table], e.lines[name].mean(0), rtol=1e-6)
        assert f["limits"][name] == pytest.approx(e.lines[name].mean(), rel=1e-6)
    score = lambda x: x[e.late_RT].mean() - x[e.early_RT].mean()  # noqa: E731
    assert f["icl_score"] == pytest.approx(score(loss_RT), abs=1e-5)
    assert f["icl_unigram"] == pytest.approx(score(e.lines["unigram"]), rel=1e-5)
    assert f["icl_bayes"] == pytest.approx(score(e.lines["bayes"]), rel=1e-5)
    assert f["icl_positions"] == {"early": [1, 3], "late": [9, 32], "same_in_every_row": True}
    assert f["sequences"] == small.ROWS and f["packing"] is None


def test_copyable_tokens_stand_apart():
    """Those that followed an earlier copy of the token before them."""
    f, rows = icl(small.snapshot()).facts, small.snapshot().panel.evaluation.tokens_RU.tolist()
    seen = np.array([[row[t : t + 2] in [row[j : j + 2] for j in range(t)] for t in range(32)] for row in rows])
    loss_RT = small.loss_without([])
    assert f["parts"]["copyable"] == pytest.approx(loss_RT[seen].mean(), abs=1e-5)
    assert f["parts"]["not_copyable"] == pytest.approx(loss_RT[~seen].mean(), abs=1e-5)


@pytest.mark.parametrize("step", [0, small.HALF, small.STEPS])
def test_what_is_said_of_a_step_is_what_was_logged_there(step):
    f = icl(small.snapshot(step)).facts
    (logged,) = [e for e in read_metrics(small.run().workdir) if e["step"] == step and "eval/loss" in e]
    assert (f["step"], f["tokens"], f["eval_loss"], f["icl_score"], f["icl_score_se"]) == (
        step, step * 8 * 32, logged["eval/loss"], logged["icl/score"], logged["icl/score_se"])  # fmt: skip
    assert f["data_fingerprint"].startswith("Repeat(vocab_size=32") and len(f["hash"]) == 16
