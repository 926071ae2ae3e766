"""SIGTERM: a run asked to stop saves and exits with 143; one that has not made a step yet exits at once."""
import os
import signal
import threading

import jax
import numpy as np
from jax.experimental import multihost_utils

EXIT = 143  # 128 + SIGTERM, what a shell reports


class Stop:
    """Set by SIGTERM. Install after jax.distributed.initialize, which replaces earlier handlers."""

    def __init__(self):
        self._asked = threading.Event()
        self._started = threading.Event()
        self._closed = False
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._before = signal.signal(signal.SIGTERM, lambda *_: self._asked.set())
        # Python handlers wait for the interpreter, which a compilation can hold for minutes: a byte on a pipe
        # is written by the C handler at once and read by a thread.
        self._fd_before, self._write = signal.set_wakeup_fd(write, warn_on_full_buffer=False), write
        threading.Thread(target=self._watch, args=(read,), daemon=True).start()

    def _watch(self, read: int):
        while number := os.read(read, 1):
            if number[0] == signal.SIGTERM:
                if not self._started.is_set():
                    os._exit(EXIT)
                self._asked.set()
        os.close(read)

    def started(self):
        """From here on there is work worth saving."""
        self._started.set()

    def asked(self) -> bool:
        """Whether any host was asked to stop; every host gets the same answer at the same step."""
        mine = self._asked.is_set()
        if jax.process_count() == 1:
            return mine
        return bool(np.any(multihost_utils.process_allgather(np.array(mine))))

    def close(self):
        """Leaves SIGTERM to whoever had it before: from here on nothing is left to save. Twice is once."""
        if self._closed:
            return
        self._closed = True
        signal.set_wakeup_fd(self._fd_before)
        if self._before is not None:  # None: it was not Python's, and Python cannot put it back
            signal.signal(signal.SIGTERM, self._before)
        os.close(self._write)
