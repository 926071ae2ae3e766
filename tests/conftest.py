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

jax.config.update("jax_num_cpu_devices", 8)
