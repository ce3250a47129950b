"""gather_rows through the extension (csrc/buffers/gather_rows.cpp)."""

from __future__ import annotations

from torch import Tensor

from ..._native import core
from ...types import DataType
from .._row_checks import pointer

__all__ = ["gather_rows"]


def gather_rows(rows: Tensor, index: Tensor, dim: int, out: Tensor, data_type: DataType) -> None:
    """Arguments as checked by the package."""
    core().gather_rows(
        (pointer(rows), rows.shape[0], rows.stride(0)),
        (pointer(index), index.numel()),
        (pointer(out), out.shape[0], out.stride(0)),
        dim,
        data_type.code,
    )
