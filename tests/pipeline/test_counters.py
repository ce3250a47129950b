"""Counters of every step through a callback, and stages as spans of torch's profiler."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_model import Recommender, make_batch, make_pipeline

import nestpipe_kernels as nk
from nestpipe_kernels.errors import NonFiniteGradientError
from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.testing.threads import run_ranks_as_threads, scenario_config
from nestpipe_kernels.types import PoolingType

SCENARIO = Scenario(world_size=2, batches=4, samples=6, uneven=True, seed=3)
Rows = set[tuple[str, int]]


def counted(scenario: Scenario, schedule: str = "nested", **settings: Any) -> list[list[nk.StepCounters]]:
    """[rank][step]"""

    def body(rank: int, communicator: Any) -> list[nk.StepCounters]:
        generator, found = scenario.generator(rank), []
        model = scenario.model(communicator, generator)
        config = replace(scenario_config(scenario, schedule), **settings)
        with nk.NestedPipeline(model, scenario.dense_optimizer(model), config=config) as pipeline:
            pipeline.add_step_callback(found.append)
            for number, step in enumerate(pipeline.run(scenario.loader(rank, generator)), 1):
                assert len(found) == number and found[-1].step == step.index
        return found

    return run_ranks_as_threads(scenario.world_size, body)


def rows_of(scenario: Scenario) -> list[list[Rows]]:
    """[rank][batch] the rows that the samples look up."""
    table_of = {feature: table.name for table in scenario.tables for feature in table.features}
    found: list[list[Rows]] = []
    for rank in range(scenario.world_size):
        batches = [b.sparse for b in scenario.loader(rank, scenario.generator(rank))]
        batches += [None] * (scenario.batches - len(batches))
        found.append(
            [
                set() if sparse is None else {(t, k) for f, t in table_of.items() for k in sparse[f].values().tolist()}
                for sparse in batches
            ]
        )
    return found


@pytest.mark.parametrize("schedule", ["sequential", "nested", "nested+early"])
def test_rows_are_those_of_the_batches(schedule: str) -> None:
    wanted, found = rows_of(SCENARIO), counted(SCENARIO, schedule)
    assert len(found[0]) == len(found[1]) >= 3
    seen: Rows = set()
    before: Rows = set()
    for t, of_ranks in enumerate(zip(*found)):
        here = wanted[0][t] | wanted[1][t]
        sizes = [SCENARIO.sizes(rank) for rank in range(2)]
        assert [c.samples for c in of_ranks] == [s[t] if t < len(s) else 0 for s in sizes]
        assert [c.distinct_rows for c in of_ranks] == [len(wanted[0][t]), len(wanted[1][t])]
        assert [c.gradients_sent for c in of_ranks] == [c.distinct_rows for c in of_ranks]
        assert sum(c.rows_sent for c in of_ranks) == sum(c.distinct_rows for c in of_ranks)
        assert sum(c.owned_rows for c in of_ranks) == len(here)
        assert sum(c.kept_rows for c in of_ranks) == (0 if schedule == "sequential" else len(here & before))
        assert sum(c.new_rows for c in of_ranks) == len(here - seen)
        seen |= here
        before = here
        for table in SCENARIO.tables:
            held = sum(c.table_rows[table.name] for c in of_ranks)
            assert held == sum(name == table.name for name, _ in seen)
        assert {c.evicted_rows + c.rowless_keys + c.skipped_rows for c in of_ranks} == {0}
        assert [c.rank for c in of_ranks] == [0, 1]


@pytest.mark.parametrize("schedule", ["nested", "nested+early"])
def test_rows_that_are_read_again_after_outside_access_are_not_kept(schedule: str) -> None:
    model, found = Recommender(), []
    with make_pipeline(model, schedule) as pipeline:
        pipeline.add_step_callback(found.append)
        iterator = iter([make_batch(t, 20, keys=5) for t in range(5)])
        for step in range(5):
            pipeline.progress(iterator)
            if step == 2:
                model.ebc.store("item").find(torch.arange(5))
    assert [c.kept_rows > 0 for c in found] == [False, True, True, False, True]


def test_rows_sent_for_every_micro_batch_are_more() -> None:
    scenario = replace(SCENARIO, uneven=False, num_keys=3)
    once = counted(scenario)[0]
    often = counted(replace(scenario, row_transfer="per_micro_batch"))[0]
    assert sum(c.rows_sent for c in often) > 1.2 * sum(c.rows_sent for c in once)
    assert [c.distinct_rows for c in often] == [c.distinct_rows for c in once]


@pytest.mark.parametrize("wire, row_bytes", [("fp32", 16), ("bf16", 8), ("int8", 8)])
def test_bytes_are_those_that_leave_the_rank(wire: str, row_bytes: int) -> None:
    scenario = replace(SCENARIO, row_wire=wire, gradient_wire=wire)
    for of_ranks in zip(*counted(scenario)):
        # What rank 0 sends out are the gradients of the rows that rank 1 sends to it.
        assert of_ranks[0].gradient_bytes == of_ranks[1].row_bytes
        assert of_ranks[1].gradient_bytes == of_ranks[0].row_bytes
        for counters in of_ranks:
            assert counters.row_bytes % row_bytes == 0
            assert counters.row_bytes <= row_bytes * counters.rows_sent
    assert any(0 < c.row_bytes < row_bytes * c.rows_sent for rank in counted(scenario) for c in rank)
    alone = counted(replace(scenario, world_size=1, uneven=False))[0]
    assert [(c.row_bytes, c.gradient_bytes) for c in alone] == [(0, 0)] * 4
    assert all(c.rows_sent == c.distinct_rows == c.owned_rows > 0 for c in alone)


def test_rows_that_go_and_keys_without_rows() -> None:
    tables = (
        TableChoice("user", 4, ("user",), capacity=4, eviction=nk.policy.LRU()),
        TableChoice("item", 4, ("item",), PoolingType.MEAN, admission=nk.policy.MinFrequency(3)),
    )
    scenario = Scenario(world_size=1, batches=6, samples=3, num_keys=12, tables=tables, uneven=False)
    found = counted(scenario)[0]
    assert sum(c.evicted_rows for c in found) > 0
    assert sum(c.rowless_keys for c in found) > 0
    assert max(c.table_rows["user"] for c in found) == 4
    held = {"user": 0, "item": 0}
    for c in found:
        assert sum(c.table_rows.values()) == sum(held.values()) + c.new_rows - c.evicted_rows
        held = dict(c.table_rows)


def test_times_fit_into_the_step() -> None:
    for rank in counted(SCENARIO, "sequential"):
        for c in rank:
            parts = [c.compute_ms, c.exposed_lookup_ms, c.exposed_communication_ms, c.exposed_other_ms]
            assert min(parts) >= 0 and sum(parts) <= c.step_ms
        assert sum(c.compute_ms for c in rank) > 0
        assert sum(c.exposed_lookup_ms for c in rank) > 0


def test_scalars_name_everything() -> None:
    counters = counted(replace(SCENARIO, world_size=1, batches=1, uneven=False))[0][0]
    scalars = counters.scalars()
    names = {field.name for field in dataclasses.fields(counters)} - {"step", "rank", "table_rows"}
    assert set(scalars) == names | {"table_rows/user", "table_rows/item"}
    assert scalars["rows_sent"] == counters.rows_sent and scalars["table_rows/user"] == counters.table_rows["user"]
    assert {type(value) for value in scalars.values()} == {float}
    with pytest.raises(dataclasses.FrozenInstanceError):
        counters.step = 1  # type: ignore[misc]


def test_a_callback_may_read_rows_and_may_raise() -> None:
    model, seen = Recommender(), []

    def look(counters: nk.StepCounters) -> None:
        store = model.ebc.store("user")
        seen.append((counters.step, len(store), bool(store.find(store.keys())[0].isfinite().all())))
        if counters.step == 1:
            raise LookupError("the disk of the log is full")

    with make_pipeline(model) as pipeline:
        pipeline.add_step_callback(look)
        iterator = iter([make_batch(seed) for seed in range(4)])
        pipeline.progress(iterator)
        with pytest.raises(LookupError, match="the disk of the log is full"):
            pipeline.progress(iterator)
        pipeline.progress(iterator)
        model.eval()
        pipeline.progress(iter([make_batch(9)]))
        assert pipeline.step_count == 3
    assert [step for step, _, _ in seen] == [0, 1, 2]
    assert all(finite for _, _, finite in seen)


def test_steps_that_do_not_count_are_not_reported() -> None:
    found: list[nk.StepCounters] = []
    with make_pipeline(Recommender(), clustering="none") as pipeline:
        pipeline.add_step_callback(found.append)
        iterator = iter([make_batch(0), make_batch(1, keys=9, bad=1), make_batch(2)])
        pipeline.progress(iterator)
        with pytest.raises(NonFiniteGradientError):
            pipeline.progress(iterator)
        pipeline.progress(iterator)
    assert [c.step for c in found] == [0, 1]
    last = found[-1]
    assert sum(last.table_rows.values()) == sum(found[0].table_rows.values()) + last.new_rows, (
        "the bad batch's are gone"
    )


def test_a_callback_that_comes_late_misses_what_is_under_way() -> None:
    found: list[nk.StepCounters] = []
    with make_pipeline(Recommender()) as pipeline:
        for step in pipeline.run([make_batch(seed) for seed in range(8)]):
            if step.index == 0:
                pipeline.add_step_callback(found.append)
    steps = [c.step for c in found]
    assert steps == list(range(steps[0], 8)) and 1 <= steps[0] <= 4


def test_what_is_no_callback() -> None:
    with (
        make_pipeline(Recommender()) as pipeline,
        pytest.raises(TypeError, match="add_step_callback: expected a function of one StepCounters, got int"),
    ):
        pipeline.add_step_callback(3)  # type: ignore[arg-type]


def profiled(**settings: Any) -> set[str]:
    """Names of our spans while three batches are trained."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with make_pipeline(Recommender()) as pipeline:
        iterator = iter([make_batch(seed) for seed in range(4)])
        pipeline.progress(iterator)
        with torch.profiler.profile(activities=activities, **settings) as profile:
            for _ in range(3):
                pipeline.progress(iterator)
            pipeline.drain()
    return {event.name for event in profile.events() if event.name.startswith("nestpipe::")}


def test_stages_are_spans_of_torchs_profiler() -> None:
    on_caller = profiled()
    assert {"nestpipe::prefetch", "nestpipe::forward_backward", "nestpipe::dense_step"} <= on_caller
    config = getattr(torch._C._profiler, "_ExperimentalConfig", None)
    if config is None or "profile_all_threads" not in (config.__init__.__doc__ or ""):
        pytest.skip("this torch profiles the thread that starts it alone")
    everywhere = profiled(experimental_config=config(profile_all_threads=True))
    functions = {f"nestpipe::{stage.name}" for stage in build_graph("nested").stages}
    assert functions <= everywhere
