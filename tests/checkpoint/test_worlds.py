"""Checkpoints loaded by other numbers of ranks: the same rows, training goes on; and where that cannot be, an error."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from resume_cases import Batches, check_resume, on_all_ranks

from nestpipe_kernels import checkpoint, optim
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.data import SyntheticConfig, SyntheticDataset, batches
from nestpipe_kernels.errors import CheckpointError, RemoteRankError
from nestpipe_kernels.models import build
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_ranks_as_threads, scenario_config


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
@pytest.mark.parametrize("seed", range(4))
def test_uneven_ranks_that_have_ended_stay_ended(tmp_path, schedule, seed):
    """Ranks end at different batches, before and after the save, and have empty batches."""
    scenario = Scenario(world_size=3, batches=6, seed=seed, optimizer=optim.RowWiseAdagrad(lr=0.3))
    check_resume(scenario, schedule, tmp_path, 4)


def test_at_the_start_and_at_the_end_of_an_epoch(tmp_path):
    scenario = Scenario(world_size=2, batches=4, uneven=False)
    check_resume(scenario, "nested", tmp_path / "start", 0)
    check_resume(scenario, "nested", tmp_path / "last", 3)
    whole = on_all_ranks(scenario, "nested", tmp_path / "end", save_after=4)
    again = on_all_ranks(scenario, "nested", tmp_path / "end", load=True)
    assert [part.outcome.losses[0] for part in again] == [[], []]
    for before, after in zip(whole, again):
        after.outcome.losses[0] = before.outcome.losses[0]
        assert before.difference(after) == ""


@pytest.mark.parametrize("through", ["run", "progress"])
def test_through_run_and_progress(tmp_path, through):
    check_resume(Scenario(world_size=2, batches=5, seed=4), "dbp", tmp_path, 2, through=through)


def test_another_schedule_goes_on_alike(tmp_path):
    """Schedules are equal bit for bit, so a checkpoint of one may go on under another."""
    scenario = Scenario(world_size=2, batches=6, uneven=False)
    plain = on_all_ranks(scenario, "nested", tmp_path)
    on_all_ranks(scenario, "sequential", tmp_path, save_after=2, limit=2)
    for expected, got in zip(plain, on_all_ranks(scenario, "fwp", tmp_path, load=True)):
        got.outcome.losses[0] = expected.outcome.losses[0][:2] + got.outcome.losses[0]
        assert expected.difference(got) == ""


def _rows(parts: list[Any]) -> dict[Any, Any]:
    joined: dict[Any, Any] = {}
    for part in parts:
        for key, row in part.outcome.stores[0].items():
            joined[key] = (row, part.outcome.metadata[0][key])
    return joined


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 3), (3, 2), (2, 1)])
def test_rows_are_the_same_at_another_world_size(tmp_path, saved_by, loaded_by):
    def at(world: int) -> Scenario:
        return Scenario(world_size=world, batches=5, uneven=False, optimizer=optim.Adam(lr=0.1))

    before = on_all_ranks(at(saved_by), "nested", tmp_path, save_after=2, limit=2)
    saved = _rows_of_save(tmp_path, at(saved_by))

    def load(rank: int, communicator: Any) -> Any:
        scenario = at(loaded_by)
        model = scenario.model(communicator, scenario.generator(rank))
        config = scenario_config(scenario, "nested")
        with NestedPipeline(model, scenario.dense_optimizer(model), config=config) as pipeline:
            message = f"saved by {saved_by} ranks? in the middle of an epoch and is loaded by {loaded_by}"
            with pytest.raises(CheckpointError, match=message):
                checkpoint.load(tmp_path, model=model, pipeline=pipeline)
            assert pipeline.step_count == 0 and all(len(b.store) == 0 for b in pipeline.rank.bindings)
            report = checkpoint.load(tmp_path, model=model, pipeline=pipeline, start_epoch=True)
            assert (report.generators, report.saved_world_size, report.step_count) == (False, saved_by, 2)
            first = read(pipeline)
            losses = [float(s.loss) for s in pipeline.run(Batches(scenario, rank, scenario.generator(rank)))]
            assert len(losses) == 5 and pipeline.step_count == 7
            return first, [p.detach().numpy().tobytes() for p in model.parameters()]

    loaded: dict[Any, Any] = {}
    for rows, _ in run_ranks_as_threads(loaded_by, load):
        assert not loaded.keys() & rows.keys()
        loaded.update(rows)
    assert loaded == saved
    assert before[0].step_count == 2


def read(pipeline: NestedPipeline) -> dict[Any, Any]:
    """Rows and metadata of a rank."""
    from nestpipe_kernels.testing.explorer import read_store

    rows: dict[Any, bytes] = {}
    notes: dict[Any, Any] = {}
    pipeline.settle()
    for binding in pipeline.rank.bindings:
        read_store(binding.store, rows, notes)
    return {key: (row, notes[key]) for key, row in rows.items()}


def _rows_of_save(path: Any, scenario: Scenario) -> dict[Any, Any]:
    """What a checkpoint holds, read at the world size that saved it."""

    def load(rank: int, communicator: Any) -> Any:
        model = scenario.model(communicator, scenario.generator(rank))
        config = scenario_config(scenario, "nested")
        with NestedPipeline(model, scenario.dense_optimizer(model), config=config) as pipeline:
            checkpoint.load(path, model=model, pipeline=pipeline)
            return read(pipeline)

    return {key: value for part in run_ranks_as_threads(scenario.world_size, load) for key, value in part.items()}


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2), (2, 3)])
def test_batch_loader_continues_at_another_world_size(tmp_path, saved_by, loaded_by):
    """The samples seen before and after are those of the epoch, each once, though the ranks are others."""
    data = SyntheticDataset(SyntheticConfig(num_samples=60, seed=1))

    def train(world: int, load: bool) -> list[int]:
        def body(rank: int, communicator: Any) -> list[int]:
            model = build("dlrm", data, optim.SGD(lr=0.1), embedding_dim=4, process_group=communicator)
            seen: list[int] = []
            loader = batches(data, 5, rank, world, shuffle_seed=3)
            with NestedPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1)) as pipeline:
                if load:
                    checkpoint.load(tmp_path, model=model, pipeline=pipeline, loader=loader)
                for number, step in enumerate(pipeline.run(loader), 1):
                    seen.append(0 if step.output is None else len(step.output[1]))
                    if not load and number == 2:
                        checkpoint.save(tmp_path, model=model, pipeline=pipeline)
                        break
            return seen

        parts = run_ranks_as_threads(world, body)
        return [sum(counts) for counts in itertools.zip_longest(*parts, fillvalue=0)]

    first = train(saved_by, load=False)
    rest = train(loaded_by, load=True)
    assert first == [5 * saved_by] * 2
    assert sum(first) + sum(rest) == 60
    assert rest[0] == min(5 * loaded_by, 60 - sum(first))


def test_async_checkpoints_hold_the_state_and_training_goes_on(tmp_path):
    """Its rows are stale by design; a checkpoint holds the rows after the last step and the next ones start fresh."""
    scenario = Scenario(world_size=2, batches=5, uneven=False)
    run = on_all_ranks(scenario, "async", tmp_path, save_after=3, limit=3)
    resumed = on_all_ranks(scenario, "async", tmp_path, load=True, limit=1)
    assert [part.step_count for part in run + resumed] == [3, 3, 4, 4]


def test_ranks_without_generators_and_without_a_position(tmp_path):
    """What resharding leaves: every rank's state but its generators, and no position of a loader that counts."""
    scenario = Scenario(world_size=2, batches=4, uneven=False)
    on_all_ranks(scenario, "nested", tmp_path, save_after=2)
    manifest = Manifest.load(tmp_path)
    ranks = [{**tree, "generators": {}, "loader": {"kind": "unknown"}} for tree in manifest.ranks]
    dataclasses.replace(manifest, ranks=ranks).save(tmp_path)
    with pytest.raises((CheckpointError, RemoteRankError), match="does not say where the data stood"):
        on_all_ranks(scenario, "nested", tmp_path, load=True)
    first, second = on_all_ranks(scenario, "nested", tmp_path, load=True, start_epoch=True)
    assert (first.report.generators, first.report.data) == (False, "starts an epoch")
    assert len(first.outcome.losses[0]) == len(second.outcome.losses[0]) == 4 and first.step_count == 6


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
def test_after_a_step_without_any_samples(tmp_path, schedule):
    """A batch that is empty everywhere is a step like others."""
    scenario = Scenario(world_size=1, batches=7, seed=2)
    assert scenario.sizes(0)[1] == 0 and all(scenario.sizes(0)[2:])
    check_resume(scenario, schedule, tmp_path, 2)
