"""Going on from a checkpoint equals not having stopped, bit for bit, wherever in the epoch it was made."""

from __future__ import annotations

import pytest
from resume_cases import SCHEDULES, check_resume

from nestpipe_kernels import init, optim, policy
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.types import DataType, PoolingType


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("world_size", "save_after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_resume_in_the_middle_of_an_epoch(tmp_path, schedule, world_size, save_after):
    scenario = Scenario(world_size=world_size, batches=6, optimizer=optim.Adam(lr=0.05), seed=world_size + 10)
    check_resume(scenario, schedule, tmp_path / "ckpt", save_after)


ADMISSION = {
    "counts": policy.MinFrequency(2),
    "filter": policy.MinFrequency(2, policy.CountingFilter(4096)),
    "chance": policy.Probability(0.6),
}
EVICTION = {"lru": policy.LRU(), "lfu": policy.LFU(), "ttl": policy.TTL(steps=2), "none": None}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("admission", "eviction"), [("counts", "lru"), ("filter", "lfu"), ("chance", "ttl"), ("counts", "none")]
)
def test_resume_with_admission_and_eviction(tmp_path, schedule, admission, eviction):
    """Counts of keys without rows, metadata that decides who goes, and counters go on as well."""
    rules = {"admission": ADMISSION[admission], "eviction": EVICTION[eviction], "capacity": 10}
    tables = (
        TableChoice("user", 4, ("user",), **rules),
        TableChoice("item", 4, ("item", "history"), PoolingType.MEAN, default_row=init.Constant(0.25), **rules),
    )
    scenario = Scenario(world_size=2, batches=7, tables=tables, num_keys=30, samples=7, seed=6)
    check_resume(scenario, schedule, tmp_path, 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("data_type", "stochastic"), [(DataType.BF16, True), (DataType.FP16, False)])
def test_resume_with_half_precision_rows_that_come_and_go(tmp_path, schedule, data_type, stochastic):
    """Stochastic rounding depends on the step, which goes on; an odd dim leaves half a word unused."""
    kind = {"data_type": data_type, "stochastic_rounding": stochastic}
    tables = (
        TableChoice("user", 3, ("user",), capacity=9, eviction=policy.LRU(), **kind),
        TableChoice("item", 4, ("item", "history"), PoolingType.MEAN, **kind),
    )
    optimizer = optim.Adam(lr=0.05)
    scenario = Scenario(world_size=2, batches=6, tables=tables, num_keys=20, optimizer=optimizer, seed=6)
    check_resume(scenario, schedule, tmp_path, 3)
