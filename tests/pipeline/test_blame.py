"""What a wait of the caller's thread counts as: the work that it waited for first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nestpipe_kernels.device import CPU
from nestpipe_kernels.pipeline.scheduler import LaneScheduler
from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.trace import Timeline

RANK: Any = SimpleNamespace(backend=CPU)


def blamed(schedule: str, stage: str) -> list[tuple[int, str]]:
    """(batch relative to the stage's, stage) in the order in which they are waited for."""
    scheduler = LaneScheduler(build_graph(schedule), RANK, 2, Timeline(), 1.0)
    try:
        return [(shift, name) for shift, _, name in scheduler._plan[stage, 0].blame]
    finally:
        scheduler.close(1.0)


def test_gradients_of_the_batch_before_are_not_lookup() -> None:
    """Without prefetch the keys wait for the write-back, and that for gradients: communication, then other work."""
    found = blamed("sequential", "route_keys")
    assert found.index((-1, "recv_grads")) < found.index((-1, "reduce_grads")) < found.index((-1, "write_back"))
    assert found[-1] == (0, "route")


@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_with_prefetch_keys_wait_for_their_own_batch_alone(schedule: str) -> None:
    assert {(shift, name) for shift, name in blamed(schedule, "route_keys")} == {(0, "route")}


def test_the_model_waits_for_rows_and_what_they_wait_for() -> None:
    found = blamed("nested", "forward_backward")
    assert found.index((0, "gather")) < found.index((0, "sync")) < found.index((0, "send_rows"))
