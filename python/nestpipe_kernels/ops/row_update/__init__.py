"""row_update: apply gradients to buffer rows (embedding, optimizer state, update count) in place."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...types import SparseOptimizer
from .. import _registry as registry
from .. import _row_checks as checks
from ..on_device import place
from ..row_storage import RowStorage, embedding_words
from . import cuda, native, reference
from .arguments import OPERATION, check_rule, check_step, checked_lr, checked_mask

__all__ = ["ON_ACCELERATORS", "row_update"]

ON_ACCELERATORS = ("native", "triton")
"""Best first; plain PyTorch otherwise."""


def row_update(
    rows: Tensor,
    grads: Tensor,
    optimizer: SparseOptimizer,
    step: int,
    lr: float | Tensor,
    mask: Tensor | None = None,
    storage: RowStorage | None = None,
    *,
    implementation: str | None = None,
) -> None:
    """Update rows in place; the count `updates` of each updated row grows by 1. Synchronous.

    Rows and gradients on an accelerator: one kernel, where it has them, or the reference's operations go to the current
    stream. `mask` may be there or on the host, `lr` is on the host.

    The optimizer is lazy: a row that is masked out keeps its embedding and its state. Nothing is remembered between
    calls: bias correction follows from `step` (or from the row's own count) alone. Arithmetic is float32; embeddings
    of another storage type are widened before and rounded once after it.

    Args:
        rows: float32 [U, row_floats] contiguous; `types.RowStore` has the layout of a row.
        grads: float32 [U, dim], last dimension contiguous. dim follows from its shape.
        optimizer: settings; its own `lr` is not used here.
        step: 1 for the first update of the training; Adam's bias correction.
        lr: learning rate, rounded to float32, or float32 [U] with one per row.
        mask: bool or uint8 [U], 0 leaves the row untouched; None updates all.
        storage: storage type of the embeddings, and what stochastic rounding needs; None: FP32. `ops.row_storage`'s
            `storage_of` makes it for rows of a store.
        implementation: "native", "triton" (CUDA; no stochastic rounding) or "reference"; the same bits. None: the best
            for the device.

    Raises:
        TypeError: dtype or device of an argument. ValueError: shapes, step, learning rate, storage, or an
            optimizer without a rule. IndexError: a table of `storage` that is none.
    """
    storage = RowStorage() if storage is None else storage
    but = "" if storage.keys is None else "Triton's kernel does not round stochastically"
    name = registry.chosen(OPERATION, rows.device, implementation, ON_ACCELERATORS, but=but)
    device = checks.device_of(rows)
    if device is not None and grads.device != device:
        raise TypeError(f"{OPERATION}: grads must be on {device}, as rows are, got {checks.describe(grads)}")
    checks.check_matrix(OPERATION, "rows", rows, device=device)
    checks.check_matrix(OPERATION, "grads", grads, device=device)
    num_rows, dim = grads.shape
    check_rule(optimizer)
    if rows.shape[0] != num_rows:
        raise ValueError(f"{OPERATION}: rows and grads must have as many rows, got {rows.shape[0]} and {num_rows}")
    if not rows.is_contiguous():
        raise ValueError(f"{OPERATION}: rows must be contiguous, got strides {list(rows.stride())}")
    if dim < 1:
        raise ValueError(f"{OPERATION}: grads must have at least one column, got shape {list(grads.shape)}")
    storage.check(OPERATION, num_rows)
    needed = embedding_words(dim, storage.data_type) + optimizer.state_floats(dim) + 1
    if rows.shape[1] < needed:
        raise ValueError(
            f"{OPERATION}: rows of {optimizer.name} with dim {dim} need at least {needed} floats, got {rows.shape[1]}"
        )
    check_step(step)
    lr = checked_lr(lr, num_rows)
    mask = checked_mask(mask, num_rows, device)
    if name == "reference" and device is not None:
        lr = place(lr, rows) if isinstance(lr, Tensor) else lr
        mask = None if mask is None else place(mask, rows)
    _function(name, device is None)(rows, grads.detach(), optimizer, step, lr, mask, storage)


def _function(name: str, on_cpu: bool) -> Callable[..., None]:
    """The update of an implementation."""
    if name == "triton":
        from . import triton  # imports Triton itself, which takes a second

        return triton.row_update
    if name == "native":
        return native.row_update if on_cpu else cuda.row_update
    return reference.row_update
