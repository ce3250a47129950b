"""Operations on rows that lie on an accelerator: indices are on the host and go over as used.

By the kernels of `_cuda` where the device has them (`ops/<op>/cuda.py`), else in plain PyTorch. The bits are those of
the references. Nothing here reads from the device. Bounds are checked on the host; that target
rows are distinct is the caller's word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..device import put_on
from ..types import DataType
from . import _row_checks as checks
from ._kernels import kernels_of

__all__ = [
    "gather_rows",
    "mean_sources",
    "place",
    "row_sync",
    "scatter_add_rows",
    "scatter_rows",
    "take_rows",
    "zero_rows",
]


def place(index: Tensor, like: Tensor) -> Tensor:
    """`index` where `like` is."""
    if index.device == like.device:
        return index
    return put_on(index, like.device) if index.is_cpu else index.to(like.device)


def _checked(operation: str, name: str, index: Tensor, rows: Tensor, *others: Tensor) -> Tensor:
    checks.check_index(operation, name, index)
    for other in others:
        if other.device != rows.device:
            raise TypeError(
                f"{operation}: all rows must be on one device, got {checks.describe(rows)} and {checks.describe(other)}"
            )
    checks.check_row_index(operation, name, index, rows.shape[0])
    return place(index, rows)


@torch.no_grad()
def gather_rows(rows: Tensor, index: Tensor, dim: int, out: Tensor | None, data_type: DataType) -> Tensor:
    """As `ops.gather_rows`; rows float32 [U, F] and `out` on one device, index int64 [m] on the host."""
    there = _checked("gather_rows", "index", index, rows)
    if kernels_of(rows) is not None:
        from .gather_rows import cuda

        if out is None:
            out = torch.empty(len(there), dim, dtype=torch.float32, device=rows.device)
        cuda.gather_rows(rows, there, dim, out, data_type)
        return out
    from .row_storage import unpack_embeddings

    found = unpack_embeddings(rows.index_select(0, there), dim, data_type)
    return found if out is None else out.copy_(found)


@torch.no_grad()
def row_sync(source: Tensor, target: Tensor, source_index: Tensor, target_index: Tensor) -> None:
    """As `ops.row_sync`; indices on the host."""
    there = _checked("row_sync", "source_index", source_index, source, target)
    here = _checked("row_sync", "target_index", target_index, target)
    if kernels_of(target) is not None:
        from .row_sync import cuda

        cuda.row_sync(source, target, there, here)
        return
    # As integers: the header's bits may be those of a NaN.
    target.view(torch.int32).index_copy_(0, here, source.view(torch.int32).index_select(0, there))


@torch.no_grad()
def scatter_rows(target: Tensor, index: Tensor, source: Tensor) -> None:
    """As `ops.scatter_rows`; index on the host."""
    there = _checked("scatter_rows", "index", index, target, source)
    if kernels_of(target) is not None:
        from .scatter_add_rows import cuda

        cuda.scatter_rows(target, there, checks.contiguous_rows(source))
        return
    target.index_copy_(0, there, source)


@torch.no_grad()
def scatter_add_rows(target: Tensor, index: Tensor, source: Tensor) -> None:
    """As `ops.scatter_add_rows`; index on the host."""
    there = _checked("scatter_add_rows", "index", index, target, source)
    if kernels_of(target) is not None:
        from .scatter_add_rows import cuda

        cuda.scatter_add_rows(target, there, checks.contiguous_rows(source))
        return
    target.index_copy_(0, there, target.index_select(0, there) + source)


@torch.no_grad()
def zero_rows(target: Tensor, index: Tensor) -> None:
    """As `ops.zero_rows`; index on the host."""
    there = _checked("zero_rows", "index", index, target)
    if kernels_of(target) is not None:
        from .scatter_add_rows import cuda

        cuda.zero_rows(target, there)
        return
    target.index_fill_(0, there, 0.0)


@torch.no_grad()
def take_rows(matrix: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """As `ops.take_rows`; index on the host."""
    there = _checked("take_rows", "index", index, matrix)
    if kernels_of(matrix) is not None:
        from .take_rows import cuda

        return cuda.take_rows(matrix, there)
    rows = matrix.index_select(0, there)
    matrix.index_fill_(0, there, 0.0)
    return rows, torch.maximum(rows.amax(1), -rows.amin(1))


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
    """As `ops.mean_sources`; total, countable and boxes on one device, the rest on the host. A row's first entries are
    added for all rows at once, then the second ones, and so on."""
    if kernels_of(total) is not None:
        from .mean_sources import cuda

        here = None if rows is None else _checked("mean_sources", "rows", rows, total, countable, boxes)
        cuda.mean_sources(total, countable, boxes, entries, per_source, divisors, here, limit)
        return
    starts, order = entries
    rows = torch.arange(total.shape[0]) if rows is None else rows
    here = _checked("mean_sources", "rows", rows, total, countable, boxes)
    begins, counts = starts[rows], starts[rows + 1] - starts[rows]
    divided_by = torch.tensor(divisors, dtype=torch.float32).repeat_interleave(torch.tensor(per_source))
    largest = torch.tensor(limit, dtype=torch.float32)
    sums = total.new_zeros(len(rows), total.shape[1])
    good = countable.index_select(0, here)
    for position in range(int(counts.max()) if len(rows) else 0):
        active = torch.nonzero(counts > position).squeeze(1)
        chosen, where = order[begins[active] + position], place(active, total)
        part = boxes.index_select(0, place(chosen, boxes)) / place(divided_by[chosen], boxes)[:, None]
        sums.index_copy_(0, where, sums.index_select(0, where) + part)
        good.index_copy_(0, where, good.index_select(0, where) & (part.abs().amax(1) <= largest))
    total.index_copy_(0, here, sums / len(per_source))
    countable.index_copy_(0, here, good)
