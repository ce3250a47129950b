"""Case `row_gradients`: gradients of bags become gradients of rows, ours in the written order of sums, and torch's
index_add_, whose order is any."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from nestpipe_kernels.bench.on_device.frame import Candidate, Work, scaled
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.ops.lookup_pool import cuda as kernels
from nestpipe_kernels.ops.lookup_pool.bags import Bags
from nestpipe_kernels.types import PoolingType

__all__ = ["works"]

DIM, IDS = 128, 20


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """100,000 bags of 20: rows drawn alike; few of them very frequent; one row in half of all places."""
    for kind, power in (("uniform", 1.0), ("skewed", 4.0), ("one hot row", 1.0)):
        yield _work(parsed, backend, kind, power)


def _work(parsed: argparse.Namespace, backend: DeviceBackend, kind: str, power: float) -> Work:
    num_bags, num_rows = scaled(parsed, 100_000, 8), scaled(parsed, 200_000, 16)
    chance = torch.Generator().manual_seed(parsed.seed)
    slots = (torch.rand(num_bags * IDS, generator=chance, dtype=torch.float64) ** power * num_rows).long()
    if kind == "one hot row":
        slots[::2] = 0
    offsets = torch.arange(0, num_bags * IDS + 1, IDS).to(backend.device)
    bags = Bags(slots.to(backend.device), offsets, (0, num_bags), (PoolingType.SUM.code,), None)
    bag_of = torch.arange(num_bags).repeat_interleave(IDS).to(backend.device)
    grad = torch.randn(num_bags, DIM, generator=chance).to(backend.device)
    sums, other = torch.zeros((2, num_rows, DIM), device=backend.device)

    def ours(_: int) -> None:
        kernels.pool_backward([grad], None, bags, sums)

    def torchs(_: int) -> None:
        other.index_add_(0, bags.slots, grad.index_select(0, bag_of))

    def check() -> None:
        ours(0)
        torchs(0)
        if not torch.allclose(sums.cpu(), other.cpu(), rtol=1e-3, atol=1.0):
            raise ValueError("bench row_gradients: nestpipe differs from torch; nothing was timed")

    candidates = [Candidate("nestpipe", ours)]
    if parsed.peers:
        candidates.append(Candidate("torch.index_select + index_add_", torchs))
    distinct = len(torch.unique(slots))
    shape = {"kind": kind, "bags": num_bags, "ids": IDS, "dim": DIM, "distinct": distinct}
    return Work(shape, candidates, 4 * DIM * len(slots) + 8 * DIM * distinct, check=check)
