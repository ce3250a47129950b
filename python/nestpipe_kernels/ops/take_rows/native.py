"""take_rows through the extension (csrc/buffers/take_rows.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._native import core
from .._row_checks import pointer

__all__ = ["take_rows"]


def take_rows(matrix: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments as checked by the package."""
    rows = torch.empty(index.numel(), matrix.shape[1], dtype=torch.float32)
    peaks = torch.empty(index.numel(), dtype=torch.float32)
    core().take_rows(
        (pointer(matrix), matrix.shape[0], matrix.stride(0)),
        (pointer(index), index.numel()),
        matrix.shape[1],
        pointer(rows),
        pointer(peaks),
    )
    return rows, peaks
