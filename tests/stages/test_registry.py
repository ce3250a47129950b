"""run_stage: what is skipped, what others hear of a failure, and the emulated device's hold."""

from __future__ import annotations

import time

import pytest
import torch

from nestpipe_kernels.comm import InMemoryWorld
from nestpipe_kernels.stages import registry
from nestpipe_kernels.stages.state import BatchState, RankState


def _rank() -> RankState:
    return RankState(InMemoryWorld(1).communicator(0), {}, [], torch.zeros(65536, dtype=torch.int32))


def test_hold_runs_after_the_stage_with_the_time_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int, bool]] = []
    rank = _rank()
    before = time.perf_counter()
    monkeypatch.setitem(registry.STAGE_FUNCTIONS, "update", lambda *_: seen.append(("work", 0, 0, True)))
    rank.hold = lambda name, batch, micro, begin: seen.append(
        (name, batch.index, micro, before <= begin <= time.perf_counter())
    )
    registry.run_stage("update", "update", rank, BatchState(4, "t4"), 3)
    assert seen == [("work", 0, 0, True), ("update", 4, 3, True)]


def test_a_skipped_batch_neither_works_nor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    rank = _rank()
    monkeypatch.setitem(registry.STAGE_FUNCTIONS, "update", lambda *_: seen.append("work"))
    rank.hold = lambda *_: seen.append("hold")
    registry.run_stage("update", "update", rank, BatchState(0, "t0", skipped=True), 0)
    assert seen == []


def test_peers_hear_of_a_failure_by_the_name_of_the_stage_not_of_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, bool]] = []
    rank = _rank()

    def fail(*_: object) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(rank.communicator, "report_failure", lambda text, own: said.append((text, own)), raising=False)
    monkeypatch.setitem(registry.STAGE_FUNCTIONS, "gather_all", fail)
    with pytest.raises(OSError, match="no disk"):
        registry.run_stage("refresh", "gather_all", rank, BatchState(4, "t4"), 0)
    assert said == [("refresh of batch 4: OSError: no disk", True)]
