"""gather_rows in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import DataType
from .._row_checks import check_row_index
from ..row_storage import unpack_embeddings

__all__ = ["gather_rows"]


def gather_rows(rows: Tensor, index: Tensor, dim: int, out: Tensor, data_type: DataType) -> None:
    """Arguments as checked by the package."""
    check_row_index("gather_rows", "index", index, rows.shape[0])
    with torch.no_grad():
        out.copy_(unpack_embeddings(rows[index], dim, data_type))
