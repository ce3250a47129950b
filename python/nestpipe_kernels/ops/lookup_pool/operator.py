"""`lookup_pool` as an operator of torch: differentiable, and one node in what torch.compile makes.

`torch.ops.nestpipe.lookup_pool` has a rule for shapes (fake tensors) and one for gradients; behind it are the
implementations of this package, chosen by the device. Rows, slots and offsets are on one device. The gradient of `rows`
is a matrix of their shape, so this is for rows that are at hand (a buffer, a parameter), not for a store.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...types import PoolingType
from .. import _registry as registry
from .. import _row_checks as checks
from . import ON_ACCELERATORS, pool_backward, pool_forward, pool_weight_grad
from .arguments import OPERATION
from .bags import Bags

__all__ = ["lookup_pool"]

MODES = {mode.code: mode for mode in PoolingType}


def lookup_pool(
    rows: Tensor,
    slots: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    mode: PoolingType = PoolingType.SUM,
) -> Tensor:
    """Pool rows into bags: a tensor operation with gradients for `rows` and `weights`, in eager mode and compiled.

    Args:
        rows: float32 [U, D]; on a CUDA device also bfloat16 or float16.
        slots: int32 or int64 [n], row of each occurrence; -1 is padding: skipped, not counted.
        offsets: int64 [bags + 1], ascending from 0 to n.
        weights: float32 [n] for SUM and NONE, or None.
        mode: how a bag's rows become one.

    Returns:
        float32 [bags, D], with the bits of `pool_forward`; gradients with those of `pool_backward`.

    Raises:
        TypeError, ValueError, IndexError: as `pool_forward`. With Triton's kernels slots and offsets are not read by
            the host: wrong ones end the process's use of the device, as torch's own lookups do.
    """
    pooled: Tensor = torch.ops.nestpipe.lookup_pool(rows, slots, offsets, weights, mode.code)
    return pooled


@torch.library.custom_op(
    "nestpipe::lookup_pool",
    mutates_args=(),
    schema="(Tensor rows, Tensor slots, Tensor offsets, Tensor? weights, int mode) -> Tensor",
)
def _forward(rows: Tensor, slots: Tensor, offsets: Tensor, weights: Tensor | None, mode: int) -> Tensor:
    _check_places(rows, slots, offsets, weights)
    out = torch.empty(offsets.numel() - 1, rows.shape[1], dtype=torch.float32, device=rows.device)
    rows = checks.contiguous_rows(rows)
    if _by_triton(rows):
        _triton().pool_forward(rows, _bags(slots, offsets, weights, mode, rows.shape[0]), [out])
    else:
        there, ends = slots.cpu(), offsets.cpu()  # the other implementations want bags on the host
        pool_forward(rows, there, ends, [0, len(out)], [mode], [out], None if weights is None else weights.cpu())
    return out


@_forward.register_fake
def _(rows: Tensor, slots: Tensor, offsets: Tensor, weights: Tensor | None, mode: int) -> Tensor:
    return rows.new_empty((offsets.shape[0] - 1, rows.shape[1]), dtype=torch.float32)


@torch.library.custom_op(
    "nestpipe::lookup_pool_row_grad",
    mutates_args=(),
    schema="(Tensor grad, Tensor rows, Tensor slots, Tensor offsets, Tensor? weights, int mode) -> Tensor",
)
def _row_grad(
    grad: Tensor, rows: Tensor, slots: Tensor, offsets: Tensor, weights: Tensor | None, mode: int
) -> Tensor:  # fmt: skip
    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    rows = checks.contiguous_rows(rows)
    if _by_triton(rows):
        _triton().pool_backward([grad], rows, _bags(slots, offsets, weights, mode, rows.shape[0]), total)
    else:
        given = None if weights is None else weights.cpu()
        pool_backward([grad], rows, slots.cpu(), offsets.cpu(), [0, len(grad)], [mode], given, total)
    return total.to(rows.dtype)


@_row_grad.register_fake
def _(grad: Tensor, rows: Tensor, slots: Tensor, offsets: Tensor, weights: Tensor | None, mode: int) -> Tensor:
    return rows.new_empty(rows.shape)


@torch.library.custom_op(
    "nestpipe::lookup_pool_weight_grad",
    mutates_args=(),
    schema="(Tensor grad, Tensor rows, Tensor slots, Tensor offsets, int mode) -> Tensor",
)
def _weight_grad(grad: Tensor, rows: Tensor, slots: Tensor, offsets: Tensor, mode: int) -> Tensor:
    rows = checks.contiguous_rows(rows)
    if not _by_triton(rows):
        return pool_weight_grad([grad], rows, slots.cpu(), offsets.cpu(), [0, len(grad)], [mode])
    found: Tensor = _triton().pool_weight_grad([grad], rows, _bags(slots, offsets, None, mode, rows.shape[0]))
    return found


@_weight_grad.register_fake
def _(grad: Tensor, rows: Tensor, slots: Tensor, offsets: Tensor, mode: int) -> Tensor:
    return rows.new_empty(slots.shape, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, slots, offsets, weights, mode = inputs
    ctx.save_for_backward(rows, slots, offsets, weights)
    ctx.mode = mode


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, slots, offsets, weights = ctx.saved_tensors
    of_rows = of_weights = None
    if ctx.needs_input_grad[0]:
        of_rows = torch.ops.nestpipe.lookup_pool_row_grad(grad, rows, slots, offsets, weights, ctx.mode)
    if ctx.needs_input_grad[3]:
        of_weights = torch.ops.nestpipe.lookup_pool_weight_grad(grad, rows, slots, offsets, ctx.mode)
    return of_rows, None, None, of_weights, None


_forward.register_autograd(_backward, setup_context=_keep)


def _check_places(rows: Tensor, slots: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
    for name, tensor in (("slots", slots), ("offsets", offsets), ("weights", weights)):
        if tensor is not None and tensor.device != rows.device:
            raise TypeError(f"{OPERATION}: {name} must be on {rows.device}, as rows are, got {checks.describe(tensor)}")


def _bags(slots: Tensor, offsets: Tensor, weights: Tensor | None, mode: int, num_rows: int) -> Bags:
    """Bags on a device; what the host cannot see is checked there."""
    if weights is not None and MODES[mode] in (PoolingType.MEAN, PoolingType.MAX):
        raise ValueError(
            f"{OPERATION}: per-sample weights need pooling sum or none, got {MODES[mode].value.lower()} for segment 0"
        )
    good = (offsets.diff() >= 0).all()
    if slots.numel():
        lowest, highest = torch.aminmax(slots)  # one pass over them
        good = good & (lowest >= -1) & (highest < num_rows)
    torch._assert_async(
        good & (offsets[0] == 0) & (offsets[-1] == slots.numel()),
        f"{OPERATION}: slots must lie in [-1, {num_rows}), offsets must ascend from 0 to {slots.numel()}",
    )
    return Bags(slots.contiguous(), offsets.contiguous(), (0, offsets.numel() - 1), (mode,), weights)


def _by_triton(rows: Tensor) -> bool:
    """Whether Triton's kernels serve the rows' device; they alone take bags that lie there."""
    return registry.chosen(OPERATION, rows.device, None, ON_ACCELERATORS) == "triton"


def _triton() -> Any:
    from . import triton

    return triton
