"""finite_rows and all_finite through the extension (csrc/buffers/finite_rows.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._native import core
from .._row_checks import pointer

__all__ = ["all_finite", "finite_rows"]


def finite_rows(grads: Tensor) -> Tensor:
    """Arguments as checked by the package."""
    finite = torch.empty(grads.shape[0], dtype=torch.bool)
    core().finite_rows((pointer(grads), grads.shape[0], grads.stride(0)), grads.shape[1], pointer(finite))
    return finite


def all_finite(grads: Tensor) -> bool:
    """Arguments as checked by the package."""
    return bool(core().all_finite((pointer(grads), grads.shape[0], grads.stride(0)), grads.shape[1]))
