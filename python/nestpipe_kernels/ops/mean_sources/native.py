"""mean_sources and entries_by_row through the extension (csrc/buffers/mean_sources.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._native import core
from .._row_checks import pointer

__all__ = ["entries_by_row", "mean_sources"]


def entries_by_row(slot: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Arguments as checked by the package."""
    starts = torch.empty(num_rows + 1, dtype=torch.int64)
    order = torch.empty(slot.numel(), dtype=torch.int64)
    core().entries_by_row((pointer(slot), slot.numel()), num_rows, pointer(starts), pointer(order))
    return starts, order


def mean_sources(
    total: Tensor,
    countable: Tensor,
    boxes: Tensor,
    entries: tuple[Tensor, Tensor],
    per_source: Sequence[int],
    divisors: Sequence[float],
    rows: Tensor | None,
    limit: float,
) -> None:
    """Arguments as checked by the package."""
    if rows is not None and not rows.numel():  # the extension takes no address for all rows
        return
    ends = torch.tensor(per_source, dtype=torch.int64).cumsum(0)
    divided_by = torch.tensor(divisors, dtype=torch.float32)
    core().mean_sources(
        (pointer(total), *total.shape),
        pointer(countable),
        (pointer(boxes), *boxes.shape),
        (pointer(entries[0]), pointer(entries[1])),
        (pointer(ends), pointer(divided_by), len(per_source)),
        (0, 0) if rows is None else (pointer(rows), rows.numel()),
        limit,
    )
