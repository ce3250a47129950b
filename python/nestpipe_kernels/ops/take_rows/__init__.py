"""take_rows: copy chosen rows out of a matrix, note their largest magnitudes, and clear them."""

from __future__ import annotations

from torch import Tensor

from .. import _row_checks as checks
from .. import on_device
from . import native, reference

__all__ = ["take_rows"]


def take_rows(matrix: Tensor, index: Tensor, *, implementation: str = "native") -> tuple[Tensor, Tensor]:
    """(rows float32 [m, D], peaks float32 [m]): matrix[index] and the largest magnitude in each row, NaN where it holds
    one; then matrix[index] = +0.0. One pass, synchronous.

    A matrix on an accelerator: the index is on the host, the work goes to the current stream.

    Args:
        matrix: float32 [U, D], last dimension contiguous, D >= 1; changed in place.
        index: int64 [m], distinct.
        implementation: "native" or "reference"; the same bits, but for those of a NaN among the peaks.

    Raises:
        TypeError: dtype or device. ValueError: shapes, strides, repeated rows. IndexError: a row out of range.
            Nothing has been written then.
    """
    checks.check_implementation("take_rows", implementation)
    if not matrix.is_cpu:
        return on_device.take_rows(matrix, index)
    checks.check_matrix("take_rows", "matrix", matrix)
    checks.check_index("take_rows", "index", index)
    return native.take_rows(matrix, index) if implementation == "native" else reference.take_rows(matrix, index)
