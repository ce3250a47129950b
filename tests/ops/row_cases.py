"""Random bags for tests of operations on rows, and a guard for the thread count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nestpipe_kernels._native import core
from nestpipe_kernels.types import PoolingType

SUM, MEAN, MAX, NONE = (mode.code for mode in (PoolingType.SUM, PoolingType.MEAN, PoolingType.MAX, PoolingType.NONE))
DIMS = [1, 3, 7, 64, 65, 129, 1280]


@dataclass
class BagCase:
    """One call's bags and rows; `outs()` makes poisoned outputs."""

    rows: Tensor
    slots: Tensor
    bag_offsets: Tensor
    segment_bags: list[int]
    segment_modes: list[int]
    weights: Tensor | None
    grads: list[Tensor | None]

    def bags(self) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """The arguments that all three operations share."""
        return self.slots, self.bag_offsets, self.segment_bags, self.segment_modes

    def outs(self) -> list[Tensor]:
        """NaN-filled columns of one wider matrix per segment."""
        dim = self.rows.shape[1]
        sizes = [end - begin for begin, end in pairwise(self.segment_bags)]
        return [torch.full((size, dim + 5), torch.nan)[:, 2 : 2 + dim] for size in sizes]


def zipf_slots(generator: torch.Generator, size: int, num_rows: int) -> Tensor:
    """Row numbers, few of them very frequent."""
    uniform = torch.rand(size, generator=generator)
    return (uniform**6 * num_rows).to(torch.int64).clamp(max=num_rows - 1)


def bag_case(
    seed: int,
    modes: list[int],
    *,
    size: int = 63,
    dim: int = 7,
    num_rows: int = 40,
    weighted: bool = False,
    padding: float = 0.1,
    slot_dtype: torch.dtype = torch.int64,
) -> BagCase:
    """About `size` occurrences per segment in bags of uneven length, some empty, some only padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    segment_bags = [0]
    for mode in modes:
        if mode == NONE:
            lengths += [1] * size
        else:
            left = size
            while left > 0:
                length = min(left, int(torch.randint(0, 9, (1,), generator=generator)))
                lengths.append(length)
                left -= length
            lengths += [0, 0]
        segment_bags.append(len(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    n = int(offsets[-1])
    slots = zipf_slots(generator, n, num_rows)
    slots[torch.rand(n, generator=generator) < padding] = -1
    wide = torch.randn(num_rows, dim + 3, generator=generator)
    grads: list[Tensor | None] = [
        torch.randn(end - begin, dim, generator=generator) for begin, end in pairwise(segment_bags)
    ]
    weights = torch.randn(n, generator=generator) if weighted else None
    return BagCase(wide[:, :dim], slots.to(slot_dtype), offsets, segment_bags, list(modes), weights, grads)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns, so that -0.0 differs from 0.0 and NaN equals itself."""
    return tensor.detach().contiguous().view(torch.int32)


@contextmanager
def native_threads(count: int) -> Iterator[None]:
    """Run native calls on `count` threads."""
    before = core().num_threads()
    core().set_num_threads(count)
    try:
        yield
    finally:
        core().set_num_threads(before)
