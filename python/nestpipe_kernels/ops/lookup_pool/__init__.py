"""lookup_pool: rows of bags become pooled vectors, and back: gradients of rows and of per-sample weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _row_checks as checks
from . import native, reference
from .bags import Bags

__all__ = ["pool_backward", "pool_forward", "pool_weight_grad"]

OPERATION = "lookup_pool"


def pool_forward(
    rows: Tensor,
    slots: Tensor,
    bag_offsets: Tensor,
    segment_bags: Sequence[int],
    segment_modes: Sequence[int],
    outs: Sequence[Tensor],
    weights: Tensor | None = None,
    *,
    implementation: str = "native",
) -> None:
    """Pool the rows of each bag into `outs`, in bag order; every element of `outs` is written. Synchronous.

    Args:
        rows: float32 [U, D], or a view of longer rows (last dimension contiguous).
        slots: int32 or int64 [n], row of each occurrence; -1 is padding: skipped, not counted.
        bag_offsets: int64 [num_bags + 1], ascending from 0 to n.
        segment_bags: [S + 1] ints; segment s owns bags segment_bags[s] .. segment_bags[s + 1].
        segment_modes: [S] ints, `types.PoolingType.code`. NONE wants one occurrence in each bag.
        outs: S float32 matrices [bags of the segment, D], any row stride.
        weights: float32 [n] per-sample weights, for SUM and NONE; or None.
        implementation: "native" or "reference"; the same bits.

    Raises:
        TypeError: dtype or device of an argument. ValueError: shapes, offsets, segments, weights with mean or max.
        IndexError: a slot outside [-1, U). Nothing has been written then.
    """
    checks.check_implementation(OPERATION, implementation)
    checks.check_matrix(OPERATION, "rows", rows)
    bags = _check_bags(slots, bag_offsets, segment_bags, segment_modes, weights)
    _check_matrices("outs", outs, bags, rows.shape[1])
    for segment, out in enumerate(outs):
        checks.check_matrix(OPERATION, f"outs[{segment}]", out)
    if implementation == "native":
        native.pool_forward(rows, bags, outs)
    else:
        reference.pool_forward(rows, bags, outs)


def pool_backward(
    grads: Sequence[Tensor | None],
    rows: Tensor | None,
    slots: Tensor,
    bag_offsets: Tensor,
    segment_bags: Sequence[int],
    segment_modes: Sequence[int],
    weights: Tensor | None,
    accumulator: Tensor,
    *,
    implementation: str = "native",
) -> None:
    """accumulator[u] += gradient of row u, for each row that occurs (others stay untouched). Synchronous.

    A row's occurrences are summed in ascending order in blocks of 1,024, block sums in ascending order, then one
    addition into the accumulator: docs/architecture.md, exactness rule 3.

    Args:
        grads: S float32 matrices [bags of the segment, D], any strides; None is gradient 0.
        rows: float32 [U, D], what forward pooled; needed by MAX, otherwise may be None.
        slots, bag_offsets, segment_bags, segment_modes, weights: as in `pool_forward`.
        accumulator: float32 [U, D] contiguous.
        implementation: "native" or "reference"; the same bits.

    Raises:
        TypeError, ValueError, IndexError: as `pool_forward`. ValueError: MAX without `rows`.
    """
    checks.check_implementation(OPERATION, implementation)
    checks.check_matrix(OPERATION, "accumulator", accumulator)
    if not accumulator.is_contiguous():
        raise ValueError(f"{OPERATION}: accumulator must be contiguous, got strides {list(accumulator.stride())}")
    if rows is not None:
        checks.check_matrix(OPERATION, "rows", rows)
        if rows.shape != accumulator.shape:
            raise ValueError(
                f"{OPERATION}: rows and accumulator must have the same shape, "
                f"got {list(rows.shape)} and {list(accumulator.shape)}"
            )
    bags = _check_bags(slots, bag_offsets, segment_bags, segment_modes, weights)
    grads = _check_grads(grads, bags, accumulator.shape[1])
    if implementation == "native":
        native.pool_backward(grads, rows, bags, accumulator)
    else:
        reference.pool_backward(grads, rows, bags, accumulator)


def pool_weight_grad(
    grads: Sequence[Tensor | None],
    rows: Tensor,
    slots: Tensor,
    bag_offsets: Tensor,
    segment_bags: Sequence[int],
    segment_modes: Sequence[int],
    *,
    implementation: str = "native",
) -> Tensor:
    """Gradient of the per-sample weights: dot(gradient of the bag, row), summed in 16 lanes (exactness rule 4).

    Args:
        grads, rows, slots, bag_offsets, segment_bags, segment_modes: as in `pool_backward`; only SUM and NONE.
        implementation: "native" or "reference"; the same bits.

    Returns:
        float32 [n]; 0 for padding and where grads is None.

    Raises:
        TypeError, ValueError, IndexError: as `pool_forward`.
    """
    checks.check_implementation(OPERATION, implementation)
    checks.check_matrix(OPERATION, "rows", rows)
    bags = _check_bags(slots, bag_offsets, segment_bags, segment_modes, None)
    grads = _check_grads(grads, bags, rows.shape[1])
    if implementation == "native":
        return native.pool_weight_grad(grads, rows, bags)
    return reference.pool_weight_grad(grads, rows, bags)


def _check_bags(
    slots: Tensor,
    bag_offsets: Tensor,
    segment_bags: Sequence[int],
    segment_modes: Sequence[int],
    weights: Tensor | None,
) -> Bags:
    """Types and shapes; what stands in the tensors is checked by the implementation, in one pass."""
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int32, torch.int64) or not slots.is_cpu:
        raise TypeError(f"{OPERATION}: slots must be an int32 or int64 CPU tensor, got {checks.describe(slots)}")
    if slots.dim() != 1:
        raise ValueError(f"{OPERATION}: slots must be a vector, got {checks.describe(slots)}")
    checks.check_index(OPERATION, "bag_offsets", bag_offsets)
    if bag_offsets.numel() == 0:
        raise ValueError(f"{OPERATION}: bag_offsets must have at least the entry 0, got none")
    if weights is not None:
        if weights.dtype != torch.float32 or weights.device.type != "cpu":
            raise TypeError(f"{OPERATION}: weights must be a float32 CPU tensor, got {checks.describe(weights)}")
        if weights.shape != slots.shape:
            raise ValueError(
                f"{OPERATION}: weights must have the shape of slots {list(slots.shape)}, got {list(weights.shape)}"
            )
        weights = weights.detach().contiguous()
    if len(segment_bags) != len(segment_modes) + 1:
        raise ValueError(
            f"{OPERATION}: segment_bags must have one entry more than segment_modes ({len(segment_modes)}), "
            f"got {len(segment_bags)}"
        )
    return Bags(slots.contiguous(), bag_offsets, tuple(segment_bags), tuple(segment_modes), weights)


def _check_matrices(name: str, matrices: Sequence[Tensor | None], bags: Bags, dim: int) -> None:
    if len(matrices) != bags.num_segments:
        raise ValueError(
            f"{OPERATION}: {name} must have one matrix per segment ({bags.num_segments}), got {len(matrices)}"
        )
    for segment, matrix in enumerate(matrices):
        if matrix is None:
            continue
        expected = [bags.segment_bags[segment + 1] - bags.segment_bags[segment], dim]
        if list(matrix.shape) != expected:
            raise ValueError(f"{OPERATION}: {name}[{segment}] must have shape {expected}, got {list(matrix.shape)}")


def _check_grads(grads: Sequence[Tensor | None], bags: Bags, dim: int) -> list[Tensor | None]:
    _check_matrices("grads", grads, bags, dim)
    checked: list[Tensor | None] = []
    for segment, grad in enumerate(grads):
        if grad is not None and (grad.dtype != torch.float32 or not grad.is_cpu):
            raise TypeError(f"{OPERATION}: grads[{segment}] must be a float32 CPU tensor, got {checks.describe(grad)}")
        checked.append(None if grad is None else checks.contiguous_rows(grad.detach()))
    return checked
