"""Bucketize with a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bucketize"]


def bucketize(buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor, int]:
    """Order, counts, and the first position out of range or -1; for checked arguments."""
    bad = ((buckets < 0) | (buckets >= num_buckets)).nonzero()
    if bad.numel() > 0:
        empty = torch.empty(0, dtype=torch.int64)
        return empty, empty, int(bad[0])
    order = torch.sort(buckets, stable=True).indices
    return order, torch.bincount(buckets, minlength=num_buckets)[:num_buckets], -1
