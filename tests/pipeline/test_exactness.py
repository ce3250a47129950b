"""E0 and E1: `sequential` equals the oracle, and every schedule equals `sequential`, to the last bit."""

import itertools
from dataclasses import replace

import pytest
import torch
from pairwise import pairwise_cover

from nestpipe_kernels import init, optim
from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.testing.explorer import Orders, explore
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.testing.threads import run_scenario
from nestpipe_kernels.types import DataType, PoolingType

OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.2),
    "adagrad": optim.Adagrad(lr=0.2, initial_accumulator_value=0.1),
    "row_wise_adagrad": optim.RowWiseAdagrad(lr=0.3),
    "adam": optim.Adam(lr=0.1),
    "adam_row": optim.Adam(lr=0.1, bias_correction="row"),
    "momentum": optim.SGD(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "adamw": optim.AdamW(lr=0.1, bias_correction="row"),
    "row_wise_adam": optim.RowWiseAdam(lr=0.1, weight_decay=0.1),
    "ftrl": optim.FTRL(lr=0.2, l1=0.1, l2=0.1),
    "lamb": optim.LAMB(lr=0.1, weight_decay=0.1),
}
TABLES = {
    "sum_mean": (
        TableChoice("user", 4, ("user",)),
        TableChoice("item", 4, ("item", "history"), PoolingType.MEAN),
    ),
    "max": (TableChoice("user", 3, ("user", "friend"), PoolingType.MAX), TableChoice("item", 3, ("item",))),
    "two_dims": (TableChoice("user", 5, ("user",)), TableChoice("item", 2, ("item",), PoolingType.MEAN)),
    "weighted": (TableChoice("user", 4, ("user",)), TableChoice("item", 4, ("item", "history"))),
    "frozen": (TableChoice("user", 4, ("user",)), TableChoice("item", 4, ("item",), trainable=False)),
    "fixed": (TableChoice("user", 4, ("user",), num_embeddings=7), TableChoice("item", 6, ("item",))),
}


def by_key(keys, dim, seed):
    """Initial values given by a function."""
    return ((keys[:, None] * 37 + torch.arange(dim) * 11 + seed) % 101).float() / 101 - 0.5


STORAGE = {
    "fp32": {},
    "fp16": {"data_type": DataType.FP16},
    "bf16": {"data_type": DataType.BF16, "init": init.TruncatedNormal(0.0, 0.3)},
    "fp16_stochastic": {"data_type": DataType.FP16, "stochastic_rounding": True},
    "bf16_stochastic": {"data_type": DataType.BF16, "stochastic_rounding": True, "init": init.Custom(by_key)},
}
"""What all tables of a case are; a name with "+" has the first table so and the others float32."""


def stored(tables, storage: str):
    """The tables in a storage type."""
    settings = STORAGE[storage.removesuffix("+")]
    return tuple(replace(t, **settings) if k == 0 or not storage.endswith("+") else t for k, t in enumerate(tables))


FACTORS = {
    "schedule": ["dbp", "fwp", "nested", "nested+early"],
    "optimizer": list(OPTIMIZERS),
    "world_size": [1, 2, 3, 4],
    "micro_batches": [1, 2, 5, 8],
    "samples": [1, 3, 7, 10],
    "row_transfer": ["once", "per_micro_batch"],
    "clustering": ["none", "key"],
    "tables": list(TABLES),
    "weight_loss": [False, True],
    "bad_labels": [0.0, 0.1],
    "storage": ["fp32", "fp16", "bf16", "fp16_stochastic", "bf16_stochastic", "bf16_stochastic+"],
    "wires": ["fp32/fp32", "bf16/fp16", "int8/int8", "fp32/bf16"],
}


def make(case: dict, seed: int = 0, batches: int = 5) -> Scenario:
    return Scenario(
        world_size=case["world_size"],
        micro_batches=case["micro_batches"],
        batches=batches,
        optimizer=OPTIMIZERS[case["optimizer"]],
        tables=stored(TABLES[case["tables"]], case["storage"]),
        weighted=case["tables"] == "weighted",
        samples=case["samples"],
        row_transfer="once" if case["schedule"] == "nested+early" else case["row_transfer"],
        row_wire=case["wires"].split("/")[0],
        gradient_wire=case["wires"].split("/")[1],
        clustering=case["clustering"],
        weight_loss=case["weight_loss"],
        bad_labels=case["bad_labels"],
        nan_policy="skip_row",
        seed=seed,
    )


def name_of(case: dict) -> str:
    return "-".join(str(v) for v in case.values()).replace("/", "+")


CASES = pairwise_cover(FACTORS)


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_schedules_equal_sequential(case):
    scenario = make(case, seed=CASES.index(case))
    expected = run_scenario(scenario, "sequential")
    assert expected.difference(run_scenario(scenario, case["schedule"])) == ""


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_sequential_equals_the_oracle(case):
    scenario = make(case, seed=CASES.index(case))
    graph = build_graph("sequential", scenario.row_transfer)
    orders = Orders(graph, scenario.world_size, scenario.batches, scenario.micro_batches)
    run = explore(graph, scenario.ranks(), orders.random(0), scenario.batches)
    oracle = scenario.oracle(run.partition)
    assert run.broken == ""
    assert repr(run.losses) == repr(oracle.losses)
    assert {k: v for store in run.stores for k, v in store.items()} == oracle.stores[0]
    assert run.dense == oracle.dense


@pytest.mark.parametrize("schedule", ["sequential", "dbp", "fwp", "nested"])
def test_fetched_batches_equal_drawn_ones(schedule):
    """A fetch with a state of its own: its calls come in order, once each."""
    scenario = Scenario(world_size=2, micro_batches=3, clustering="key", seed=7)
    expected = run_scenario(scenario, "sequential")
    assert expected.difference(run_scenario(replace(scenario, fetch=True), schedule)) == ""


def test_async_is_not_exact():
    scenario = Scenario(world_size=2, micro_batches=2, batches=6, uneven=False, samples=6, num_keys=5)
    expected = run_scenario(scenario, "sequential")
    assert "losses differ" in expected.difference(run_scenario(scenario, "async"))


def test_single_rank_keys_are_inserted_with_their_occurrences():
    scenario = Scenario(world_size=1, micro_batches=2, batches=3, uneven=False, samples=4)
    run = run_scenario(scenario, "nested")
    counts: dict[tuple[str, int], int] = {}
    for batch in scenario.loader(0, scenario.generator(0)):
        for feature in scenario.feature_names:
            table = next(t.name for t in scenario.tables if feature in t.features)
            for key in batch.sparse[feature].values().tolist():
                counts[table, key] = counts.get((table, key), 0) + 1
    assert {key: frequency for key, (_, frequency) in run.metadata[0].items()} == counts


# The full product of schedules, optimizers, world sizes, N and odd batch sizes; the other factors take turns.
NAMED = ("schedule", "optimizer", "world_size", "micro_batches", "samples")
SOAK = [
    dict(zip(NAMED, values)) | {n: FACTORS[n][k % len(FACTORS[n])] for n in FACTORS if n not in NAMED}
    for k, values in enumerate(itertools.product(*(FACTORS[n] for n in NAMED)))
]


@pytest.mark.soak
@pytest.mark.parametrize("case", SOAK, ids=map(name_of, SOAK))
def test_soak_schedules_equal_sequential(case):
    scenario = make(case, seed=SOAK.index(case) % 97)
    assert run_scenario(scenario, "sequential").difference(run_scenario(scenario, case["schedule"])) == ""
