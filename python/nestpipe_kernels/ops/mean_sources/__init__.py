"""mean_sources: the mean over sources of row gradients; entries_by_row: which list entries belong to which row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _row_checks as checks
from .. import on_device
from . import native, reference

__all__ = ["entries_by_row", "mean_sources"]


def entries_by_row(slot: Tensor, num_rows: int, *, implementation: str = "native") -> tuple[Tensor, Tensor]:
    """(starts int64 [num_rows + 1], order int64 [M]): row u has the entries order[starts[u]:starts[u + 1]], ascending.

    Args:
        slot: int64 [M], the row (0 .. num_rows - 1) of each entry.
        implementation: "native" or "reference".

    Raises:
        TypeError: dtype or device. ValueError: shape. IndexError: a slot out of range.
    """
    checks.check_implementation("entries_by_row", implementation)
    checks.check_index("entries_by_row", "slot", slot)
    chosen = native.entries_by_row if implementation == "native" else reference.entries_by_row
    return chosen(slot, num_rows)


def mean_sources(
    total: Tensor,
    countable: Tensor,
    boxes: Tensor,
    entries: tuple[Tensor, Tensor],
    per_source: Sequence[int],
    divisors: Sequence[float] = (),
    rows: Tensor | None = None,
    limit: float = math.inf,
    *,
    implementation: str = "native",
) -> None:
    """total[u] = (boxes of row u, each divided by its source's divisor, added to +0.0 in order) / number of sources;
    countable[u] = False where one of them, divided, holds a NaN or a magnitude above `limit`. Synchronous.

    Boxes, total and countable on an accelerator: the rest is on the host, the work goes to the current stream.

    Args:
        total: float32 [U, D] contiguous; rows that are not chosen stay as they are.
        countable: bool [U] contiguous, changed in place.
        boxes: float32 [M, D] contiguous: the entries of each source in turn.
        entries: `entries_by_row` of the boxes' rows.
        per_source: entries of each source; their sum is M.
        divisors: one of each source, rounded to float32; empty: all 1.
        rows: int64 [n] distinct, the chosen rows; None: all.
        limit: rounded to float32.
        implementation: "native" or "reference"; the same bits.

    Raises:
        TypeError: dtype or device. ValueError: shapes, repeated rows. IndexError: a row out of range.
            Nothing has been written then.
    """
    checks.check_implementation("mean_sources", implementation)
    if total.is_cpu:
        checks.check_matrix("mean_sources", "total", total)
        checks.check_matrix("mean_sources", "boxes", boxes)
    if not (total.is_contiguous() and boxes.is_contiguous()) or total.shape[1] != boxes.shape[1]:
        raise ValueError(
            "mean_sources: total and boxes must be contiguous and have as many columns, got shapes "
            f"{list(total.shape)} and {list(boxes.shape)}, strides {list(total.stride())} and {list(boxes.stride())}"
        )
    checks.check_index("mean_sources", "entries[0]", entries[0], total.shape[0] + 1)
    checks.check_index("mean_sources", "entries[1]", entries[1], boxes.shape[0])
    if countable.dtype != torch.bool or countable.shape != total.shape[:1] or not countable.is_contiguous():
        raise ValueError(
            f"mean_sources: countable must be a contiguous bool vector of {total.shape[0]} entries, got "
            f"{checks.describe(countable)}"
        )
    if not per_source or sum(per_source) != boxes.shape[0]:
        raise ValueError(f"mean_sources: per_source must add up to {boxes.shape[0]} boxes, got {list(per_source)}")
    if divisors and len(divisors) != len(per_source):
        raise ValueError(f"mean_sources: expected {len(per_source)} divisors or none, got {len(divisors)}")
    if rows is not None:
        checks.check_index("mean_sources", "rows", rows)
    divisors = list(divisors) or [1.0] * len(per_source)
    if not total.is_cpu:
        on_device.mean_sources(total, countable, boxes, entries, per_source, divisors, rows, limit)
        return
    chosen = native.mean_sources if implementation == "native" else reference.mean_sources
    chosen(total, countable, boxes, entries, per_source, divisors, rows, limit)
