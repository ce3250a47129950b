"""scatter_add_rows, and its siblings scatter_rows and zero_rows: write to chosen, distinct rows of a matrix."""

from __future__ import annotations

from torch import Tensor

from .. import _row_checks as checks
from .. import on_device
from . import native, reference

__all__ = ["scatter_add_rows", "scatter_rows", "zero_rows"]


def scatter_rows(target: Tensor, index: Tensor, source: Tensor, *, implementation: str = "native") -> None:
    """target[index[j]] = source[j], synchronously.

    Args:
        target: float32 [U, D], last dimension contiguous.
        index: int64 [m], distinct.
        source: float32 [m, D], last dimension contiguous, other memory than `target`.
        implementation: "native" or "reference"; the same bits.

    Raises:
        TypeError: dtype or device. ValueError: shapes, strides, repeated rows. IndexError: a row out of range.
            Nothing has been written then.
    """
    if not target.is_cpu:
        on_device.scatter_rows(target, index, source)
        return
    _check("scatter_rows", target, index, source, implementation)
    chosen = native.scatter_rows if implementation == "native" else reference.scatter_rows
    chosen(target, index, source)


def scatter_add_rows(target: Tensor, index: Tensor, source: Tensor, *, implementation: str = "native") -> None:
    """target[index[j]] += source[j], one addition per element, synchronously. Arguments and errors: `scatter_rows`."""
    if not target.is_cpu:
        on_device.scatter_add_rows(target, index, source)
        return
    _check("scatter_add_rows", target, index, source, implementation)
    chosen = native.scatter_add_rows if implementation == "native" else reference.scatter_add_rows
    chosen(target, index, source)


def zero_rows(target: Tensor, index: Tensor, *, implementation: str = "native") -> None:
    """target[index[j]] = +0.0, synchronously. Arguments and errors: `scatter_rows`."""
    if not target.is_cpu:
        on_device.zero_rows(target, index)
        return
    _check("zero_rows", target, index, None, implementation)
    chosen = native.zero_rows if implementation == "native" else reference.zero_rows
    chosen(target, index)


def _check(operation: str, target: Tensor, index: Tensor, source: Tensor | None, implementation: str) -> None:
    checks.check_implementation(operation, implementation)
    checks.check_matrix(operation, "target", target)
    checks.check_index(operation, "index", index)
    if source is None:
        return
    checks.check_matrix(operation, "source", source)
    expected = (index.numel(), target.shape[1])
    if source.shape != expected:
        raise ValueError(f"{operation}: source must have shape {list(expected)}, got {list(source.shape)}")
