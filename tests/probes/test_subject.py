"""The model under study: its vocabulary, its heads, its rows on devices."""
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from mha_jax.model import transformer
from mha_jax.probes.subject import Subject
from tests.model import oracle

pytestmark = pytest.mark.usefixtures("quick_module")


def subject(devices=1, **fields):
    cfg = oracle.model_config(num_heads=4, num_kv_heads=2, d_model=16, **fields)
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), ("data", "fsdp", "tensor"),
                axis_types=(AxisType.Auto,) * 3)  # fmt: skip
    return Subject(cfg, oracle.random_params(cfg, 0), mesh)


@pytest.mark.parametrize("token", [-1, 11])
def test_a_token_outside_the_vocabulary_is_an_error_naming_both(token):
    with pytest.raises(ValueError, match=rf"tokens from .*{token}.*: the model's vocabulary is 0 to 10"):
        subject().forward([[1, 2, token]] if token > 0 else [[token, 1, 2]])


def test_forward_is_the_models_own_and_takes_one_row():
    s = subject()
    tokens = oracle.random_tokens(s.cfg, 1)
    logits, aux = s.forward(tokens, capture=("pattern",))
    wanted = transformer.forward(s.graph, s.params, tokens, capture=("pattern",))
    np.testing.assert_allclose(logits, wanted[0], atol=1e-5)
    assert aux.pattern_LBNTS.shape == (1, 2, 4, 9, 9)
    np.testing.assert_allclose(s.forward(tokens[0])[0], logits[:1], atol=1e-5)


def test_heads_by_their_original_numbers():
    s = subject(num_layers=3, kept_heads=((3,), (), (0, 2)))
    assert s.heads == [(0, 3), (2, 0), (2, 2)] and s.group == 2


@pytest.mark.parametrize("devices", [1, 8])
def test_rows_in_chunks_that_divide_over_the_devices(devices):
    s = subject(devices)
    chunks = s.chunks(80)
    assert [(c.start, c.stop) for c in chunks] == [(0, 32), (32, 64), (64, 80)]
    assert s.place(np.zeros((32, 3), np.int32)).sharding.num_devices == devices


def test_a_chunk_that_does_not_divide_lies_on_every_device():
    s = subject(3)
    assert [(c.start, c.stop) for c in s.chunks(61)] == [(0, 30), (30, 60), (60, 61)]
    placed = [s.place(np.arange(2 * R).reshape(R, 2)) for R in (30, 1)]
    assert [x.sharding.is_fully_replicated for x in placed] == [False, True]
    assert {shard.data.shape for shard in placed[0].addressable_shards} == {(10, 2)}
    np.testing.assert_array_equal(placed[0], np.arange(60).reshape(30, 2))
    assert s.residual_sharding(30) is not None and s.residual_sharding(1) is None
