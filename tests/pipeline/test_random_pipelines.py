"""Pipelines with settings drawn by chance, each against `sequential` with the same settings, bit for bit.

A failure names its seed; `pytest tests/pipeline/test_random_pipelines.py -m soak --random-seed SEED` runs that case
alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from nestpipe_kernels import optim
from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.config import WIRE_FORMATS, PipelineConfig
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.explorer import Outcome
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.testing.threads import read_pipeline, run_ranks_as_threads
from nestpipe_kernels.types import DataType, PoolingType

SOAK_S = 120.0
RULES: list[Callable[[], Any]] = [
    lambda: optim.SGD(lr=0.2),
    lambda: optim.SGD(lr=0.1, momentum=0.9),
    lambda: optim.Adagrad(lr=0.2, initial_accumulator_value=0.1),
    lambda: optim.RowWiseAdagrad(lr=0.3),
    lambda: optim.Adam(lr=0.1),
    lambda: optim.Adam(lr=0.1, bias_correction="row"),
]
DENSE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@dataclass
class Drawn:
    """One case: the run, how its dense part is trained, and settings beyond those of a scenario."""

    scenario: Scenario
    dense: str
    schedule: str
    settings: dict[str, Any]


def draw(seed: int) -> Drawn:
    """The case of a seed."""
    chance = random.Random(seed)
    pick = chance.choice
    schedule = pick(("dbp", "fwp", "nested", "nested", "nested+early", "nested+early"))
    early = schedule == "nested+early"
    world = pick((1, 2, 2))
    pooling = pick((False, False, True, "auto")) if not early else False
    transfer = "once" if early or pooling else pick(("once", "once", "per_micro_batch"))
    weighted = not pooling and pick((False, False, True))
    groups = SparseGroups()
    if world == 2 and not early and not pooling:
        groups = pick((SparseGroups(), SparseGroups(), SparseGroups(2), SparseGroups(2, "average", 2)))
    scenario = Scenario(
        world_size=world,
        micro_batches=pick((1, 2, 3, 4, 5, 8)),
        batches=pick((3, 5, 6)),
        optimizer=pick(RULES)(),
        tables=_tables(chance, weighted),
        num_keys=pick((3, 7, 11, 40)),
        samples=pick((1, 3, 5, 7, 9, 13)),
        uneven=pick((True, True, False)),
        row_transfer=transfer,
        row_wire=pick((*WIRE_FORMATS, "fp32", "fp32")),
        gradient_wire=pick((*WIRE_FORMATS, "fp32", "fp32")),
        owner_pooling=pooling,
        clustering=pick(("none", "key")),
        weight_loss=pick((False, False, True)),
        weighted=weighted,
        seed=chance.randrange(10_000),
        sparse_groups=groups,
        fetch=pick((False, False, True)),
        nan_policy="skip_row",
        bad_labels=pick((0.0, 0.0, 0.05)),
    )
    settings = {"edge_share": pick((1.0, 0.5, 0.3, 0.9)), "balance": pick(("samples", "keys"))}
    return Drawn(scenario, pick(list(DENSE)), schedule, settings)


def _tables(chance: random.Random, weighted: bool) -> tuple[TableChoice, ...]:
    """One to four tables of mixed dims, so of one to four stores."""
    tables = []
    for number in range(chance.randint(1, 4)):
        features = tuple(f"f{number}{letter}" for letter in "ab"[: chance.randint(1, 2)])
        rounded = chance.random() < 0.5
        tables.append(
            TableChoice(
                f"table{number}",
                chance.choice((1, 2, 3, 4, 8)),
                features,
                PoolingType.SUM if weighted else chance.choice((PoolingType.SUM, PoolingType.MEAN)),
                trainable=number == 0 or chance.random() < 0.85,
                data_type=chance.choice((DataType.FP32, DataType.FP32, DataType.FP16, DataType.BF16)),
            )
        )
        if tables[-1].data_type is not DataType.FP32:
            tables[-1] = replace(tables[-1], stochastic_rounding=rounded)
    return tuple(tables)


def play(case: Drawn, schedule: str) -> list[Outcome]:
    """What every rank has in the end."""
    scenario = case.scenario

    def body(rank: int, communicator: Any) -> Outcome:
        generator = scenario.generator(rank)
        model = scenario.model(communicator, generator)
        config = PipelineConfig(
            schedule=schedule.removesuffix("+early"),
            early_send=schedule.endswith("+early"),
            num_micro_batches=scenario.micro_batches,
            row_transfer=scenario.row_transfer,
            owner_pooling=scenario.owner_pooling,
            row_wire=scenario.row_wire,
            gradient_wire=scenario.gradient_wire,
            clustering=scenario.clustering,
            nan_policy=scenario.nan_policy,
            fetch=scenario.fetcher(rank) if scenario.fetch else None,
            timeout_s=60.0,
            **case.settings,
        )
        dense = DENSE[case.dense]([p for p in model.parameters() if p.requires_grad])
        with NestedPipeline(model, dense, config=config) as pipeline:
            losses = [float(step.loss) for step in pipeline.run(scenario.source(rank, generator))]
            return read_pipeline(pipeline, losses)

    return run_ranks_as_threads(scenario.world_size, body, timeout_s=60.0)


def check(seed: int) -> None:
    """Fails with the seed and the case."""
    case = draw(seed)
    where = f"seed {seed}: {case}"
    try:
        expected, found = play(case, "sequential"), play(case, case.schedule)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}; {where}") from error
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one.difference(other) == "", f"rank {rank}; {where}"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_few_random_pipelines(seed: int) -> None:
    check(seed)


def test_what_is_drawn_covers_every_choice() -> None:
    cases = [draw(seed) for seed in range(400)]
    assert {case.schedule for case in cases} == {"dbp", "fwp", "nested", "nested+early"}
    assert {case.dense for case in cases} == set(DENSE)
    assert {(case.scenario.world_size, case.scenario.sparse_groups.mode) for case in cases} == {
        (1, "one"), (2, "one"), (2, "exact"), (2, "average"),
    }  # fmt: skip
    assert any(len({table.dim for table in case.scenario.tables}) == 4 for case in cases)
    assert {case.settings["edge_share"] for case in cases} == {1.0, 0.5, 0.3, 0.9}
    assert {case.settings["balance"] for case in cases} == {"samples", "keys"}


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 180)
def test_random_pipelines(random_seed: int | None) -> None:
    """As many as there is time for, from a seed of the clock on; --random-seed: that one."""
    if random_seed is not None:
        check(random_seed)
        return
    seed, end = time.time_ns() // 1_000_000, time.monotonic() + SOAK_S
    number = 0
    while time.monotonic() < end:
        print(f"seed {seed + number}")  # for one that hangs
        check(seed + number)
        number += 1
    assert number
