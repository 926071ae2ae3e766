"""In-context learning scores against hand-worked values and simulation."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_jax.config import ConfigError
from mha_jax.probes import icl


def test_fc_05_loss_of_bf16_logits_is_float32_and_exact():
    loss = icl.token_loss(jnp.zeros((1, 3, 50_000), jnp.bfloat16), jnp.zeros((1, 3), jnp.int32))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, 10.8198, atol=1e-3)


def test_token_loss_is_minus_log_softmax_of_the_target():
    logits = np.array([[[0.0, np.log(3.0), np.log(4.0)], [0.0, 0.0, np.log(2.0)]]])
    loss = icl.token_loss(jnp.asarray(logits), jnp.array([[1, 0]]))
    np.testing.assert_allclose(loss, [[-np.log(3 / 8), -np.log(1 / 4)]], rtol=1e-6)


def test_score_is_late_minus_early_and_negative_when_loss_falls():
    loss = jnp.array([[3.0, 2.0, 9.0, 1.0], [5.0, 2.0, 9.0, 0.0]])
    early, late = np.array([1, 1, 0, 0], bool), np.array([0, 0, 0, 1], bool)
    score, error = icl.icl_score(loss, early, late)
    own = np.array([1.0 - 2.5, 0.0 - 3.5])  # each row's own score
    assert score == pytest.approx(own.mean()) and score < 0
    assert error == pytest.approx(own.std(ddof=1) / np.sqrt(2))


def test_score_pools_tokens_when_windows_differ_and_skips_rows_without_any():
    loss = jnp.array([[4.0, 4.0, 1.0], [2.0, 0.0, 0.0], [jnp.nan, jnp.nan, jnp.nan]])
    early = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
    late = np.array([[0, 0, 1], [0, 0, 0], [0, 0, 0]], bool)
    score, error = icl.icl_score(loss, early, late)
    assert score == pytest.approx(1.0 - 10 / 3)
    # Linearised by hand: row pulls on early are (8 - 20/3)/3 and (2 - 10/3)/3, on late 0; two rows count.
    pull = np.array([-(8 - 20 / 3) / 3, -(2 - 10 / 3) / 3])
    assert error == pytest.approx(np.sqrt(2 * (pull**2).sum()), rel=1e-5)


@pytest.mark.parametrize("varying", [False, True])
def test_standard_error_is_the_spread_over_repeated_experiments(varying):
    rng = np.random.default_rng(0)
    B, T = 200, 12

    def experiment():
        row = rng.normal(0, 1, (B, 1))  # rows differ as wholes: tokens of one row are not independent
        loss = 3 + row * np.linspace(1.0, 0.2, T) + rng.normal(0, 0.5, (B, T))
        size = rng.integers(1, 5, (B, 1)) if varying else 3
        loss += 0.3 * size  # and window size goes with loss
        t = np.arange(T)
        late = np.broadcast_to(t >= T - size, (B, T))
        early = np.broadcast_to(t < 2, (B, T))
        return icl.icl_score(jnp.asarray(loss, jnp.float32), early, late)

    scores, errors = np.array([experiment() for _ in range(400)]).T
    assert errors.mean() == pytest.approx(scores.std(ddof=1), rel=0.1)


def test_empty_windows_and_a_single_row_give_nan_not_zero():
    loss = jnp.ones((2, 4))
    none, last = np.zeros(4, bool), np.array([0, 0, 0, 1], bool)
    assert np.isnan(icl.icl_score(loss, none, last)[0])
    score, error = icl.icl_score(loss[:1], ~last, last)
    assert score == 0 and np.isnan(error)


def test_olsson_uses_single_indices_and_exists_only_from_500():
    loss = jnp.zeros((2, 512)).at[:, 499].set(jnp.array([1.0, 2.0])).at[:, 49].set(4.0)
    assert icl.olsson(loss) == pytest.approx(-2.5)
    assert icl.olsson(loss[:, :500]) == pytest.approx(-2.5)
    assert icl.olsson(loss[:, :499]) is None


def test_copyable_is_an_earlier_identical_pair():
    #            x: 0  1  2  0  1  1  2  1  1       (0,1) repeats at t=4, (1,2) at 6, (1,1) at 8; (2,1) is new
    tokens = jnp.array([[0, 1, 2, 0, 1, 1, 2, 1, 1], [3] * 9])
    expected = [[0, 0, 0, 1, 0, 1, 0, 1], [0, 1, 1, 1, 1, 1, 1, 1]]
    np.testing.assert_array_equal(jax.jit(icl.copyable)(tokens), np.array(expected, bool))


def test_copyable_agrees_with_a_loop_over_the_definition():
    x = np.random.default_rng(1).integers(0, 5, (4, 20))

    def seen(r, t):
        return any(r[j - 1] == r[t - 1] and r[j] == r[t] for j in range(1, t))

    np.testing.assert_array_equal(icl.copyable(x), [[seen(r, t) for t in range(1, 20)] for r in x])


def test_windows_text_counts_positions_from_one():
    t = np.arange(1, 65)
    text = icl.windows_text((t >= 4) & (t <= 9), np.tile(t >= 58, (3, 1)))
    assert text == {"early": [4, 9], "late": [58, 64], "same_in_every_row": True}


def test_windows_text_covers_rows_that_differ_and_says_so():
    early = np.array([[0, 1, 0, 0], [1, 0, 0, 0]], bool)
    late = np.zeros((2, 4), bool)
    assert icl.windows_text(early, late) == {"early": [1, 2], "late": None, "same_in_every_row": False}


def test_rows_without_a_window_have_no_score_and_are_refused():
    early, late = np.zeros((3, 8), bool), np.zeros((3, 8), bool)
    early[:, 1] = late[1:, 5] = True
    icl.check_windows(early, late)
    none, one = np.zeros_like(early), early & (np.arange(3) == 0)[:, None]
    for masks, counts in (((early, none), (3, 0, 3)), ((none, late), (0, 2, 2)), ((one, one), (1, 1, 1))):
        assert not np.isfinite(icl.icl_score(jnp.ones((3, 8)), *masks)).all()
        text = "{} tokens in the early ICL window and {} in the late one, in {} rows".format(*counts)
        with pytest.raises(ConfigError, match=f"config.data.eval_rows = 3, config.data.length = 8: .* {text}"):
            icl.check_windows(*masks)
