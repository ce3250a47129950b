"""Sparse groups: settings that cannot be, evaluation, and modules without a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import nestpipe_kernels as nk
from nestpipe_kernels.comm import InMemoryWorld, SparseGroups, Topology
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.explorer import read_store
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_ranks_as_threads, scenario_config

CASE = Scenario(world_size=4, uneven=False, batches=4, noise=False, optimizer=nk.optim.Adam(lr=0.1))


def collection(communicator: Any, groups: Any, **settings: Any) -> nk.EmbeddingBagCollection:
    tables = [nk.EmbeddingBagConfig(nk.UNBOUNDED, 4, "t", feature_names=["f"])]
    settings = {"optimizer": nk.optim.SGD(lr=0.1)} | settings
    return nk.EmbeddingBagCollection(tables, process_group=communicator, sparse_groups=groups, **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, r"SparseGroups: count must be an integer >= 1, got 0"),
        ({"count": True}, r"SparseGroups: count must be an integer >= 1, got True"),
        ({"sync": "mean"}, r"SparseGroups: unknown sync 'mean': choose one of exact, average"),
        ({"sync": "average", "average_every": 0}, r"average_every must be an integer >= 1, got 0"),
        ({"average_every": 2}, r"average_every=2 needs sync='average'; with sync='exact' the copies never differ"),
    ],
)
def test_settings_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        SparseGroups(**arguments)


def test_groups_that_the_ranks_do_not_form():
    world = InMemoryWorld(4)
    for groups in (3, SparseGroups(3, "average")):
        with pytest.raises(ValueError, match=r"3 groups do not divide the 4 ranks of the process group.*of 1, 2, 4"):
            collection(world.communicator(0), groups)
    with pytest.raises(TypeError, match="EmbeddingBagCollection: sparse_groups must be an integer or SparseGroups"):
        collection(None, "2")
    with pytest.raises(ValueError, match=r"sparse_groups=2 needs an optimizer"):
        nk.EmbeddingBagCollection([nk.EmbeddingBagConfig(9, 4, "t")], process_group=world, sparse_groups=2)
    with pytest.raises(ValueError, match=r"2 groups do not divide the 1 rank of the process group; choose 1$"):
        collection(None, 2)


def test_places_in_a_world():
    world = InMemoryWorld(6)
    places = [Topology(world.communicator(r), SparseGroups(2)) for r in range(6)]
    assert [(t.group_number, t.shard) for t in places] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [(t.group.rank, t.group.size, t.replicas.rank, t.replicas.size) for t in places] == [
        (t.shard, 3, t.group_number, 2) for t in places
    ]
    assert places[4].sources() == slice(3, 6) and places[4].sources(0) == slice(0, 3)
    with pytest.raises(ValueError, match=r"parts must hold each of the 6 ranks once, got \[\[0, 1\], \[1, 2\]\]"):
        world.communicator(0).split("group", [[0, 1], [1, 2]])


def test_a_rank_that_is_gone_is_named_by_its_number_in_the_world():
    world = InMemoryWorld(4, timeout_s=5)
    replicas = Topology(world.communicator(1), SparseGroups(2)).replicas
    handle = replicas.group("keys").all_to_all(torch.zeros(2), [1, 1], [1, 1], "x")
    world.fail(3, "its machine is on fire")
    with pytest.raises(nk.errors.CommunicationError, match=r"rank 1 waits for rank 3, which is gone: its machine"):
        handle.wait()


class TwoCollections(nn.Module):
    def __init__(self, communicator: Any, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = collection(communicator, first), collection(communicator, second)
        self.linear = nn.Linear(1, 1)


def test_modules_and_ranks_that_differ():
    def modules(rank: int, communicator: Any) -> str:
        with pytest.raises(
            ValueError, match=r"modules have different sparse groups \('first': .*; 'second': "
        ) as error:
            NestedPipeline(TwoCollections(communicator, 1, 2))
        return str(error.value)

    run_ranks_as_threads(2, modules)

    def ranks(rank: int, communicator: Any) -> str:
        groups = SparseGroups(2, "average", 1 + (rank == 1))
        with pytest.raises(ValueError, match="ranks disagree on sparse groups: rank ") as error:
            NestedPipeline(TwoCollections(communicator, groups, groups))
        return str(error.value)

    run_ranks_as_threads(2, ranks)


def test_stale_schedules_do_not_average():
    def body(rank: int, communicator: Any) -> None:
        groups = SparseGroups(2, "average")
        with pytest.raises(ValueError, match="schedule 'async' trains on stale rows"):
            NestedPipeline(TwoCollections(communicator, groups, groups), config=nk.PipelineConfig(schedule="async"))

    run_ranks_as_threads(2, body)


def rows_of(module: Any) -> dict[Any, Any]:
    rows: dict[Any, Any] = {}
    notes: dict[Any, Any] = {}
    for store in module.row_stores():
        read_store(store, rows, notes)
    return {key: (row, notes[key]) for key, row in rows.items()}


def trained(groups: SparseGroups, how: str) -> list[Any]:
    """(rows, outputs of an evaluation) of each rank after a training with a pipeline, or without one."""

    def body(rank: int, communicator: Any) -> Any:
        case = replace(CASE, sparse_groups=groups)
        model = case.model(communicator, None)
        if how == "eager":
            for batch in case.loader(rank, None):
                model(batch)[0].backward()
            model.eval()
            with torch.no_grad():
                outputs = [model(batch)[1][0].tolist() for batch in case.loader(rank, None)]
            return rows_of(model.lookup), outputs, model.lookup.store("user").counters()
        with NestedPipeline(model, case.dense_optimizer(model), config=scenario_config(case, "nested")) as pipeline:
            for _ in pipeline.run(case.loader(rank, None)):
                pass
            model.eval()
            before = rows_of(model.lookup)
            losses = [step.output[0].tolist() for step in pipeline.run(case.loader(rank, None))]
            assert rows_of(model.lookup) == before
        return before, losses, model.lookup.store("user").counters()

    return run_ranks_as_threads(CASE.world_size, body)


@pytest.mark.parametrize("how", ["eager", "pipeline"])
def test_evaluation_and_modules_without_a_pipeline(how):
    plain, exact = trained(SparseGroups(), how), trained(SparseGroups(2), how)
    assert [part[1] for part in exact] == [part[1] for part in plain]
    joined = {key: value for part in plain for key, value in part[0].items()}
    for copy in (exact[:2], exact[2:]):
        assert {key: value for part in copy for key, value in part[0].items()} == joined
    averaged = trained(SparseGroups(2, "average"), how)
    assert averaged[0][0] == averaged[2][0] and averaged[1][0] == averaged[3][0]
    assert {key: value[1] for part in averaged[:2] for key, value in part[0].items()} == {
        key: value[1] for key, value in joined.items()
    }
    assert averaged[0][0] != exact[0][0]


def test_copies_without_a_pipeline_differ_until_they_are_averaged():
    def body(rank: int, communicator: Any) -> Any:
        case = replace(CASE, sparse_groups=SparseGroups(2, "average", 100))
        model = case.model(communicator, None)
        for batch in case.loader(rank, None):
            model(batch)[0].backward()
        apart = rows_of(model.lookup)
        model.lookup.average_copies()
        model.lookup.average_copies()
        return apart, rows_of(model.lookup)

    parts = run_ranks_as_threads(4, body)
    assert parts[0][0] != parts[2][0]
    assert parts[0][1] == parts[2][1] and parts[1][1] == parts[3][1]
