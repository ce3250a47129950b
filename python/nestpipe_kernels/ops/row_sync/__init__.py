"""row_sync: copy whole rows from one batch buffer to the other (the rows that consecutive batches share)."""

from __future__ import annotations

from torch import Tensor

from .. import _row_checks as checks
from .. import on_device
from . import native, reference

__all__ = ["row_sync"]

OPERATION = "row_sync"


def row_sync(
    source: Tensor, target: Tensor, source_index: Tensor, target_index: Tensor, *, implementation: str = "native"
) -> None:
    """target[target_index[j]] = source[source_index[j]]: embedding, state, header and padding. Synchronous.

    Args:
        source: float32 [Us, F] contiguous.
        target: float32 [Ut, F] contiguous, other memory than `source`.
        source_index: int64 [m].
        target_index: int64 [m], distinct.
        implementation: "native" or "reference"; the same bits.

    Raises:
        TypeError: dtype or device. ValueError: shapes, strides, repeated target rows. IndexError: a row out of range.
            Nothing has been written then.
    """
    checks.check_implementation(OPERATION, implementation)
    if not target.is_cpu:
        on_device.row_sync(source, target, source_index, target_index)
        return
    for name, matrix in (("source", source), ("target", target)):
        checks.check_matrix(OPERATION, name, matrix)
        if not matrix.is_contiguous():
            raise ValueError(f"{OPERATION}: {name} must be contiguous, got strides {list(matrix.stride())}")
    if source.shape[1] != target.shape[1]:
        raise ValueError(
            f"{OPERATION}: source and target must have rows of the same length, "
            f"got {source.shape[1]} and {target.shape[1]}"
        )
    checks.check_index(OPERATION, "source_index", source_index)
    checks.check_index(OPERATION, "target_index", target_index, source_index.numel())
    chosen = native.row_sync if implementation == "native" else reference.row_sync
    chosen(source, target, source_index, target_index)
