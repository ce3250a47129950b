"""Sparse groups in tests: runs of one group as expectation, outcomes of several copies as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.testing.explorer import Outcome
from nestpipe_kernels.testing.scenario import Scenario


def grouped(scenario: Scenario, count: int = 2, sync: str = "exact", average_every: int = 1) -> Scenario:
    """The scenario with copies of its tables."""
    return replace(scenario, sparse_groups=SparseGroups(count, sync, average_every))


def one_copy(outcome: Outcome, count: int = 1) -> Outcome:
    """Rows, metadata by key, of all ranks together; fails where the copies differ."""
    shards = len(outcome.stores) // count
    for rank in range(shards, len(outcome.stores)):
        for name in ("stores", "metadata", "policies"):
            mine, first = getattr(outcome, name)[rank], getattr(outcome, name)[rank % shards]
            assert mine == first, f"{name} of rank {rank} are not those of rank {rank % shards}"
    stores, metadata = joined(outcome.stores[:shards]), joined(outcome.metadata[:shards])
    return replace(outcome, stores=[stores], metadata=[metadata], policies=[])


def joined(parts: list[dict[Any, Any]]) -> dict[Any, Any]:
    """Dictionaries without common keys as one."""
    found = {key: value for part in parts for key, value in part.items()}
    assert len(found) == sum(map(len, parts))
    return found
