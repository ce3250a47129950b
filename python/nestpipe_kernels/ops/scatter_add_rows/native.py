"""scatter_rows, scatter_add_rows, zero_rows through the extension (csrc/buffers/scatter_add_rows.cpp)."""

from __future__ import annotations

from torch import Tensor

from ..._native import core
from .._row_checks import pointer

__all__ = ["scatter_add_rows", "scatter_rows", "zero_rows"]


def scatter_rows(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Arguments as checked by the package."""
    core().scatter_rows(_matrix(target), (pointer(index), index.numel()), _matrix(source), target.shape[1])


def scatter_add_rows(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Arguments as checked by the package."""
    core().scatter_add_rows(_matrix(target), (pointer(index), index.numel()), _matrix(source), target.shape[1])


def zero_rows(target: Tensor, index: Tensor) -> None:
    """Arguments as checked by the package."""
    core().zero_rows(_matrix(target), (pointer(index), index.numel()), target.shape[1])


def _matrix(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.data_ptr(), tensor.shape[0], tensor.stride(0)
