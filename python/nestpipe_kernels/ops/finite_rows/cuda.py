"""finite_rows and all_finite in csrc/buffers/finite_rows.cu, for gradients in device memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .._kernels import kernels_of, matrix, place_of
from .._row_checks import pointer

__all__ = ["all_finite", "finite_rows"]


def finite_rows(grads: Tensor) -> Tensor:
    """As the package's, arguments as checked there; the result is on the device."""
    finite = torch.empty(grads.shape[0], dtype=torch.bool, device=grads.device)
    kernels_of(grads).finite_rows(matrix(grads), grads.shape[1], pointer(finite), place_of(grads))
    return finite


def all_finite(grads: Tensor) -> bool:
    """As the package's, arguments as checked there. Waits for the device."""
    every = torch.empty(1, dtype=torch.bool, device=grads.device)
    kernels_of(grads).all_finite(matrix(grads), grads.shape[1], pointer(every), place_of(grads))
    return bool(every.cpu())
