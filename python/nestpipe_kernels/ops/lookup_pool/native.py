"""lookup_pool through the extension (csrc/pool)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._native import core
from .._row_checks import pointer
from .bags import Bags

__all__ = [
    "bag_arguments",
    "matrix_arguments",
    "pool_backward",
    "pool_forward",
    "pool_gradient_bound",
    "pool_weight_grad",
]


def pool_forward(rows: Tensor, bags: Bags, outs: Sequence[Tensor]) -> None:
    """Arguments as checked by the package."""
    core().lookup_pool_forward(
        (pointer(rows), rows.shape[0], rows.stride(0), rows.shape[1]), *bag_arguments(bags), matrix_arguments(outs)
    )


def pool_backward(grads: Sequence[Tensor | None], rows: Tensor | None, bags: Bags, accumulator: Tensor) -> None:
    """Arguments as checked by the package."""
    num_rows, dim = accumulator.shape
    stride = dim if rows is None else rows.stride(0)
    core().lookup_pool_backward(
        (pointer(rows), num_rows, stride, dim), *bag_arguments(bags), matrix_arguments(grads), pointer(accumulator)
    )


def pool_weight_grad(grads: Sequence[Tensor | None], rows: Tensor, bags: Bags) -> Tensor:
    """Arguments as checked by the package."""
    weight_grad = torch.empty(bags.slots.shape, dtype=torch.float32)
    core().lookup_pool_weight_grad(
        (pointer(rows), rows.shape[0], rows.stride(0), rows.shape[1]),
        *bag_arguments(bags),
        matrix_arguments(grads),
        pointer(weight_grad),
    )
    return weight_grad


def pool_gradient_bound(grads: Sequence[Tensor | None], bags: Bags, dim: int) -> float:
    """Arguments as checked by the package."""
    bound: float = core().lookup_pool_gradient_bound(*bag_arguments(bags), matrix_arguments(grads), dim)
    return bound


def bag_arguments(bags: Bags) -> tuple[tuple[int, bool, int, int, int, int], tuple[int, ...], tuple[int, ...]]:
    """Slots, offsets and weights by address; segments' bags; segments' modes."""
    slots = bags.slots
    packed = (
        pointer(slots),
        slots.dtype == torch.int64,
        slots.numel(),
        pointer(bags.bag_offsets),
        bags.num_bags,
        pointer(bags.weights),
    )
    return packed, bags.segment_bags, bags.segment_modes


def matrix_arguments(matrices: Sequence[Tensor | None]) -> list[tuple[int, int]]:
    """(address, row stride) of each matrix; zeros for None."""
    return [(0, 0) if matrix is None else (matrix.data_ptr(), matrix.stride(0)) for matrix in matrices]
