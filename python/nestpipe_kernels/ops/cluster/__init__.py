"""Reorders the samples of a batch so that those sharing keys meet in the same micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._key_checks import check_implementation, check_vector
from ..dedup import dedup
from . import native, reference
from .reference import cluster_cost, partition_sizes

__all__ = ["OBJECTIVES", "cluster", "cluster_cost", "partition_sizes"]

OBJECTIVES = ("send_once", "resend")

MOST_TOGETHER = 2048
"""Samples that are clustered together; time grows with the square of their number, so more go in blocks."""


def cluster(
    sample_offsets: Tensor,
    ids: Tensor,
    num_parts: int,
    objective: str,
    seed: int = 0,
    *,
    implementation: str = "native",
) -> Tensor:
    """Order samples so that parts of consecutive samples share ids.

    Part i takes the next B // N + (i < B % N) samples. A function of the arguments alone: one thread, integers only,
    so every machine and both implementations give the same order. Parts are grown by nearest samples, then improved by
    swaps of two samples: at most ten sweeps, each of which prices every swap once. A sample with 2^22 distinct ids or
    more leaves the order as it is. More than 2,048 samples are clustered in blocks of as many successive ones, each
    block over all parts, so that time grows with their number and not with its square.

    Args:
        sample_offsets: int64 [B + 1], ascending from 0 to nnz: sample s uses ids sample_offsets[s] .. [s + 1].
        ids: int64 or int32 [nnz], repeats allowed, best the `inverse` of dedup (anything else is renumbered).
        num_parts: number of parts N, >= 1; parts beyond B are empty.
        objective: "send_once": fewest distinct ids in the first part plus in the last part, then even first-use and
            last-use sets. "resend": fewest distinct ids per part, summed over parts.
        seed: seed of the random proposals, 0 <= seed < 2^64.
        implementation: "native" or "reference" (slow).

    Returns:
        order int64 [B], a permutation: ascending inside each part; up to 2,048 samples never worse than the identity.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: bad offsets, num_parts, objective or seed, wrong number of dimensions, not on the CPU, or unknown
            implementation.
    """
    check_implementation("cluster", implementation)
    if objective not in OBJECTIVES:
        raise ValueError(f"cluster: unknown objective {objective!r}: choose one of {', '.join(OBJECTIVES)}")
    if num_parts < 1:
        raise ValueError(f"cluster: num_parts must be >= 1, got {num_parts}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"cluster: seed must be in [0, 2^64), got {seed}")
    ids = check_vector("cluster", "ids", ids, (torch.int64, torch.int32))
    sample_offsets = check_vector("cluster", "sample_offsets", sample_offsets, (torch.int64,)).contiguous()
    _check_offsets(sample_offsets, ids.numel())
    run = native.cluster if implementation == "native" else reference.cluster
    dense, num_ids = _dense(ids)
    return _by_blocks(run, sample_offsets, dense, num_ids, num_parts, objective, seed)


def _by_blocks(
    run: Callable[..., Tensor],
    offsets: Tensor,
    ids: Tensor,
    num_ids: int,
    num_parts: int,
    objective: str,
    seed: int,
) -> Tensor:
    size, block = len(offsets) - 1, max(MOST_TOGETHER // num_parts, 1) * num_parts
    if size <= block:
        return run(offsets, ids, num_ids, num_parts, objective, seed)
    parts: list[list[Tensor]] = [[] for _ in range(num_parts)]
    for begin in range(0, size, block):  # a whole block gives every part as many: sizes add up to those of the batch
        end = min(begin + block, size)
        low, high = int(offsets[begin]), int(offsets[end])
        order = run(offsets[begin : end + 1] - low, ids[low:high], num_ids, num_parts, objective, seed) + begin
        for part, piece in zip(parts, torch.split(order, partition_sizes(end - begin, num_parts))):
            part.append(piece)
    return torch.cat([piece for part in parts for piece in part])


def _check_offsets(offsets: Tensor, num_ids: int) -> None:
    if offsets.numel() == 0 or int(offsets[0]) != 0 or int(offsets[-1]) != num_ids:
        ends = f"{int(offsets[0])} .. {int(offsets[-1])}" if offsets.numel() else "no entries"
        raise ValueError(f"cluster: sample_offsets must go from 0 to the number of ids {num_ids}, got {ends}")
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if falls.numel() > 0:
        at = int(falls[0]) + 1
        raise ValueError(
            f"cluster: sample_offsets must not decrease, got {int(offsets[at])} after {int(offsets[at - 1])} "
            f"at position {at}"
        )


def _dense(ids: Tensor) -> tuple[Tensor, int]:
    """Ids as contiguous int32 below a bound of at most nnz, and the bound."""
    if ids.numel() == 0:
        return ids.to(torch.int32), 0
    low, high = (int(value) for value in torch.aminmax(ids))
    if low >= 0 and high < ids.numel():
        return ids.to(torch.int32).contiguous(), high + 1
    result = dedup(ids)
    return result.inverse, result.counts.numel()
