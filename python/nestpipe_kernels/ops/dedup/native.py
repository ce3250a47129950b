"""Dedup in csrc/keys/dedup.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._native import core
from .._key_checks import pointer
from .result import DedupResult

__all__ = ["dedup"]


def dedup(keys: Tensor, tables: Tensor | None) -> DedupResult:
    """As `nestpipe_kernels.ops.dedup.dedup`, for checked arguments."""
    size = keys.numel()
    unique_index = torch.empty(size, dtype=torch.int64)
    counts = torch.empty(size, dtype=torch.int64)
    inverse = torch.empty(size, dtype=torch.int32)
    num_unique = core().dedup(
        keys.data_ptr(), pointer(tables), size, unique_index.data_ptr(), inverse.data_ptr(), counts.data_ptr()
    )
    # Copies, so that results do not hold on to n entries.
    return DedupResult(unique_index[:num_unique].clone(), inverse, counts[:num_unique].clone())
