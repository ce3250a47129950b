"""gather_rows in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._row_checks import check_row_index

__all__ = ["gather_rows"]


def gather_rows(rows: Tensor, index: Tensor, dim: int, out: Tensor) -> None:
    """Arguments as checked by the package."""
    check_row_index("gather_rows", "index", index, rows.shape[0])
    with torch.no_grad():
        out.copy_(rows[index, :dim])
