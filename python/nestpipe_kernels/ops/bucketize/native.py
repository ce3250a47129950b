"""Bucketize in csrc/keys/bucketize.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._native import core

__all__ = ["bucketize"]


def bucketize(buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor, int]:
    """Order, counts, and the first position out of range or -1; for checked arguments."""
    order = torch.empty(buckets.numel(), dtype=torch.int64)
    counts = torch.empty(num_buckets, dtype=torch.int64)
    bad_position = core().bucketize(
        buckets.data_ptr(), buckets.numel(), num_buckets, order.data_ptr(), counts.data_ptr()
    )
    return order, counts, bad_position
