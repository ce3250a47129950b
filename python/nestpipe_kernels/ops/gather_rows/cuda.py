"""gather_rows in csrc/buffers/gather_rows.cu, for rows in device memory."""

from __future__ import annotations

from torch import Tensor

from ...types import DataType
from .._kernels import kernels_of, matrix, place_of
from .._row_checks import pointer

__all__ = ["gather_rows"]


def gather_rows(
    rows: Tensor, index: Tensor, dim: int, out: Tensor, data_type: DataType, bad_position: Tensor | None = None
) -> None:
    """As the package's, all on one device.

    A row out of range is left out, and the smallest position with one is kept in `bad_position` (int64 [1], -1 before);
    None: the index has been checked.
    """
    kernels_of(rows).gather_rows(
        matrix(rows), (index.data_ptr(), index.numel()), matrix(out), dim, data_type.code,
        pointer(bad_position), place_of(rows),
    )  # fmt: skip
