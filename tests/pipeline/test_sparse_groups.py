"""2D sparse parallelism: exact groups have the bits of one group, groups that average those of their oracle."""

from dataclasses import replace

import pytest
import torch
from groups_cases import grouped, joined, one_copy
from policy_cases import bounded

from nestpipe_kernels import optim, policy
from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.explorer import Orders, explore
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.testing.threads import run_ranks_as_threads, run_scenario, scenario_config
from nestpipe_kernels.types import DataType, PoolingType

CASES = {
    "adam-weighted-losses": Scenario(optimizer=optim.Adam(lr=0.1), weight_loss=True),
    "row-wise-adagrad": Scenario(seed=1),
    "adam-by-row-rows-per-micro-batch": Scenario(
        optimizer=optim.Adam(lr=0.1, bias_correction="row"), row_transfer="per_micro_batch", seed=2
    ),
    "momentum-clustered": Scenario(
        optimizer=optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01), clustering="key", samples=7, seed=3
    ),
    "lamb-two-stores-frozen-max": Scenario(
        optimizer=optim.LAMB(lr=0.1, weight_decay=0.1),
        tables=(
            TableChoice("user", 5, ("user",), PoolingType.MAX),
            TableChoice("item", 2, ("item",), PoolingType.MEAN),
            TableChoice("tag", 2, ("tag",), trainable=False),
        ),
        seed=4,
    ),
    "bf16": Scenario(
        tables=(
            TableChoice("user", 3, ("user",), data_type=DataType.BF16),
            TableChoice("item", 3, ("item", "history"), PoolingType.MEAN, data_type=DataType.BF16),
        ),
        seed=5,
    ),
    "admission-and-expiry": Scenario(
        tables=(
            TableChoice("user", 4, ("user",), admission=policy.MinFrequency(2), eviction=policy.TTL(1, slack=0.0)),
            TableChoice("item", 4, ("item", "history"), eviction=policy.TTL(1, slack=0.0)),
        ),
        num_keys=24,
        batches=8,
        optimizer=optim.Adagrad(lr=0.2),
        seed=6,
    ),
}
"""No rule here depends on how many ranks share a capacity."""


def case(name: str) -> Scenario:
    return replace(CASES[name], world_size=4)


SOAK = {"momentum-clustered", "bf16", "row-wise-adagrad", "exact-filter-score", "average-2-expiry"}
"""Cases whose kinds others have in part."""


def cases(names):
    return [pytest.param(name, marks=[pytest.mark.soak] * (name in SOAK)) for name in names]


@pytest.mark.parametrize("name", cases(CASES))
def test_exact_groups_have_the_bits_of_one_group(name):
    scenario = case(name)
    plain = one_copy(run_scenario(scenario, "sequential"))
    assert max(map(len, plain.losses)) >= 4
    assert plain.difference(one_copy(run_scenario(grouped(scenario), "nested"), 2)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["sequential", "dbp", "fwp", "async"])
def test_exact_groups_in_other_schedules(schedule):
    scenario = replace(case("adam-weighted-losses"), seed=7)
    plain = one_copy(run_scenario(scenario, schedule))
    assert plain.difference(one_copy(run_scenario(grouped(scenario), schedule), 2)) == ""


def test_every_rank_a_group_of_its_own():
    scenario = replace(case("row-wise-adagrad"), world_size=3)
    plain = one_copy(run_scenario(scenario, "sequential"))
    got = run_scenario(grouped(scenario, 3), "nested")
    assert plain.difference(one_copy(got, 3)) == ""


def test_expiry_and_admission_happened():
    policies = run_scenario(grouped(case("admission-and-expiry")), "nested").policies
    counters = [table["counters"] for rank in policies for table in rank.values()]
    assert sum(c["expired"] for c in counters) > 3
    assert sum(c["not_admitted"] for c in counters) > 3


