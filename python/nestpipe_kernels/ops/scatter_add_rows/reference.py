"""scatter_rows, scatter_add_rows, zero_rows in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._row_checks import check_row_index

__all__ = ["scatter_add_rows", "scatter_rows", "zero_rows"]


@torch.no_grad()
def scatter_rows(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Arguments as checked by the package."""
    check_row_index("scatter_rows", "index", index, target.shape[0], distinct=True)
    target[index] = source


@torch.no_grad()
def scatter_add_rows(target: Tensor, index: Tensor, source: Tensor) -> None:
    """Arguments as checked by the package."""
    check_row_index("scatter_add_rows", "index", index, target.shape[0], distinct=True)
    target[index] = target[index] + source


@torch.no_grad()
def zero_rows(target: Tensor, index: Tensor) -> None:
    """Arguments as checked by the package."""
    check_row_index("zero_rows", "index", index, target.shape[0], distinct=True)
    target[index] = 0.0
