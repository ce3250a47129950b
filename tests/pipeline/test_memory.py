"""Hundreds of steps on the same few keys leave nothing behind: stores, events, exchanges and tensors do not grow."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.scenario import Scenario, ScenarioBatch
from nestpipe_kernels.testing.threads import run_ranks_as_threads, scenario_config

PERIOD, STEPS, EVERY = 5, 150, 50
SCENARIO = Scenario(
    world_size=2, micro_batches=2, batches=PERIOD, uneven=False, samples=5, num_keys=10, noise=False, clustering="key"
)


class Watch:
    """All ranks stop together every EVERY steps, drained, and one of them counts."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=60)
        self.counts: list[dict[str, Any]] = []

    def look(self, rank: int, pipeline: NestedPipeline) -> None:
        pipeline.drain()
        self._barrier.wait()
        if rank == 0:
            self.counts.append(count(pipeline))
        self._barrier.wait()


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def count(pipeline: NestedPipeline) -> dict[str, Any]:
    """What must not grow. Reference cycles count too: nothing is collected here."""
    scheduler, communicator = pipeline._scheduler, pipeline.rank.communicator
    drawn = list(pipeline._drawn.batches)
    return {
        "tensors": live_tensors(),
        "store bytes": [binding.store.memory() for binding in pipeline.rank.bindings],
        "rows": [len(binding.store) for binding in pipeline.rank.bindings],
        "buffers": [[tuple(b.shape) for b in binding.buffers] for binding in pipeline.rank.bindings],
        "events": len(scheduler._events),
        "queued": sum(len(lane._queue) for lane in scheduler.lanes.values()),
        "handles": [len(batch.handles) for batch in drawn],
        "exchanges": len(communicator._world.pending()),
        "chain": any(batch.previous is not None and batch.previous.previous is not None for batch in drawn),
        "parked": len(pipeline._drawn.parked),
    }


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def endless(rank: int) -> Iterator[ScenarioBatch]:
    return itertools.cycle(list(SCENARIO.loader(rank, None)))


def watch_run(scenario: Scenario, schedule: str, body: Callable[[int, NestedPipeline, Watch], None]) -> Watch:
    watch = Watch(scenario.world_size)

    def run(rank: int, communicator: Any) -> None:
        model = scenario.model(communicator, None)
        config = replace(scenario_config(scenario, schedule), timeline_steps=10)
        with NestedPipeline(model, scenario.dense_optimizer(model), config=config) as pipeline:
            body(rank, pipeline, watch)

    run_ranks_as_threads(scenario.world_size, run)
    return watch


def assert_flat(watch: Watch) -> None:
    first, *later = watch.counts
    assert len(later) == STEPS // EVERY - 1
    assert [now for now in later if now != first] == [], first
    assert first["rows"][0] > 0


def train(rank: int, pipeline: NestedPipeline, watch: Watch) -> None:
    iterator = endless(rank)
    for step in range(STEPS):
        pipeline.progress(iterator)
        if (step + 1) % EVERY == 0:
            watch.look(rank, pipeline)


@pytest.mark.parametrize(
    ("schedule", "row_transfer", "world_size"),
    [("sequential", "once", 1), ("nested", "once", 2), ("nested", "per_micro_batch", 1), ("async", "once", 1)],
)
def test_fault_24_steps_on_the_same_keys(schedule, row_transfer, world_size):
    assert_flat(watch_run(replace(SCENARIO, row_transfer=row_transfer, world_size=world_size), schedule, train))


def test_fault_39_batches_without_backward():
    def evaluate(rank: int, pipeline: NestedPipeline, watch: Watch) -> None:
        iterator = endless(rank)
        for _ in range(PERIOD):
            pipeline.progress(iterator)
        pipeline.model.eval()
        evaluated = endless(rank)
        for step in range(STEPS):
            pipeline.progress(evaluated)
            if (step + 1) % EVERY == 0:
                watch.look(rank, pipeline)

    assert_flat(watch_run(replace(SCENARIO, world_size=1), "nested", evaluate))


def test_batches_that_fail():
    def fail(rank: int, pipeline: NestedPipeline, watch: Watch) -> None:
        def broken(index: int, batch: ScenarioBatch) -> ScenarioBatch:
            return replace(batch, dense=batch.dense * float("nan")) if index % PERIOD == rank else batch

        iterator = map(broken, itertools.count(), endless(rank))
        failures = 0
        for step in range(STEPS):
            try:
                pipeline.progress(iterator)
            except ArithmeticError:
                failures += 1
            if (step + 1) % EVERY == 0:
                watch.look(rank, pipeline)
        assert failures == 2 * STEPS // PERIOD

    assert_flat(watch_run(SCENARIO, "nested", fail))


def test_fault_39_forward_without_backward_outside_a_pipeline():
    counts = []

    def body(rank: int, communicator: Any) -> None:
        model = SCENARIO.model(communicator, None)
        batches = list(SCENARIO.loader(rank, None))
        for step in range(STEPS):
            model(batches[step % PERIOD])
            if (step + 1) % EVERY == 0:
                counts.append((live_tensors(), [store.memory() for store in model.lookup.row_stores()]))

    one = replace(SCENARIO, world_size=1)
    run_ranks_as_threads(one.world_size, body)
    assert len(counts) == 3
    assert counts[0] == counts[1] == counts[2]
