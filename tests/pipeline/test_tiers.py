"""Pipelines over stores whose rows lie in a file with too little memory: the graph, and the same bits as without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_model import Recommender as SmallModel
from small_model import make_batch, make_pipeline, make_tables, run_rank

import nestpipe_kernels as nk
from nestpipe_kernels import optim, policy
from nestpipe_kernels.errors import NonFiniteGradientError
from nestpipe_kernels.pipeline.scheduler import check_lanes
from nestpipe_kernels.pipeline.schedules import SCHEDULES, build_graph
from nestpipe_kernels.pipeline.validate import conflicts_without_path, validate
from nestpipe_kernels.pipeline.warming import WARM_LANE
from nestpipe_kernels.stages.registry import STAGE_FUNCTIONS
from nestpipe_kernels.testing.explorer import Orders, explore
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.testing.threads import run_scenario
from nestpipe_kernels.types import PoolingType

MEMORY = 1 << 16
TABLES = (TableChoice("user", 100, ("user",)), TableChoice("item", 100, ("item", "history"), PoolingType.MEAN))
"""Rows of 512 bytes and more: 128 of them fit at most."""


def scenario(tables: Any = TABLES, **settings: Any) -> Scenario:
    settings = {"num_keys": 1500, "samples": 40, "batches": 6, "optimizer": optim.RowWiseAdagrad(lr=0.3), **settings}
    return Scenario(tables=tables, **settings)


def in_file(case: Scenario, directory: Any) -> Scenario:
    tier = nk.FileTier(directory, MEMORY)
    return replace(case, tables=tuple(replace(table, tier=tier) for table in case.tables))


# --------------------------------------------------------------------------------------------------------- the graph


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfer", ["once", "per_micro_batch"])
def test_graphs_with_warming_are_valid(name, transfer):
    graph = build_graph(name, transfer, tiers=True)
    check_lanes(graph, 3)
    assert [stage.name for stage in graph.stages if stage.lane == WARM_LANE] == ["warm"]
    if transfer == "once":
        validate(graph)
        for label in ("route_keys -> warm", "warm -> retrieve"):
            assert conflicts_without_path(graph.without(label)), label


@pytest.mark.parametrize("label", ["route_keys -> warm", "warm -> retrieve"])
def test_removing_an_edge_of_warming_is_seen(label, tmp_path):
    case = in_file(scenario(world_size=2, uneven=False, num_keys=5, samples=4, batches=4, seed=3), tmp_path)
    graph = build_graph("nested", tiers=True)
    orders = Orders(graph, case.world_size, case.batches, case.micro_batches)
    expected = explore(graph, case.ranks(), orders.random(0), case.batches)
    assert expected.broken == ""
    for seed in range(1, 4):
        assert expected.difference(explore(graph, case.ranks(), orders.random(seed), case.batches)) == ""
    without = graph.without(label)
    for seed in range(200):
        order = orders.directed(label, seed)
        assert order is not None
        if expected.difference(explore(without, case.ranks(), order, case.batches)):
            return
    pytest.fail(f"200 directed orders without {label} all gave the same result")


def stages_of(pipeline: nk.NestedPipeline) -> set[str]:
    return {stage.name for stage in pipeline._scheduler.graph.stages}


def test_only_stores_with_a_tier_are_warmed(tmp_path, monkeypatch):
    warmed = []

    def counting(self: Any, keys: torch.Tensor, tables: torch.Tensor) -> None:
        warmed.append((self.tables[0].name, len(keys)))

    monkeypatch.setattr(nk.EmbeddingStore, "warm", counting)
    tables = make_tables()
    tables[1] = replace(tables[1], tier=nk.FileTier(tmp_path, MEMORY))
    with make_pipeline(SmallModel(None, make_tables())) as plain:
        assert "warm" not in stages_of(plain)
        list(plain.run([make_batch(0)]))
    with make_pipeline(SmallModel(None, tables)) as tiered:
        assert "warm" in stages_of(tiered)
        list(tiered.run([make_batch(t) for t in range(3)]))
    assert [name for name, _ in warmed] == ["item"] * 3 and all(count > 0 for _, count in warmed)


# ---------------------------------------------------------------------------------------------------------- same bits


def reads(monkeypatch: Any) -> list[dict[str, int]]:
    """Counters of every store at its last warming; filled while pipelines run."""
    seen: dict[int, Any] = {}
    warm = STAGE_FUNCTIONS["warm"]

    def noted(rank: Any, batch: Any, micro: int) -> None:
        warm(rank, batch, micro)
        for binding in rank.bindings:
            seen[id(binding.store)] = binding.store.tier_counters()

    monkeypatch.setitem(STAGE_FUNCTIONS, "warm", noted)
    return seen.values()  # type: ignore[return-value]


CASES = {
    "one rank": {"world_size": 1},
    "two ranks, resend, Adam": {"world_size": 2, "row_transfer": "per_micro_batch", "optimizer": optim.Adam(lr=0.1)},
    "three ranks, clustered": {"world_size": 3, "clustering": "key", "micro_batches": 3},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_every_schedule_equals_sequential_in_memory(settings, tmp_path, monkeypatch):
    case = scenario(uneven=settings["world_size"] > 1, seed=2, **settings)
    expected = run_scenario(case, "sequential")
    counters = reads(monkeypatch)
    for schedule in ("sequential", "dbp", "fwp", "nested"):
        assert expected.difference(run_scenario(in_file(case, tmp_path), schedule)) == "", schedule
    if settings["world_size"] == 1:
        assert max(seen["read"] for seen in counters) > MEMORY // 4096
        assert max(seen["dropped"] for seen in counters) > 0


RULES = {
    "lru": {"capacity": 300, "eviction": policy.LRU(slack=0.1)},
    "lfu, admission": {"capacity": 300, "eviction": policy.LFU(), "admission": policy.MinFrequency(2)},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_that_come_and_go(rule, tmp_path):
    tables = tuple(replace(table, **rule) for table in TABLES)
    case = scenario(tables, world_size=2, num_keys=900, uneven=False, batches=8, seed=4)
    expected = run_scenario(case, "sequential")
    assert sum(t["counters"]["evicted"] for rank in expected.policies for t in rank.values()) > 50
    assert expected.difference(run_scenario(in_file(case, tmp_path), "nested")) == ""


def test_a_batch_that_does_not_count_leaves_no_trace(tmp_path):
    batches = [make_batch(t, 40, keys=400, bad=int(t == 2)) for t in range(5)]
    states = []
    for tier in (None, nk.FileTier(tmp_path, MEMORY)):
        pipeline = make_pipeline(SmallModel(None, make_tables(capacity=200, eviction=policy.LRU(), tier=tier)))
        outcome = run_rank(pipeline, batches, watch=[2])
        assert [type(error) for _, error in outcome.errors] == [NonFiniteGradientError]
        assert all(before == after for before, after in outcome.around_errors)
        states.append(outcome.state)
    assert states[0] == states[1]


def test_a_disk_without_room_fails_the_batch_alone(tmp_path, monkeypatch):
    batches = [make_batch(t, 20, keys=50, first_key=1000 * (t == 2)) for t in range(4)]
    model = SmallModel(None, make_tables(tier=nk.FileTier(tmp_path, MEMORY)))
    retrieve = nk.EmbeddingStore.retrieve

    def full(self: Any, keys: Any, tables: Any, counts: Any, batch: int) -> Any:
        if bool((keys >= 1000).any()):  # the third batch's: it fails again when it is retrieved again
            raise OSError(28, "store: the file of rows in directory '/d' cannot grow")
        return retrieve(self, keys, tables, counts, batch)

    monkeypatch.setattr(nk.EmbeddingStore, "retrieve", full)
    outcome = run_rank(make_pipeline(model), batches, watch=[2])
    assert [str(error) for _, error in outcome.errors] == [
        "[Errno 28] store: the file of rows in directory '/d' cannot grow"
    ]
    monkeypatch.undo()
    expected = run_rank(make_pipeline(SmallModel(None, make_tables())), [batches[0], batches[1], batches[3]])
    assert outcome.state.rows == expected.state.rows


def test_without_a_pipeline(tmp_path):
    found = []
    for tier in (None, nk.FileTier(tmp_path, MEMORY)):
        model = SmallModel(None, make_tables(tier=tier))
        for t in range(4):
            loss, _ = model(make_batch(t, 200, keys=3000))
            loss.backward()
        keys = torch.arange(3000)
        found.append([model.ebc.store(name).find(keys)[0] for name in ("user", "item")])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_tables_with_and_without_a_tier_in_one_collection(tmp_path):
    tables = make_tables()
    tables[0] = replace(tables[0], tier=nk.FileTier(tmp_path, MEMORY))
    model = SmallModel(None, tables)
    assert [store.tier is None for store in model.ebc.row_stores()] == [False, True]


def test_another_kind_of_tier():
    with pytest.raises(TypeError, match="table 't': tier must be a FileTier, a DeviceTier or None, got '/data'"):
        nk.EmbeddingBagConfig(10, 4, "t", tier="/data")


def test_a_table_that_torch_trains_has_no_tier(tmp_path):
    table = nk.EmbeddingBagConfig(10, 4, "t", tier=nk.FileTier(tmp_path, MEMORY))
    with pytest.raises(ValueError, match="table 't': tier needs an optimizer; pass optimizer=, or leave tier out"):
        nk.EmbeddingBagCollection([table])


def test_a_checkpoint_of_either_loads_into_the_other(tmp_path):
    tier = nk.FileTier(tmp_path, MEMORY)
    batches = [make_batch(t, 60, keys=800) for t in range(6)]
    whole = run_rank(make_pipeline(SmallModel(None, make_tables())), batches).state
    for k, (first, second) in enumerate([(tier, None), (None, tier)]):
        with make_pipeline(SmallModel(None, make_tables(tier=first))) as pipeline:
            list(pipeline.run(batches[:3]))
            nk.checkpoint.save(tmp_path / f"save{k}", model=pipeline.model, pipeline=pipeline)
        pipeline = make_pipeline(SmallModel(None, make_tables(tier=second)))
        nk.checkpoint.load(tmp_path / f"save{k}", model=pipeline.model, pipeline=pipeline)
        rest = run_rank(pipeline, batches[3:]).state
        assert (rest.rows, rest.metadata, rest.dense) == (whole.rows, whole.metadata, whole.dense)
