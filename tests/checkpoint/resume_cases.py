"""A scenario trained in one go, and in two with a checkpoint in between, with all that the two must have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nestpipe_kernels import checkpoint
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.explorer import Outcome
from nestpipe_kernels.testing.scenario import Scenario, ScenarioBatch
from nestpipe_kernels.testing.threads import read_pipeline, run_ranks_as_threads, scenario_config

SCHEDULES = ("sequential", "dbp", "fwp", "nested", "nested+early")


class Batches:
    """A rank's batches: an iterable without a state, which draws from the rank's generator as it goes."""

    def __init__(self, scenario: Scenario, rank: int, generator: torch.Generator | None) -> None:
        self._made = (scenario, rank, generator)

    def __iter__(self) -> Iterator[ScenarioBatch]:
        scenario, rank, generator = self._made
        return scenario.loader(rank, generator)


@dataclass
class Part:
    """What one rank has after a part of a training."""

    outcome: Outcome
    momentum: list[bytes]
    generator: bytes
    step_count: int
    counters: dict[str, dict[str, int]]
    """Of each table; those of all ranks together go on, at rank 0."""
    report: Any = None

    def difference(self, other: Part) -> str:
        """The first difference in words."""
        found = self.outcome.difference(other.outcome)
        for name in ("momentum", "generator", "step_count"):
            if not found and getattr(self, name) != getattr(other, name):
                found = f"{name} differs"
        return found


def train_part(
    scenario: Scenario,
    schedule: str,
    rank: int,
    communicator: Any,
    path: str | os.PathLike[str],
    *,
    load: bool = False,
    save_after: int | None = None,
    through: str = "run",
    limit: int | None = None,
    **settings: Any,
) -> Part:
    """Train to the end (or `limit` steps); save after so many steps; start from a checkpoint if `load`."""
    generator = scenario.generator(rank)
    model = scenario.model(communicator, generator)
    optimizer = scenario.dense_optimizer(model)
    if load:  # nothing may be right by accident
        with torch.no_grad():
            model.linear.weight.add_(7.0)
        if generator is not None:
            generator.manual_seed(12345)
    with NestedPipeline(model, optimizer, config=scenario_config(scenario, schedule)) as pipeline:
        loader = Batches(scenario, rank, generator)
        report = checkpoint.load(path, model=model, pipeline=pipeline, **settings) if load else None
        losses: list[float] = []
        if save_after == 0:
            checkpoint.save(path, model=model, pipeline=pipeline)
        for loss in _losses(pipeline, loader, through):
            losses.append(loss)
            if len(losses) == save_after:
                checkpoint.save(path, model=model, pipeline=pipeline)
            if len(losses) == limit:
                break
        state = b"" if generator is None else generator.get_state().numpy().tobytes()
        moments = [s["momentum_buffer"] for s in optimizer.state.values() if s.get("momentum_buffer") is not None]
        outcome = read_pipeline(pipeline, losses)
        return Part(
            outcome,
            [m.numpy().tobytes() for m in moments],
            state,
            pipeline.step_count,
            {name: facts.pop("counters") for name, facts in outcome.policies[0].items()},
            report,
        )


def all_counters(parts: list[Part]) -> dict[str, dict[str, int]]:
    """Sums over ranks."""
    first = parts[0].counters
    return {t: {name: sum(p.counters[t][name] for p in parts) for name in first[t]} for t in first}


def _losses(pipeline: NestedPipeline, loader: Batches, through: str) -> Iterator[float]:
    if through == "run":
        for step in pipeline.run(loader):
            yield float(step.loss)
        return
    iterator = iter(loader)
    while True:
        try:
            step = pipeline._step(iterator)
        except StopIteration:
            return
        yield float(step.loss)


def on_all_ranks(scenario: Scenario, schedule: str, path: Any, **settings: Any) -> list[Part]:
    """`train_part` on every rank of the scenario."""
    return run_ranks_as_threads(
        scenario.world_size, lambda rank, comm: train_part(scenario, schedule, rank, comm, path, **settings)
    )


def check_resume(scenario: Scenario, schedule: str, path: Any, save_after: int, **settings: Any) -> None:
    """Not stopping, saving and going on, and going on from what was saved must be one and the same."""
    plain = on_all_ranks(scenario, schedule, path, **settings)
    saving = on_all_ranks(scenario, schedule, path, save_after=save_after, **settings)
    resumed = on_all_ranks(scenario, schedule, path, load=True, **settings)
    for expected, saved, got in zip(plain, saving, resumed):
        assert len(expected.outcome.losses[0]) > save_after, "the scenario ends before the save"
        assert not expected.difference(saved), f"saving changed the training: {expected.difference(saved)}"
        got.outcome.losses[0] = expected.outcome.losses[0][:save_after] + got.outcome.losses[0]
        assert not expected.difference(got), expected.difference(got)
    counters = all_counters(plain), all_counters(resumed)
    assert counters[0] == counters[1], f"counters: {counters[0]} and {counters[1]}"
