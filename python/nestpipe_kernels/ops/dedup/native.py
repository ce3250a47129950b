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
    distinct = core().Dedup(keys.data_ptr(), pointer(tables), size)
    # Room for just as many entries as there are, so that results hold on to no more.
    unique_index = torch.empty(distinct.size(), dtype=torch.int64)
    counts = torch.empty(distinct.size(), dtype=torch.int64)
    inverse = torch.empty(size, dtype=torch.int32)
    distinct.write(unique_index.data_ptr(), inverse.data_ptr(), counts.data_ptr())
    return DedupResult(unique_index, inverse, counts)
