"""Intersect in csrc/keys/intersect.cu, for keys in device memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .._kernels import kernels_of, place_of, work_memory
from .._key_checks import pointer

__all__ = ["intersect"]


def intersect(
    keys_a: Tensor, tables_a: Tensor | None, keys_b: Tensor, tables_b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `nestpipe_kernels.ops.intersect.intersect`, for checked arguments on one device.

    Waits for the device once, to read the number of matches.
    """
    size_a, size_b, module = keys_a.numel(), keys_b.numel(), kernels_of(keys_a)
    index_a, index_b = torch.empty((2, size_b), dtype=torch.int64, device=keys_a.device)
    num_matches = torch.empty(1, dtype=torch.int64, device=keys_a.device)
    work = work_memory(module.intersect_work_bytes(size_a, size_b), keys_a)
    module.intersect(
        (pointer(keys_a), pointer(tables_a), size_a),
        (pointer(keys_b), pointer(tables_b), size_b),
        pointer(work),
        (pointer(index_a), pointer(index_b), pointer(num_matches)),
        place_of(keys_a),
    )
    found = int(num_matches.cpu())
    return index_a[:found].clone(), index_b[:found].clone()
