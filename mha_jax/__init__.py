"""Train small language models with swappable attention and watch every head. `mha_jax.load` opens a run."""


def __getattr__(name):
    if name == "load":  # late: a config is checked before anything as slow as JAX is imported
        from mha_jax.run import load

        return load
    raise AttributeError(f"module 'mha_jax' has no attribute {name!r}")
