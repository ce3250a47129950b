"""lookup_pool in csrc/pool/*.cu, for rows in device memory: bags on the host or there. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _row_checks as checks
from .._kernels import kernels_of, place_of, work_memory
from .._row_checks import pointer
from ..on_device import place
from .bags import Bags
from .reference import MAX, MEAN

__all__ = ["pool_backward", "pool_forward", "pool_weight_grad"]


def pool_forward(rows: Tensor, bags: Bags, outs: Sequence[Tensor], bad_position: Tensor | None = None) -> None:
    """As the package's `pool_forward`, for bags that have been checked; rows and outs on one device.

    Where slots have not been checked, those out of range are left out, and the smallest position with one is kept in
    `bad_position` (int64 [1], -1 before).
    """
    contiguous = [checks.contiguous_rows(out) for out in outs]
    given = _Given.of(bags, contiguous, rows)
    kernels_of(rows).lookup_pool_forward(
        _matrix(rows), given.bags, given.segments, pointer(bad_position), place_of(rows)
    )
    for out, written in zip(outs, contiguous):
        if out is not written:
            out.copy_(written)


def pool_backward(
    grads: Sequence[Tensor | None],
    rows: Tensor | None,
    bags: Bags,
    accumulator: Tensor,
    bad_position: Tensor | None = None,
) -> None:
    """As the package's `pool_backward`, for bags that have been checked; grads, rows and accumulator on one device.
    `bad_position` as in `pool_forward`."""
    module, (num_rows, dim) = kernels_of(accumulator), accumulator.shape
    given = _Given.of(bags, _with_rows(grads), accumulator)
    work = work_memory(module.lookup_pool_backward_work_bytes(given.bags, given.segments, num_rows, dim), accumulator)
    module.lookup_pool_backward(
        (0, num_rows, dim, dim) if rows is None else _matrix(rows),
        given.bags,
        given.segments,
        pointer(work),
        pointer(accumulator),
        pointer(bad_position),
        place_of(accumulator),
    )


def pool_weight_grad(
    grads: Sequence[Tensor | None], rows: Tensor, bags: Bags, bad_position: Tensor | None = None
) -> Tensor:
    """As the package's `pool_weight_grad`, for bags that have been checked; the result is on the device.
    `bad_position` as in `pool_forward`."""
    given = _Given.of(bags, _with_rows(grads), rows)
    weight_grad = torch.empty(bags.slots.numel(), dtype=torch.float32, device=rows.device)
    kernels_of(rows).lookup_pool_weight_grad(
        _matrix(rows), given.bags, given.segments, pointer(weight_grad), pointer(bad_position), place_of(rows)
    )
    return weight_grad


def _matrix(rows: Tensor) -> tuple[int, int, int, int]:
    return pointer(rows), rows.shape[0], rows.stride(0), rows.shape[1]


def _with_rows(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if grad is None else checks.contiguous_rows(grad.detach()) for grad in grads]


@dataclass
class _Given:
    """Bags and segments for the extension, and the tensors whose addresses these have."""

    bags: tuple[Any, ...]
    segments: tuple[Any, ...]
    tensors: list[Tensor | None]

    @staticmethod
    def of(bags: Bags, matrices: Sequence[Tensor | None], like: Tensor) -> _Given:
        lines, maxima, aligned = [], 0, True
        for segment, (mode, matrix) in enumerate(zip(bags.segment_modes, matrices)):
            stride = 0 if matrix is None else matrix.stride(0)
            lines.append((pointer(matrix), stride, bags.segment_bags[segment], mode, maxima))
            if matrix is None:
                continue
            aligned &= matrix.data_ptr() % 16 == 0 and stride % 4 == 0
            maxima += len(matrix) if mode == MAX else 0
        table = place(torch.tensor(lines, dtype=torch.int64).reshape(-1, 5), like)
        slots, offsets = place(bags.slots, like), place(bags.bag_offsets, like)
        weights = None if bags.weights is None else place(bags.weights, like)
        packed = (pointer(slots), slots.dtype == torch.int64, slots.numel(), pointer(offsets), bags.num_bags)
        return _Given(
            (*packed, pointer(weights)),
            (pointer(table), len(lines), aligned, MEAN in bags.segment_modes, maxima),
            [table, slots, offsets, weights, *matrices],
        )
