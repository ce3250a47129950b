"""Checkpoints of several copies of the tables: one copy is saved, any number of ranks and groups loads it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from resume_cases import check_resume, on_all_ranks
from test_worlds import read

from nestpipe_kernels import checkpoint, optim, policy
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.tools.verify import verify
from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.errors import CheckpointError
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.testing.threads import run_ranks_as_threads, scenario_config
from nestpipe_kernels.types import PoolingType

ADMISSION = {
    "exact": policy.MinFrequency(3),
    "filter": policy.MinFrequency(3, policy.CountingFilter(4096)),
}


def scenario(world: int = 4, groups: int = 2, admission: str = "exact", **average: Any) -> Scenario:
    return Scenario(
        world_size=world,
        batches=5,
        uneven=False,
        num_keys=16,
        optimizer=optim.Adam(lr=0.1),
        tables=(
            TableChoice("user", 4, ("user",), admission=ADMISSION[admission]),
            TableChoice("item", 4, ("item", "history"), PoolingType.MEAN),
        ),
        sparse_groups=SparseGroups(groups, **average),
    )


def load(path: Any, case: Scenario) -> list[tuple[dict[Any, Any], Any]]:
    """Rows of each rank, and the counts of keys without rows."""

    def body(rank: int, communicator: Any) -> Any:
        model = case.model(communicator, case.generator(rank))
        with NestedPipeline(model, case.dense_optimizer(model), config=scenario_config(case, "nested")) as pipeline:
            checkpoint.load(path, model=model, pipeline=pipeline, start_epoch=True)
            store = pipeline.rank.bindings[0].store
            counts = {name: value.tolist() for name, value in store.admission_state("user").items()}
            return read(pipeline), dict(zip(*counts.values(), strict=True)), store.counters("user")

    return run_ranks_as_threads(case.world_size, body)


def joined(parts: list[dict[Any, Any]]) -> dict[Any, Any]:
    return {key: value for part in parts for key, value in part.items()}


@pytest.mark.parametrize("admission", [pytest.param("exact", marks=pytest.mark.soak), "filter"])
def test_saved_by_two_groups_loaded_by_any(tmp_path, admission):
    """The same training by one group of 4 ranks saves the same rows, counts and counters."""
    for name, groups in (("two", 2), ("one", 1)):
        on_all_ranks(scenario(4, groups, admission), "nested", tmp_path / name, save_after=3, limit=3)
    assert not verify(tmp_path / "two").problems
    wanted = load(tmp_path / "one", scenario(1, 1, admission))[0]
    assert wanted[0] and wanted[1]
    for path, world, groups in (("two", 1, 1), ("two", 4, 1), ("two", 4, 2), ("one", 4, 2), ("two", 4, 4)):
        parts = load(tmp_path / path, scenario(world, groups, admission))
        shards = world // groups
        for number in range(groups):
            copy = parts[number * shards : (number + 1) * shards]
            assert joined([rows for rows, _, _ in copy]) == wanted[0], (path, world, groups)
            assert sum(len(rows) for rows, _, _ in copy) == len(wanted[0])
            assert joined([counts for _, counts, _ in copy]) == wanted[1]
            totals = {name: sum(c[name] for _, _, c in copy) for name in wanted[2]}
            assert totals == wanted[2]


@pytest.mark.parametrize(
    "groups", [pytest.param(SparseGroups(2), marks=pytest.mark.soak), SparseGroups(2, "average", 2)]
)
def test_going_on_equals_not_having_stopped(tmp_path, groups):
    case = dataclasses.replace(scenario(), sparse_groups=groups)
    check_resume(case, "nested", tmp_path, 2)


def test_copies_that_differ_are_averaged_first(tmp_path):
    case = scenario(sync="average", average_every=3)

    def body(rank: int, communicator: Any) -> Any:
        generator = case.generator(rank)
        model = case.model(communicator, generator)
        with NestedPipeline(model, case.dense_optimizer(model), config=scenario_config(case, "nested")) as pipeline:
            steps = iter(pipeline.run(case.loader(rank, generator)))
            next(steps)
            with pytest.raises(CheckpointError, match=r"the 2 copies of the tables differ.*every 3 updates") as caught:
                checkpoint.save(tmp_path, model=model, pipeline=pipeline)
            assert "multiple of 3, or call average_copies()" in str(caught.value)
            model.lookup.average_copies()
            checkpoint.save(tmp_path, model=model, pipeline=pipeline)
            rows = read(pipeline)
            assert len(list(steps)) == 4
            return rows

    parts = run_ranks_as_threads(4, body)
    assert parts[:2] == parts[2:]
    assert joined([rows for rows, _, _ in load(tmp_path, scenario(1, 1))]) == joined(parts)


def test_a_number_of_groups_that_cannot_be_is_named(tmp_path):
    on_all_ranks(scenario(4, 2), "nested", tmp_path, save_after=1, limit=1)
    manifest = Manifest.load(tmp_path)
    assert (manifest.num_shards, manifest.position["sparse_groups"]) == (2, 2)
    manifest.position["sparse_groups"] = 3
    with pytest.raises(CheckpointError, match=r"position.sparse_groups must divide the 4 ranks, got 3"):
        _ = manifest.num_shards
