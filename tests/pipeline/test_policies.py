"""E0 and E1 with admission and eviction: `sequential` equals the oracle, every schedule equals `sequential`, bit by
bit: rows, optimizer states, metadata, sizes, counters, counts of keys without a row."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from pairwise import pairwise_cover
from policy_cases import ADMISSION, EVICTION, bounded, bounded_tables
from test_exactness import OPTIMIZERS, STORAGE, stored

from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.testing.explorer import Orders, Outcome, explore
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_scenario

FACTORS = {
    "schedule": ["dbp", "fwp", "nested", "nested+early"],
    "admission": list(ADMISSION),
    "eviction": list(EVICTION),
    "optimizer": list(OPTIMIZERS),
    "world_size": [1, 2, 3, 4],
    "micro_batches": [1, 2, 5],
    "row_transfer": ["once", "per_micro_batch"],
    "clustering": ["none", "key"],
    "capacity": [5, 8, 15],
    "storage": list(STORAGE),
}


def make(case: dict[str, Any], seed: int) -> Scenario:
    tables = bounded_tables(case["admission"], case["eviction"], case["capacity"])
    return bounded(
        tables=stored(tables, case["storage"]),
        optimizer=OPTIMIZERS[case["optimizer"]],
        world_size=case["world_size"],
        micro_batches=case["micro_batches"],
        row_transfer="once" if case["schedule"] == "nested+early" else case["row_transfer"],
        clustering=case["clustering"],
        seed=seed,
    )


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


CASES = pairwise_cover(FACTORS)


def totals(run: Outcome) -> dict[str, int]:
    """Counters of all ranks and tables."""
    found: dict[str, int] = {}
    for rank in run.policies:
        for table in rank.values():
            for name, count in table["counters"].items():
                found[name] = found.get(name, 0) + count
    return found


def play(scenario: Scenario, schedule: str = "sequential", order: int = 0) -> Outcome:
    """One exploration in one thread."""
    graph = build_graph(schedule, scenario.row_transfer)
    orders = Orders(graph, scenario.world_size, scenario.batches, scenario.micro_batches)
    return explore(graph, scenario.ranks(), orders.random(order), scenario.batches)


def assert_equals_the_oracle(run: Outcome, scenario: Scenario) -> None:
    oracle = scenario.oracle(run.partition)
    assert run.broken == ""
    assert run.policies == oracle.policies
    assert run.metadata == oracle.metadata
    assert run.losses == oracle.losses
    assert {k: v for store in run.stores for k, v in store.items()} == oracle.stores[0]
    assert run.dense == oracle.dense


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_schedules_equal_sequential(case: dict[str, Any]) -> None:
    scenario = make(case, seed=CASES.index(case))
    assert run_scenario(scenario, "sequential").difference(run_scenario(scenario, case["schedule"])) == ""


@functools.cache
def played(number: int) -> Outcome:
    """`sequential` of a case, for the tests that look at it."""
    return play(make(CASES[number], seed=number))


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_sequential_equals_the_oracle(case: dict[str, Any]) -> None:
    number = CASES.index(case)
    assert_equals_the_oracle(played(number), make(case, seed=number))


def test_the_cases_evict_expire_refuse_and_admit_late() -> None:
    """The cover is worth something: each thing happens often, in small tables and over several ranks."""
    seen: dict[str, int] = {}
    for number in range(len(CASES)):
        for name, count in totals(played(number)).items():
            seen[name] = seen.get(name, 0) + bool(count)
    assert min(seen.values()) >= 5, seen


@pytest.mark.parametrize("schedule", ["dbp", "nested"])
@pytest.mark.parametrize(("admission", "eviction"), [("all", "lru"), ("exact_2", "lfu"), ("filter_3", "ttl")])
def test_any_order_of_the_graph_evicts_alike(schedule: str, admission: str, eviction: str) -> None:
    scenario = bounded(admission, eviction, uneven=False, seed=5)
    expected = play(scenario)
    assert totals(expected)["evicted"] + totals(expected)["expired"] > 0
    for order in range(1, 5):
        assert expected.difference(play(scenario, schedule, order)) == ""


def test_evicted_rows_return_as_new() -> None:
    """A hot key and a flood of others: rows come and go many times over, and equal the oracle's each time."""
    scenario = bounded("all", "lru", 3, world_size=1, num_keys=40, batches=20, uneven=False, samples=2, seed=1)
    run = play(scenario, "nested")
    assert totals(run)["evicted"] > 30
    assert_equals_the_oracle(run, scenario)


# The full product of rules, schedules, world sizes and N; the other factors take turns.
NAMED = ("schedule", "admission", "eviction", "world_size", "micro_batches")
SOAK = [
    dict(zip(NAMED, values)) | {n: FACTORS[n][k % len(FACTORS[n])] for n in FACTORS if n not in NAMED}
    for k, values in enumerate(itertools.product(*(FACTORS[n] for n in NAMED)))
]


@pytest.mark.soak
@pytest.mark.parametrize("case", SOAK, ids=map(name_of, SOAK))
def test_soak_schedules_equal_sequential_and_the_oracle(case: dict[str, Any]) -> None:
    scenario = make(case, seed=SOAK.index(case) % 89)
    expected = run_scenario(scenario, "sequential")
    assert expected.difference(run_scenario(scenario, case["schedule"])) == ""
    assert_equals_the_oracle(play(scenario), scenario)
