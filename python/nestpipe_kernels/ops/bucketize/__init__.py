"""Stable counting sort: the positions of each bucket, and how many there are."""

from __future__ import annotations

import torch
from torch import Tensor

from .._key_checks import check_implementation, check_vector
from . import cuda, native, reference

__all__ = ["bucketize"]


def bucketize(buckets: Tensor, num_buckets: int, *, implementation: str = "native") -> tuple[Tensor, Tensor]:
    """Sort positions by bucket, ascending inside each bucket.

    Linear time; the same result at any number of threads.

    Args:
        buckets: int32 [n] in [0, num_buckets), on the CPU or a CUDA device, where the call waits for it once.
        num_buckets: number of buckets, >= 0.
        implementation: "native" or "reference".

    Returns:
        order int64 [n], the positions of bucket 0, then of bucket 1, ...; counts int64 [num_buckets].

    Raises:
        TypeError: `buckets` are not int32.
        ValueError: a bucket is out of range (names position and value), `num_buckets` is negative, wrong number of
            dimensions, a device without kernels, or unknown implementation.
    """
    check_implementation("bucketize", implementation)
    buckets = check_vector("bucketize", "buckets", buckets, (torch.int32,), on_device=True).contiguous()
    if num_buckets < 0:
        raise ValueError(f"bucketize: num_buckets must be >= 0, got {num_buckets}")
    run = native.bucketize if implementation == "native" else reference.bucketize
    if not buckets.is_cpu:
        run = cuda.bucketize
    order, counts, bad_position = run(buckets, num_buckets)
    if bad_position >= 0:
        raise ValueError(
            f"bucketize: buckets must be in [0, {num_buckets}), got {int(buckets[bad_position])} "
            f"at position {bad_position}; raise num_buckets or correct the bucket"
        )
    return order, counts
