"""How fast text is prepared and read, beside reading its raw bytes, and how much memory that takes.

    python scripts/benchmark_data.py [--megabytes=200] [--vocab_size=512]

Writes that much text as JSON lines into a temporary folder: pieces of Python's standard library, each with a number so
that none comes twice. Preparing runs in a process of its own, whose largest memory is printed.
"""
import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np

from mha_jax.config import DataConfig
from mha_jax.data import stdlib, text

PREPARE = ("import json, sys; from mha_jax.config import DataConfig; from mha_jax.data import text; "
           "text.open_text(DataConfig(**json.loads(sys.argv[1])), 0)")  # fmt: skip
ROWS = 2048


def write(path: pathlib.Path, size: int):
    """JSON lines of about `size` bytes."""
    root = stdlib.PythonStdlib(data_dir="/").root
    sources = [(root / p).read_text(errors="replace") for p in stdlib.source_paths(root)]
    pieces = [source[i : i + 4000] for source in sources for i in range(0, len(source), 4000)]
    with path.open("w") as file:
        number = 0
        while file.tell() < size:
            for piece in pieces:
                file.write(json.dumps({"text": f"# {number}\n{piece}"}) + "\n")
                number += 1
                if file.tell() >= size:
                    break


def seconds(function) -> float:
    """Of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--vocab_size", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "corpus.jsonl"
        write(path, args.megabytes * 10**6)
        data = {"task": "text", "dataset": f"files:{path}", "cache_dir": f"{folder}/cache", "length": 128,
                "vocab_size": args.vocab_size}  # fmt: skip
        size, raw = path.stat().st_size / 1e6, min(seconds(path.read_bytes) for _ in range(3))
        print(f"raw bytes: {size:.0f} MB in {raw:.2f} s, {size / raw:,.0f} MB/s")
        command = [sys.executable, "-c", PREPARE, json.dumps(data)]
        root = str(pathlib.Path(__file__).resolve().parents[1])
        prepared = seconds(lambda: subprocess.run(command, check=True, cwd=root))
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
        print(f"prepared: {prepared:.1f} s, {size / prepared:.1f} MB/s, {prepared / raw:.0f} times as long as reading "
              f"the raw bytes; largest memory {memory:.0f} MB")  # fmt: skip
        opening = seconds(lambda: text.open_text(DataConfig(**data), 0))
        opened = text.open_text(DataConfig(**data), 0)
        print(f"opened again: {opening:.2f} s; {len(opened.train):,} training tokens in {len(opened.train.shards)} "
              "shard(s)")  # fmt: skip
        rows = np.arange(ROWS)
        opened.rows(rows)
        read = min(seconds(lambda: opened.rows(rows)) for _ in range(5))
        token_bytes = ROWS * 129 * opened.train.shards[0].itemsize / 1e6
        print(f"rows: {ROWS / read:,.0f} rows of 128 a second, {ROWS * 128 / read / 1e6:.1f} M tokens/s; the same "
              f"bytes raw {size / raw / (token_bytes / read):,.0f} times as fast")  # fmt: skip


if __name__ == "__main__":
    main()
