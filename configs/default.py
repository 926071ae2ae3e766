"""Every setting with its default, whole; the other configs hold only what differs."""
from mha_jax.config import Config


def get_config():
    return Config()
