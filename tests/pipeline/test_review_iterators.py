"""Several iterators of one pipeline: a batch that was drawn ahead waits for its own, in every schedule alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import read_pipeline, run_ranks_as_threads, scenario_config


def _alternate(scenario: Scenario, schedule: str, turns: str) -> list[Any]:
    def body(rank: int, communicator: Any) -> Any:
        generator = scenario.generator(rank)
        model = scenario.model(communicator, generator)
        loaders = {
            name: replace(scenario, seed=scenario.seed + k).loader(rank, generator) for k, name in enumerate("ab")
        }
        with NestedPipeline(
            model, scenario.dense_optimizer(model), config=scenario_config(scenario, schedule, timeout_s=5.0)
        ) as pipeline:
            losses = []
            for turn in turns:
                model.train(turn.islower())
                losses.append(float(pipeline._step(loaders[turn.lower()]).loss))
            model.lookup.store("user").keys()  # an outside access: the batch drawn ahead leaves the store
            return read_pipeline(pipeline, losses)

    return run_ranks_as_threads(scenario.world_size, body, timeout_s=5.0)


@pytest.mark.parametrize("turns", ["aba", "abbab", "aBaAb", "aBba"])
def test_an_iterator_that_comes_back_goes_on_with_its_own_batch(turns: str) -> None:
    """Lower case trains a batch of an iterator, upper case evaluates one."""
    scenario = Scenario(world_size=2, uneven=False, seed=4)
    expected = _alternate(scenario, "sequential", turns)
    assert len({loss for outcome in expected for loss in outcome.losses[0]}) > len(turns)
    for schedule in ("nested", "dbp", "fwp"):
        found = _alternate(scenario, schedule, turns)
        for mine, theirs in zip(found, expected, strict=True):
            assert not mine.difference(theirs)


@pytest.mark.parametrize("schedule", ["nested", "async"])
def test_a_long_run_keeps_few_batches(schedule: str) -> None:
    scenario = Scenario(world_size=1, uneven=False, batches=12)

    def body(rank: int, communicator: Any) -> int:
        model = scenario.model(communicator, None)
        with NestedPipeline(model, config=scenario_config(scenario, schedule)) as pipeline:
            loader = scenario.loader(rank, None)
            for _ in range(10):
                pipeline.progress(loader)
            pipeline.drain()
            kept, batch = len(pipeline._drawn.batches), pipeline._drawn.batches[0].previous
            while batch is not None:
                kept, batch = kept + 1, batch.previous
            return kept

    assert run_ranks_as_threads(1, body)[0] <= 3


def test_a_run_that_is_left_early_leaves_nothing_behind() -> None:
    scenario = Scenario(world_size=1, uneven=False)

    def body(rank: int, communicator: Any) -> int:
        model = scenario.model(communicator, None)
        batches = list(scenario.loader(rank, None))
        with NestedPipeline(model, config=scenario_config(scenario, "nested")) as pipeline:
            for _ in range(5):
                next(iter(pipeline.run(batches)))
            steps = sum(1 for _ in pipeline.run(batches))
            assert steps == len(batches)
            return len(pipeline._drawn.parked)

    assert run_ranks_as_threads(1, body) == [0]
