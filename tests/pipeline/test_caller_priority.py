"""lower_caller_priority: the thread that trains gives way to the lanes; without it nothing is touched."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from small_model import Recommender, make_batch, make_pipeline

from nestpipe_kernels.device.priority import STEPS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own elsewhere")


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def trained(asked: bool) -> list[list[int]]:
    """Niceness of the caller's thread and of the lanes' beside this one's: before, after a step."""
    found: list[list[int]] = []
    base = niceness(threading.get_native_id())

    def look(pipeline) -> None:
        lanes = [lane._thread.native_id for lane in pipeline._scheduler.lanes.values()]
        found.append([niceness(t) - base for t in (threading.get_native_id(), *lanes)])

    def body() -> None:  # a thread of its own: an ordinary user's cannot go back
        with make_pipeline(Recommender(), lower_caller_priority=asked) as pipeline:
            look(pipeline)
            pipeline.progress(iter([make_batch(1), make_batch(2)]))
            look(pipeline)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    return found


@pytest.mark.parametrize(("asked", "lower"), [(False, 0), (True, STEPS)])
def test_only_the_callers_thread_and_only_on_request(asked, lower):
    before, after = trained(asked)
    assert set(before) == {0}
    assert after == [lower, *[0] * (len(after) - 1)]
    assert len(after) > 3
