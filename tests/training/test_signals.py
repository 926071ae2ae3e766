"""SIGTERM: at once while there is nothing to save, at the next step when there is, and not ours afterwards."""
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from mha_jax.training.signals import EXITS, Stop

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def stop():
    stop = Stop()
    yield stop
    stop.close()


def test_once_started_a_run_is_asked_and_not_ended(stop):
    stop.started()
    assert not stop.asked()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.asked() and stop.asked()


def test_every_host_stops_when_one_was_asked(stop, monkeypatch):
    stop.started()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gathered = []

    def gather(mine):
        gathered.append(bool(mine))
        return np.array([mine, other])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    other = False
    assert stop.asked() is False
    other = True
    assert stop.asked() is True
    assert gathered == [False, False]


def test_what_was_there_before_comes_back():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fd = signal.set_wakeup_fd(-1)
    try:
        stop = Stop()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
        stop.close()
        stop.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN and signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(fd)


# A key derivation of minutes: like a compilation, one call that lets other threads run but no Python handler.
SCRIPT = """
import hashlib
from mha_jax.training.signals import Stop
stop = Stop()
print("compiling", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def test_fc_16_before_the_first_step_a_run_ends_at_once_in_the_middle_of_a_call():
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "compiling\n"
    time.sleep(0.2)
    begin = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(timeout=20) == EXITS[signal.SIGTERM] == 143
    finally:
        process.kill()
    assert time.perf_counter() - begin < 5
