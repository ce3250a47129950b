"""mean_sources in csrc/buffers/mean_sources.cu, for gradients in device memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._kernels import kernels_of, place_of
from .._row_checks import pointer
from ..on_device import place

__all__ = ["mean_sources"]


def mean_sources(
    total: Tensor,
    countable: Tensor,
    boxes: Tensor,
    entries: tuple[Tensor, Tensor],
    per_source: Sequence[int],
    divisors: Sequence[float],
    rows: Tensor | None,
    limit: float,
    bad_position: Tensor | None = None,
) -> None:
    """As the package's, arguments as checked there; total, countable and boxes on one device, the rest there or on the
    host. `bad_position` as in gather_rows."""
    if rows is not None and not rows.numel():  # the extension takes no address for all rows
        return
    starts, order = place(entries[0], total), place(entries[1], total)
    ends = place(torch.tensor(per_source, dtype=torch.int64).cumsum(0), total)
    divided_by = place(torch.tensor(divisors, dtype=torch.float32), total)
    rows = None if rows is None else place(rows, total)
    kernels_of(total).mean_sources(
        (pointer(total), *total.shape),
        pointer(countable),
        (pointer(boxes), *boxes.shape),
        (pointer(starts), pointer(order)),
        (pointer(ends), pointer(divided_by), len(per_source)),
        (0, 0) if rows is None else (pointer(rows), rows.numel()),
        limit,
        pointer(bad_position),
        place_of(total),
    )
