"""row_sync in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._row_checks import check_row_index

__all__ = ["row_sync"]


def row_sync(source: Tensor, target: Tensor, source_index: Tensor, target_index: Tensor) -> None:
    """Arguments as checked by the package."""
    check_row_index("row_sync", "source_index", source_index, source.shape[0])
    check_row_index("row_sync", "target_index", target_index, target.shape[0], distinct=True)
    # As integers: the header's bits may be those of a NaN.
    target.view(torch.int32)[target_index] = source.view(torch.int32)[source_index]
