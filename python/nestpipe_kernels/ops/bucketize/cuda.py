"""Bucketize in csrc/keys/bucketize.cu, for buckets in device memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .._kernels import kernels_of, place_of, work_memory

__all__ = ["bucketize", "bucketize_unchecked"]


def bucketize(buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor, int]:
    """Order, counts, and the first position out of range or -1; for checked arguments on a device.

    Waits for the device once, to read that position.
    """
    order, counts, bad_position = bucketize_unchecked(buckets, num_buckets)
    return order, counts, int(bad_position.cpu())


def bucketize_unchecked(buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `bucketize`, with the position in device memory, int64 [1]: nothing waits."""
    size, module = buckets.numel(), kernels_of(buckets)
    order = torch.empty(size, dtype=torch.int64, device=buckets.device)
    counts = torch.empty(num_buckets, dtype=torch.int64, device=buckets.device)
    bad_position = torch.empty(1, dtype=torch.int64, device=buckets.device)
    work = work_memory(module.bucketize_work_bytes(size, num_buckets), buckets)
    module.bucketize(
        (buckets.data_ptr(), size),
        num_buckets,
        work.data_ptr(),
        (order.data_ptr(), counts.data_ptr(), bad_position.data_ptr()),
        place_of(buckets),
    )
    return order, counts, bad_position
