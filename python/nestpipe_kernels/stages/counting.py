"""What stages note about a batch for counters, and their spans in torch's profiler."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..types import KeyStatus

if TYPE_CHECKING:
    from .state import BatchState, RankState

__all__ = ["BatchCounts", "Sent", "count_retrieval", "profiler_range"]


@dataclass(frozen=True)
class Sent:
    """One message of rows that this rank has sent."""

    rows: int
    """To all ranks, itself included."""
    bytes_out: int
    """To other ranks."""

    @staticmethod
    def of(rank: int, moved: Sequence[Sequence[int]], message: Tensor, elements: Sequence[int]) -> Sent:
        """`moved` rows per store and peer, in `message` with `elements` for each peer."""
        return Sent(sum(map(sum, moved)), (sum(elements) - elements[rank]) * message.element_size())


@dataclass
class BatchCounts:
    """Of one batch on one rank."""

    sent: list[Sent] = field(default_factory=list)
    """Several lanes append."""
    statuses: dict[KeyStatus, int] | None = None
    """What became of the batch's keys on their owner; None: nobody asked when they were retrieved."""
    kept: int = 0
    """Rows that come from the buffer of the batch before."""
    evicted: int = 0
    table_rows: dict[str, int] = field(default_factory=dict)
    """Rows of every table after the retrieval."""


def count_retrieval(rank: RankState, batch: BatchState) -> None:
    """Note what a retrieval has done to the stores; again if it is repeated."""
    statuses = dict.fromkeys(KeyStatus, 0)
    counts = batch.counts
    counts.evicted = 0
    for binding, owner in zip(rank.bindings, batch.owner):
        if owner.retrieval is None:  # it failed
            continue
        found = torch.bincount(owner.retrieval.status.to(torch.int64), minlength=len(KeyStatus)).tolist()
        for status in KeyStatus:
            statuses[status] += found[status]
        counts.evicted += len(binding.store.evicted(owner.retrieval)[0])
        for k, table in enumerate(binding.store.tables):
            alone = len(rank.modules) == 1 or binding.sharers
            name = table.name if alone else f"{binding.module_name}.{table.name}"
            counts.table_rows[name] = binding.store.size(k)
    counts.statuses = statuses


_NOTHING: AbstractContextManager[object] = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """A span `nestpipe::name` in torch.profiler while one runs in this process, and nothing otherwise.

    Building a span costs 10 to 30 us, profiler or not, so it is asked for first. The profiler takes spans of the thread
    that started it, and of all threads if it was told so.
    """
    if not getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        return _NOTHING
    return torch.profiler.record_function(f"nestpipe::{name}")
