"""Scenarios whose tables are too small for their keys: evictions, refusals and keys that are not admitted (yet)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels import init, optim, policy
from nestpipe_kernels.testing.scenario import Scenario, TableChoice
from nestpipe_kernels.types import PoolingType


def half_life(keys: Tensor, last_used: Tensor, frequency: Tensor, batch: int) -> Tensor:
    """A score of a user's: occurrences, halved for every batch without use; the key breaks ties, small keys stay."""
    return frequency.to(torch.float64) * 0.5 ** (batch - last_used).to(torch.float64) - 1e-6 * keys


ADMISSION = {
    "all": None,
    "exact_2": policy.MinFrequency(2),
    "exact_3": policy.MinFrequency(3),
    "filter_3": policy.MinFrequency(3, policy.CountingFilter(4096)),
    "probability": policy.Probability(0.6, seed=3),
    "none": policy.Probability(0.0),
}
EVICTION = {
    "lru": policy.LRU(slack=0.0),
    "lru_slack": policy.LRU(slack=0.4),
    "lfu": policy.LFU(slack=0.25),
    "ttl": policy.TTL(2, slack=0.0),
    "score": policy.Score(half_life, slack=0.1),
    "refuse": None,
}


def bounded_tables(admission: str = "all", eviction: str = "lru", capacity: int = 8) -> tuple[TableChoice, ...]:
    """A bounded table, a second one with another limit in the same store, and one without any limit."""
    rules: dict[str, Any] = {"admission": ADMISSION[admission], "eviction": EVICTION[eviction]}
    if admission == "all" and eviction == "refuse":
        rules["admission"] = policy.Probability(1.0)  # a table without any rule raises when it is full
    return (
        TableChoice("user", 4, ("user",), capacity=capacity, default_row=init.Constant(0.25), **rules),
        TableChoice("item", 4, ("item", "history"), PoolingType.MEAN, capacity=capacity + 3, **rules),
        TableChoice("tag", 3, ("tag",)),
    )


def bounded(admission: str = "all", eviction: str = "lru", capacity: int = 8, **settings: Any) -> Scenario:
    """A scenario with more keys than room; settings as of Scenario."""
    return Scenario(
        **{
            "tables": bounded_tables(admission, eviction, capacity),
            "num_keys": 24,
            "batches": 8,
            "optimizer": optim.Adagrad(lr=0.2, initial_accumulator_value=0.1),
            **settings,
        }
    )
