import jax
import jax.numpy as jnp
import pytest

from mha_jax.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig
from mha_jax.training import sharding, state
from mha_jax.validation import resolve


@pytest.mark.parametrize("extras", [{}, {"bias": True, "mlp": "gelu", "positions": "learned", "tied": True},
                                    {"mlp": "swiglu", "sink": True, "smeared_key": True, "qk_norm": True}])  # fmt: skip
def test_every_parameter_and_moment_matches_one_rule(extras):
    config = resolve(Config(model=ModelConfig(**extras)))
    shapes = jax.eval_shape(lambda: state.init_state(config, 0))
    mesh = sharding.make_mesh(config)
    assert len(jax.tree.leaves(sharding.shardings(shapes, mesh))) == len(jax.tree.leaves(shapes))


def test_an_unknown_parameter_is_refused_by_name():
    mesh = sharding.make_mesh(resolve(Config()))
    with pytest.raises(ValueError, match="layers/new_DD: 0 sharding rules"):
        sharding.shardings({"layers": {"new_DD": jnp.zeros((2, 2))}}, mesh)


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 1}, {"data": 3}, {"data": 16}, {"fsdp": 3}])
def test_fc_06_a_mesh_that_does_not_use_every_device_is_refused(mesh):
    config = resolve(Config(mesh=MeshConfig(**mesh)))
    with pytest.raises(ConfigError, match=r"config.mesh.data = .*config.mesh.tensor.*devices, 8"):
        sharding.make_mesh(config)


def test_fc_06_width_that_does_not_divide_by_fsdp():
    config = resolve(Config(model=ModelConfig(d_model=36, num_heads=2, num_kv_heads=1), mesh=MeshConfig(fsdp=8)))
    with pytest.raises(ConfigError, match=r"config.model.d_model = 36 .* config.mesh.fsdp = 8"):
        sharding.make_mesh(config)


def test_fc_32_a_platform_that_is_not_there():
    with pytest.raises(ConfigError, match="config.mesh.platform = 'gpu'"):
        sharding.make_mesh(resolve(Config(mesh=MeshConfig(platform="gpu"))))


def test_cpu_devices_are_as_many_cores_as_divide_the_rows():
    def devices(cores, batch=64, **mesh):
        return sharding.cpu_devices(Config(data=DataConfig(batch_size=batch), mesh=MeshConfig(**mesh)), cores)

    assert [devices(c) for c in (1, 2, 3, 8, 12)] == [1, 2, 2, 8, 8]
    assert devices(8, batch=6) == 2
    assert devices(2, data=2, fsdp=2, tensor=2) == 8


def test_initial_parameters_do_not_depend_on_the_mesh():
    plain = state.init_state(resolve(Config()), 0)["params"]
    config = resolve(Config(mesh=MeshConfig(data=2, fsdp=2, tensor=2)))
    sharded = state.sharded_init(config, sharding.make_mesh(config))["params"]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), plain, sharded))
