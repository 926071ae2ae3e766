"""Tokenise the text of a config before training, which otherwise does it when it first runs.

    python scripts/prepare_data.py --config=configs/stdlib.py [--config.data.dataset='files:books/*.txt' ...]

Interrupted, it goes on where it was. Exit codes: 0 done; 2 bad config or input.
"""
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # run from anywhere, nothing installed

from mha_jax import command
from mha_jax.config import ConfigError
from mha_jax.validation import resolve

CONFIG = command.define_config()


def main(_):
    if CONFIG.value is None:
        raise ConfigError("--config=configs/NAME.py is needed")
    config = resolve(CONFIG.value)
    if config.data.task != "text":
        raise ConfigError(f"config.data.task = {config.data.task!r}: made on the fly, there is nothing to prepare; "
                          "allowed is text")  # fmt: skip
    from mha_jax.data import text

    begin = time.perf_counter()
    opened = text.open_text(config.data, config.seed)
    print(opened.describe())
    for name, stream in (("train", opened.train), ("validation", opened.validation)):
        print(f"{name}: {len(stream):,} tokens in {len(stream.shards)} shard(s), sha256 {stream.fingerprint[:16]}")
    print(f"in {config.data.cache_dir}/tokens, {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    command.run(main)
