"""mean_sources and entries_by_row in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._row_checks import check_row_index

__all__ = ["entries_by_row", "mean_sources"]


def entries_by_row(slot: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Arguments as checked by the package."""
    check_row_index("entries_by_row", "slot", slot, num_rows)
    starts = torch.zeros(num_rows + 1, dtype=torch.int64)
    starts[1:] = torch.bincount(slot, minlength=num_rows).cumsum(0)
    return starts, torch.argsort(slot, stable=True)


@torch.no_grad()
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
    if rows is None:
        rows = torch.arange(total.shape[0])
    check_row_index("mean_sources", "rows", rows, total.shape[0], distinct=True)
    sources = torch.repeat_interleave(torch.arange(len(per_source)), torch.tensor(per_source))
    divided = boxes / torch.tensor(divisors, dtype=torch.float32)[sources, None]
    bad = ~(divided.abs().amax(1) <= torch.tensor(limit, dtype=torch.float32)) if divided.numel() else sources > 0
    starts, order = entries
    for row in rows.tolist():
        own = order[starts[row] : starts[row + 1]]
        sum_ = torch.zeros(total.shape[1], dtype=torch.float32)
        for entry in own:
            sum_ += divided[entry]
        total[row] = sum_ / len(per_source)
        countable[row] &= not bool(bad[own].any())
