"""take_rows in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._row_checks import check_row_index

__all__ = ["take_rows"]


@torch.no_grad()
def take_rows(matrix: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments as checked by the package."""
    check_row_index("take_rows", "index", index, matrix.shape[0], distinct=True)
    rows = matrix[index]
    matrix[index] = 0.0
    return rows, torch.maximum(rows.amax(1), -rows.amin(1)) if rows.numel() else rows.new_zeros(len(index))
