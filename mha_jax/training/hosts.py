"""One run in several processes: how they meet, and that they agree on what they do."""
import contextlib
import hashlib
import os
import pathlib
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from mha_jax.config import ConfigError

# How many processes there are, by who starts them; SLURM and Open MPI set theirs for one process too.
COUNTS = ("JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")  # of a Cloud TPU machine, which may be one of a slice
BY_HAND = "JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES=N and JAX_PROCESS_ID=i"


def expected() -> int:
    """How many processes the environment speaks of; 1 on a Cloud TPU, whose slice only JAX knows."""
    return max([1, *(int(os.environ[name]) for name in COUNTS if os.environ.get(name, "").isdecimal())])


def join():
    """Where this is one process of several, meets the others; JAX finds out by itself which under SLURM, Open MPI and
    on Cloud TPU, and is told by the variables of `BY_HAND`. Must come before JAX starts.

    ConfigError when the variables do not fit together, or the others are not found.
    """
    if jax.distributed.is_initialized():
        return
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        count, mine = (os.environ.get(name, "") for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        if not (count.isdecimal() and mine.isdecimal() and int(mine) < int(count)):
            raise ConfigError(f"JAX_COORDINATOR_ADDRESS is set with JAX_NUM_PROCESSES = {count or None} and "
                              f"JAX_PROCESS_ID = {mine or None}: allowed are a number of processes, and one of 0 to "
                              "one less than it")  # fmt: skip
        return _initialize(num_processes=int(count), process_id=int(mine))
    if expected() > 1:
        return _initialize()
    if any(pathlib.Path(path).exists() for path in TPU_DEVICES):
        with contextlib.suppress(ValueError):  # no slice: a machine on its own
            jax.distributed.initialize()


def _initialize(**given):
    where = os.environ.get("JAX_COORDINATOR_ADDRESS", "the cluster's address")
    print(f"waiting for {expected()} processes to meet at {where}", file=sys.stderr, flush=True)
    try:
        jax.distributed.initialize(**given)
    except (ValueError, RuntimeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{expected()} processes are to run together, and do not find each other ({reason}); by "
                          f"hand: {BY_HAND}") from None  # fmt: skip


def check_hosts_agree(text: str):
    """ConfigError unless every process says the same `text`: its data and config. Another Python's library, say, or
    another copy of the files would be trained on in part of every batch."""
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest()[:4], np.uint32)
    others = np.asarray(multihost_utils.process_allgather(mine)).ravel()
    if (others != mine).any():
        wrong = [i for i, other in enumerate(others) if other != others[0]]
        raise ConfigError(f"process(es) {', '.join(map(str, wrong))} have other data or another config than process 0; "
                          f"this is process {jax.process_index()}: {text[:300]}")  # fmt: skip
