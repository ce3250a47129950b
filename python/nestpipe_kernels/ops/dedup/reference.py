"""Dedup with a dictionary: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from .result import DedupResult

__all__ = ["dedup"]


def dedup(keys: Tensor, tables: Tensor | None) -> DedupResult:
    """As `nestpipe_kernels.ops.dedup.dedup`, for checked arguments."""
    table_list = [0] * keys.numel() if tables is None else tables.tolist()
    numbers: dict[tuple[int, int], int] = {}
    unique_index: list[int] = []
    inverse: list[int] = []
    counts: list[int] = []
    for position, pair in enumerate(zip(table_list, keys.tolist())):
        number = numbers.setdefault(pair, len(numbers))
        if number == len(counts):
            unique_index.append(position)
            counts.append(0)
        counts[number] += 1
        inverse.append(number)
    return DedupResult(
        torch.tensor(unique_index, dtype=torch.int64),
        torch.tensor(inverse, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int64),
    )
