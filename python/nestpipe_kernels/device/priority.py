"""Priority of a thread: the caller's may give way to the lanes and to the network's threads. Linux only."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

__all__ = ["LoweredThreads"]

STEPS = 5
"""How much nicer: about a third of the processor's time beside a thread that is not."""


class LoweredThreads:
    """Threads whose niceness was raised, each once. Threads that they start later inherit it (torch's own do).

    Elsewhere than on Linux, where threads have no niceness of their own, nothing happens.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}

    def lower_current(self) -> None:
        """Raise the niceness of the calling thread by STEPS, unless it was raised here before."""
        thread = threading.get_native_id()
        if sys.platform != "linux" or thread in self._before:
            return
        self._before[thread] = before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(before + STEPS, 19))

    def restore(self) -> None:
        """Put everything back where the system permits it (root, or a limit `nice` that allows it); else it stays."""
        for thread, before in self._before.items():
            with suppress(OSError):  # not permitted, or the thread has ended
                os.setpriority(os.PRIO_PROCESS, thread, before)
        self._before.clear()
