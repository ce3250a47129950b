"""Threads that give way to others: which, by how much, and back again."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from nestpipe_kernels.device import Event, LoweredThreads, ThreadLane
from nestpipe_kernels.device.priority import STEPS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own elsewhere")
LIMIT_S = 20.0


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_thread(body) -> list:
    """Not in the main thread: an ordinary user's thread cannot go back."""
    results: list = []
    thread = threading.Thread(target=lambda: results.extend(body()))
    thread.start()
    thread.join(LIMIT_S)
    return results


def test_only_the_thread_that_asks_is_lowered_and_once():
    lane, seen = ThreadLane("exchange"), []
    before = niceness()

    def body() -> list[int]:
        lowered = LoweredThreads()
        found = [niceness()]
        for _ in range(2):
            lowered.lower_current()
            found.append(niceness())
        done = Event()
        lane.submit(lambda: seen.append(niceness()), [], done, "look")
        done.wait(LIMIT_S)
        lowered.restore()
        lowered.restore()
        return found

    assert in_a_thread(body) == [before, before + STEPS, before + STEPS]
    assert seen == [before]
    assert niceness() == before
    lane.close(timeout_s=LIMIT_S)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may always go back")
def test_back_to_what_it_was():
    def body() -> list[int]:
        lowered = LoweredThreads()
        before = niceness()
        lowered.lower_current()
        lowered.restore()
        return [niceness() - before]

    assert in_a_thread(body) == [0]


def test_a_thread_that_has_ended_is_no_error():
    lowered = LoweredThreads()
    in_a_thread(lambda: [lowered.lower_current()])
    lowered.restore()
