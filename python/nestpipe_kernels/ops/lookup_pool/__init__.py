"""lookup_pool: rows of bags become pooled vectors, and back: gradients of rows and of per-sample weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .. import _registry as registry
from .. import _row_checks as checks
from . import device, native, reference
from .arguments import OPERATION, check_matrices, checked_bags, checked_grads

__all__ = ["ON_ACCELERATORS", "pool_backward", "pool_forward", "pool_gradient_bound", "pool_weight_grad"]

ON_ACCELERATORS = ("triton", "native")
"""Best first; plain PyTorch otherwise."""


def pool_forward(
    rows: Tensor,
    slots: Tensor,
    bag_offsets: Tensor,
    segment_bags: Sequence[int],
    segment_modes: Sequence[int],
    outs: Sequence[Tensor],
    weights: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> None:
    """Pool the rows of each bag into `outs`, in bag order; every element of `outs` is written. Synchronous.

    Rows on an accelerator: they and `outs` are there, the rest is on the host, and the work goes to the current stream.
    Triton's kernels also take rows in bfloat16 and float16; they are added up in float32.

    Args:
        rows: float32 [U, D], or a view of longer rows (last dimension contiguous).
        slots: int32 or int64 [n], row of each occurrence; -1 is padding: skipped, not counted.
        bag_offsets: int64 [num_bags + 1], ascending from 0 to n.
        segment_bags: [S + 1] ints; segment s owns bags segment_bags[s] .. segment_bags[s + 1].
        segment_modes: [S] ints, `types.PoolingType.code`. NONE wants one occurrence in each bag.
        outs: S float32 matrices [bags of the segment, D], any row stride.
        weights: float32 [n] per-sample weights, for SUM and NONE; or None.
        implementation: "native", "triton" (CUDA) or "reference"; the same bits. None: the best for the device.

    Raises:
        TypeError: dtype or device of an argument. ValueError: shapes, offsets, segments, weights with mean or max.
        IndexError: a slot outside [-1, U). Nothing has been written then.
    """
    name = registry.chosen(OPERATION, rows.device, implementation, ON_ACCELERATORS)
    if not rows.is_cpu or name == "triton":
        bags = checked_bags(slots, bag_offsets, segment_bags, segment_modes, weights)
        check_matrices("outs", outs, bags, rows.shape[1])
        _on_device(name).pool_forward(rows, bags, outs)
        return
    checks.check_matrix(OPERATION, "rows", rows)
    bags = checked_bags(slots, bag_offsets, segment_bags, segment_modes, weights)
    check_matrices("outs", outs, bags, rows.shape[1])
    for segment, out in enumerate(outs):
        checks.check_matrix(OPERATION, f"outs[{segment}]", out)
    if name == "native":
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
    implementation: str | None = None,
) -> None:
    """accumulator[u] += gradient of row u, for each row that occurs (others stay untouched). Synchronous.

    A row's occurrences are summed in ascending order in blocks of 1,024, block sums in ascending order, then one
    addition into the accumulator: docs/architecture.md, exactness rule 3.

    Args:
        grads: S float32 matrices [bags of the segment, D], any strides; None is gradient 0.
        rows: float32 [U, D], what forward pooled; needed by MAX, otherwise may be None.
        slots, bag_offsets, segment_bags, segment_modes, weights: as in `pool_forward`.
        accumulator: float32 [U, D] contiguous.
        implementation: "native", "triton" (CUDA) or "reference"; the same bits. None: the best for the device.

    Raises:
        TypeError, ValueError, IndexError: as `pool_forward`. ValueError: MAX without `rows`.
    """
    name = registry.chosen(OPERATION, accumulator.device, implementation, ON_ACCELERATORS)
    if not accumulator.is_cpu or name == "triton":
        bags = checked_bags(slots, bag_offsets, segment_bags, segment_modes, weights)
        check_matrices("grads", grads, bags, accumulator.shape[1])
        _on_device(name).pool_backward(grads, rows, bags, accumulator)
        return
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
    bags = checked_bags(slots, bag_offsets, segment_bags, segment_modes, weights)
    grads = checked_grads(grads, bags, accumulator.shape[1])
    if name == "native":
        native.pool_backward(grads, rows, bags, accumulator)
    else:
        reference.pool_backward(grads, rows, bags, accumulator)


def pool_gradient_bound(
    grads: Sequence[Tensor | None],
    slots: Tensor,
    bag_offsets: Tensor,
    segment_bags: Sequence[int],
    segment_modes: Sequence[int],
    weights: Tensor | None,
    dim: int,
    *,
    implementation: str | None = None,
) -> float:
    """What no element of a row's gradient exceeds in magnitude: often far too much, never too little, and infinite
    where something is not finite. One pass over `grads`.

    Args:
        grads, slots, bag_offsets, segment_bags, segment_modes, weights: as in `pool_backward`. dim: D.
        implementation: "native" or "reference"; the same number. None: native.

    Raises:
        TypeError, ValueError: as `pool_forward`.
    """
    checks.check_implementation(OPERATION, implementation or "native")
    bags = checked_bags(slots, bag_offsets, segment_bags, segment_modes, weights)
    checked = checked_grads(grads, bags, dim)
    if implementation == "reference":
        return reference.pool_gradient_bound(checked, bags)
    return native.pool_gradient_bound(checked, bags, dim)


def pool_weight_grad(
    grads: Sequence[Tensor | None],
    rows: Tensor,
    slots: Tensor,
    bag_offsets: Tensor,
    segment_bags: Sequence[int],
    segment_modes: Sequence[int],
    *,
    implementation: str | None = None,
) -> Tensor:
    """Gradient of the per-sample weights: dot(gradient of the bag, row), summed in 16 lanes (exactness rule 4).

    Args:
        grads, rows, slots, bag_offsets, segment_bags, segment_modes: as in `pool_backward`; only SUM and NONE.
        implementation: "native", "triton" (CUDA) or "reference"; the same bits. None: the best for the device.

    Returns:
        float32 [n]; 0 for padding and where grads is None.

    Raises:
        TypeError, ValueError, IndexError: as `pool_forward`.
    """
    name = registry.chosen(OPERATION, rows.device, implementation, ON_ACCELERATORS)
    if not rows.is_cpu or name == "triton":
        bags = checked_bags(slots, bag_offsets, segment_bags, segment_modes, None)
        check_matrices("grads", grads, bags, rows.shape[1])
        found: Tensor = _on_device(name).pool_weight_grad(grads, rows, bags)
        return found
    checks.check_matrix(OPERATION, "rows", rows)
    bags = checked_bags(slots, bag_offsets, segment_bags, segment_modes, None)
    grads = checked_grads(grads, bags, rows.shape[1])
    if name == "native":
        return native.pool_weight_grad(grads, rows, bags)
    return reference.pool_weight_grad(grads, rows, bags)


class _Kernels:
    """device.py's functions, by the kernels of `_cuda`."""

    pool_forward = staticmethod(partial(device.pool_forward, native=True))
    pool_backward = staticmethod(partial(device.pool_backward, native=True))
    pool_weight_grad = staticmethod(partial(device.pool_weight_grad, native=True))


def _on_device(name: str) -> Any:
    """What works on rows of an accelerator."""
    if name == "triton":
        from . import triton  # imports Triton itself, which takes a second

        return triton
    return _Kernels if name == "native" else device