# What capacity does depends on the number of shards: the oracle spreads rows over as many.
ORACLE_CASES = {
    "exact-lru": grouped(bounded("all", "lru", 9, world_size=4, seed=21)),
    "exact-filter-score": grouped(bounded("filter_3", "score", 8, world_size=4, seed=22)),
    "average-1": grouped(case("adam-weighted-losses"), 2, "average"),
    "average-2": grouped(replace(case("adam-by-row-rows-per-micro-batch"), batches=7), 2, "average", 2),
    "average-3-bf16": grouped(replace(case("bf16"), batches=8), 2, "average", 3),
    "average-2-frozen-3-copies": grouped(
        replace(case("lamb-two-stores-frozen-max"), world_size=3, batches=7), 3, "average", 2
    ),
    "average-4-lru": grouped(bounded("all", "lru", 8, world_size=4, uneven=False, seed=23), 2, "average", 4),
    "average-2-expiry": grouped(replace(case("admission-and-expiry"), seed=9), 2, "average", 2),
}


@pytest.mark.parametrize("name", cases(ORACLE_CASES))
def test_sequential_equals_the_oracle_and_nested_equals_sequential(name):
    scenario = ORACLE_CASES[name]
    groups = scenario.sparse_groups
    graph = build_graph("sequential", scenario.row_transfer, sparse_groups=groups.mode)
    orders = Orders(graph, scenario.world_size, scenario.batches, scenario.micro_batches)
    run = explore(graph, scenario.ranks(), orders.random(0), scenario.batches)
    oracle = scenario.oracle(run.partition)
    assert run.broken == ""
    assert run.losses == oracle.losses
    shards = scenario.world_size // groups.count
    for number in range(groups.count):
        copy = joined(run.stores[number * shards : (number + 1) * shards])
        assert copy == oracle.stores[number % len(oracle.stores)], f"copy {number}"
    for what in ("metadata", "policies", "dense"):
        assert getattr(run, what) == getattr(oracle, what), what
    nested = run_scenario(scenario, "nested")
    assert replace(run, losses=nested.losses).difference(nested) == ""
    assert all(mine[: len(theirs)] == theirs for mine, theirs in zip(run.losses, nested.losses, strict=True))


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["dbp", "fwp"])
@pytest.mark.parametrize("every", [1, 2])
def test_averaging_in_other_schedules(schedule, every):
    scenario = grouped(replace(case("row-wise-adagrad"), batches=6), 2, "average", every)
    assert run_scenario(scenario, "sequential").difference(run_scenario(scenario, schedule)) == ""


def test_copies_differ_between_averagings_only():
    scenario = grouped(replace(case("row-wise-adagrad"), uneven=False, batches=5), 2, "average", 2)
    after_5, after_4 = run_scenario(scenario, "nested"), run_scenario(replace(scenario, batches=4), "nested")
    assert after_5.stores[:2] != after_5.stores[2:]
    assert after_5.metadata[:2] == after_5.metadata[2:]
    assert one_copy(after_4, 2).broken == ""


def test_evicted_rows_are_not_averaged():
    scenario = grouped(bounded("all", "lru", 8, world_size=2, uneven=False, seed=23), 2, "average", 100)

    def body(rank, communicator):
        generator = scenario.generator(rank)
        model = scenario.model(communicator, generator)
        config = scenario_config(scenario, "nested")
        with NestedPipeline(model, scenario.dense_optimizer(model), config=config) as pipeline:
            for _ in pipeline.run(scenario.loader(rank, generator)):
                pass
            pipeline.settle()
            store = pipeline.rank.bindings[0].store
            noted, evicted = store.touched, store.counters("user")["evicted"]
            assert torch.equal(store.find_handles(noted.keys, noted.tables), noted.handles)
            return evicted, noted.keys.tolist()

    (evicted, keys), other = run_ranks_as_threads(2, body)
    assert (evicted, keys) == other
    assert evicted > 3 and len(keys) > 3
