"""Runs a scenario through real pipelines: W ranks as W threads of one process, each with its own lanes, over the
in-memory group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..comm import InMemoryWorld
from ..config import PipelineConfig
from ..pipeline.train_pipeline import NestedPipeline
from .explorer import Outcome, read_policies, read_store
from .scenario import Scenario

__all__ = ["read_pipeline", "run_ranks_as_threads", "run_scenario", "scenario_config"]


def scenario_config(scenario: Scenario, schedule: str, timeout_s: float = 30.0) -> PipelineConfig:
    """The PipelineConfig that a scenario stands for; the schedule "nested+early" is `nested` with early send."""
    return PipelineConfig(
        schedule=schedule.removesuffix("+early"),
        num_micro_batches=scenario.micro_batches,
        row_transfer=scenario.row_transfer,
        early_send=schedule.endswith("+early"),
        owner_pooling=scenario.owner_pooling,
        row_wire=scenario.row_wire,
        gradient_wire=scenario.gradient_wire,
        clustering=scenario.clustering,
        nan_policy=scenario.nan_policy,
        timeout_s=timeout_s,
    )


def read_pipeline(pipeline: NestedPipeline, losses: list[float]) -> Outcome:
    """What a pipeline has done so far, on its own rank."""
    pipeline.drain()
    rows: dict[tuple[str, int], bytes] = {}
    notes: dict[tuple[str, int], tuple[int, int]] = {}
    for binding in pipeline.rank.bindings:
        read_store(binding.store, rows, notes)
    dense = [p.detach().cpu().numpy().tobytes() for _, p in pipeline.rank.dense_parameters]
    policies = {k: v for binding in pipeline.rank.bindings for k, v in read_policies(binding.store).items()}
    return Outcome([rows], [notes], [dense], [losses], [], policies=[policies])


def run_ranks_as_threads(world_size: int, body: Callable[[int, Any], Any], timeout_s: float = 30.0) -> list[Any]:
    """`body(rank, communicator)` on every rank at the same time; their results, or the first exception.

    A rank that raises tells the others, so that none waits for it.
    """
    world = InMemoryWorld(world_size, timeout_s=timeout_s)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank, world.communicator(rank))
        except BaseException as error:
            errors.append(error)
            world.fail(rank, f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def run_scenario(scenario: Scenario, schedule: str, device: str = "cpu") -> Outcome:
    """Every batch of a scenario, on all ranks, under a schedule; dense model and rows of a batch on `device`."""

    def body(rank: int, communicator: Any) -> Outcome:
        generator = scenario.generator(rank)
        model = scenario.model(communicator, generator).to(device)
        config = scenario_config(scenario, schedule)
        config.fetch = scenario.fetcher(rank) if scenario.fetch else None
        with NestedPipeline(model, scenario.dense_optimizer(model), config=config) as pipeline:
            losses = [float(step.loss) for step in pipeline.run(scenario.source(rank, generator))]
            return read_pipeline(pipeline, losses)

    parts = run_ranks_as_threads(scenario.world_size, body)
    return Outcome(
        [p.stores[0] for p in parts],
        [p.metadata[0] for p in parts],
        [p.dense[0] for p in parts],
        [p.losses[0] for p in parts],
        [],
        policies=[p.policies[0] for p in parts],
    )
