"""The words beside the final figures: claimed only what the numbers bear."""
import pytest

from mha_jax.training import summary


def lines(score, unigram, bayes=None, learns=False, input_share=None):
    induction = {"best_head": None, "formation_bracket": None, "formation_step": None, "formation_rise": None,
                 "censored_at": 10, "unstable": False, "loss_midpoint_step": None,
                 "loss_midpoint_bracket": None}  # fmt: skip
    return summary.describe({
        "final_eval_loss": 2.0, "bayes_loss": None, "plateau": "bigram", "limits": {"bigram": 3.0}, "parts": {},
        "icl_score": score, "icl_score_se": 0.05, "icl_unigram": unigram, "icl_bayes": bayes,
        "learns_in_context": learns,
        "packing": None, "induction": induction, "tokens_per_second": 10.0, "probe_share": 0.04, "seconds": 3.0,
        "input_share": input_share, "compile_seconds": 1.0,
    })  # fmt: skip


@pytest.mark.parametrize(("score", "unigram", "said"), [
    (-0.23, -0.19, "below it by less than two standard errors: counting tokens explains most of it"),
    (-0.23, -0.90, "not below it: counting tokens explains most of it"),
    (-0.08, -0.90, "not below it: the loss does not fall along the row"),
    (0.05, -0.20, "not below it: the loss does not fall along the row"),
])  # fmt: skip
def test_what_is_said_of_a_score_that_is_no_learning(score, unigram, said):
    (line,) = [x for x in lines(score, unigram) if x.startswith("ICL score")]
    assert line.endswith(f"(in-context unigram {unigram:+.4f}; {said})")


def test_learning_is_claimed_with_the_way_to_bayes():
    (line,) = [x for x in lines(-3.9, -0.9, bayes=-4.9, learns=True) if x.startswith("ICL score")]
    assert line.endswith("Bayes -4.9000; 75% of the way to it from the unigram's: learns in context)")
    (line,) = [x for x in lines(-0.5, -0.9, bayes=-4.9) if x.startswith("ICL score")]
    assert "-10% of the way" in line and line.endswith("counting tokens explains most of it)")


def test_waiting_for_rows_is_said_where_rows_are_read():
    assert "waiting" not in lines(-1.0, -0.9)[-1]
    said = lines(-1.0, -0.9, input_share=0.002)[-1]
    assert "4.0% of the time in probes, 0.2% waiting for rows, 3 s and 1 s compiling" in said
