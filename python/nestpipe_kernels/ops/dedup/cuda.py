"""Dedup in csrc/keys/dedup.cu, for keys in device memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .._kernels import kernels_of, place_of, work_memory
from .._key_checks import pointer
from .result import DedupResult

__all__ = ["dedup"]


def dedup(keys: Tensor, tables: Tensor | None) -> DedupResult:
    """As `nestpipe_kernels.ops.dedup.dedup`, for checked arguments on one device.

    Waits for the device once, to read the number of distinct pairs.
    """
    size, module = keys.numel(), kernels_of(keys)
    unique_index, counts = torch.empty((2, size), dtype=torch.int64, device=keys.device)
    inverse = torch.empty(size, dtype=torch.int32, device=keys.device)
    num_unique = torch.empty(1, dtype=torch.int64, device=keys.device)
    work = work_memory(module.dedup_work_bytes(size), keys)
    module.dedup(
        (keys.data_ptr(), pointer(tables), size),
        work.data_ptr(),
        (unique_index.data_ptr(), inverse.data_ptr(), counts.data_ptr(), num_unique.data_ptr()),
        place_of(keys),
    )
    found = int(num_unique.cpu())
    return DedupResult(unique_index[:found].clone(), inverse, counts[:found].clone())
