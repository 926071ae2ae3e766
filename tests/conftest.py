"""Fixed surroundings of every test, set before JAX starts: CPU, eight fake devices, no display, no network.

Several devices let meshes be tested on any machine; a test that names none runs on the first. Commands that a
test starts inherit the environment but not the devices. Compiled programs are never cached on disk: a cache from
another machine, or from broken code, must not decide a test.
"""
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["MPLBACKEND"] = "Agg"
os.environ["WANDB_MODE"] = "disabled"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """The tests of a file run in one worker, and those of the laboratory all in one: they share a run and what has been
    compiled for it."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group("laboratory" if "laboratory" in file else file))


def _little_optimised():
    """Programs compile in half the time, and compute the same to rounding."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


quick_compile = pytest.fixture(_little_optimised)
quick_module = pytest.fixture(_little_optimised, scope="module")
