"""finite_rows and all_finite in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

__all__ = ["all_finite", "finite_rows"]


def finite_rows(grads: Tensor) -> Tensor:
    """Arguments as checked by the package."""
    return grads.isfinite().all(dim=1)


def all_finite(grads: Tensor) -> bool:
    """Arguments as checked by the package."""
    return bool(grads.isfinite().all())
