"""SIGTERM and Ctrl-C: a run asked to stop saves first; one that has not made a step yet exits at once."""
import os
import signal
import threading

import jax
import numpy as np
from jax.experimental import multihost_utils

EXITS = {signal.SIGTERM: 143, signal.SIGINT: 130}  # 128 + the signal, what a shell reports


class Stop:
    """Set by SIGTERM or Ctrl-C; a second Ctrl-C kills. Install after jax.distributed.initialize, which replaces
    earlier handlers."""

    def __init__(self):
        self._asked = threading.Event()
        self._started = threading.Event()
        self._closed = False
        self.exit_code = EXITS[signal.SIGTERM]
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._before = {number: signal.signal(number, self._ask) for number in EXITS}
        # Python handlers wait for the interpreter, which a compilation can hold for minutes: a byte on a pipe
        # is written by the C handler at once and read by a thread.
        self._fd_before, self._write = signal.set_wakeup_fd(write, warn_on_full_buffer=False), write
        threading.Thread(target=self._watch, args=(read,), daemon=True).start()

    def _watch(self, read: int):
        while number := os.read(read, 1):
            if number[0] in EXITS and not self._started.is_set():
                os._exit(EXITS[number[0]])
        os.close(read)

    def _ask(self, number, _frame):
        self.exit_code = EXITS[number]
        self._asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

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
        """Leaves the signals to whoever had them before: nothing is left to save. Twice is once."""
        if self._closed:
            return
        self._closed = True
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            if handler is not None:  # None: it was not Python's, and Python cannot put it back
                signal.signal(number, handler)
        os.close(self._write)
