"""row_sync through the extension (csrc/buffers/row_sync.cpp)."""

from __future__ import annotations

from torch import Tensor

from ..._native import core
from .._row_checks import pointer

__all__ = ["row_sync"]


def row_sync(source: Tensor, target: Tensor, source_index: Tensor, target_index: Tensor) -> None:
    """Arguments as checked by the package."""
    core().row_sync(
        (pointer(source), *source.shape),
        (pointer(target), *target.shape),
        pointer(source_index),
        pointer(target_index),
        source_index.numel(),
    )
