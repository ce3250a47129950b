"""Case `row_update`: an update rule on rows of a buffer, ours and in plain PyTorch operations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from nestpipe_kernels import optim
from nestpipe_kernels.bench.on_device.frame import Candidate, Work, scaled
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.ops.row_storage import RowStorage, embedding_words
from nestpipe_kernels.ops.row_update import cuda as kernels
from nestpipe_kernels.ops.row_update import reference
from nestpipe_kernels.types import DataType, SparseOptimizer

__all__ = ["works"]

DIM, STEP = 64, 1000


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """500,000 rows: rules with much state and with little, with a sum over the row, and rows of halves."""
    rules: list[SparseOptimizer] = [optim.SGD(), optim.Adagrad(), optim.RowWiseAdagrad(), optim.Adam()]
    for rule in rules:
        yield _work(parsed, backend, rule, RowStorage())
    size = scaled(parsed, 500_000, 16)
    chance = torch.Generator().manual_seed(parsed.seed)
    keys, one = torch.randint(1 << 62, (size,), generator=chance), torch.tensor([12345])
    parts = (keys, torch.zeros(size, dtype=torch.int32), one, one)
    yield _work(parsed, backend, rules[2], RowStorage(DataType.BF16, *(part.to(backend.device) for part in parts)))


def _work(parsed: argparse.Namespace, backend: DeviceBackend, rule: SparseOptimizer, storage: RowStorage) -> Work:
    size = scaled(parsed, 500_000, 16)
    used = embedding_words(DIM, storage.data_type) + rule.state_floats(DIM) + 1
    chance = torch.Generator().manual_seed(parsed.seed)
    rows = torch.zeros(size, (used + 15) // 16 * 16).to(backend.device)
    grads = torch.randn(size, DIM, generator=chance).to(backend.device)
    other = rows.clone()

    def ours(_: int) -> None:
        kernels.row_update(rows, grads, rule, STEP, 0.01, None, storage)

    def plain(_: int) -> None:
        reference.row_update(other, grads, rule, STEP, 0.01, None, storage)

    def check() -> None:
        if storage.keys is None:  # random words are made on the host
            ours(0)
            plain(0)
            if not torch.equal(rows.view(torch.int32), other.view(torch.int32)):
                raise ValueError(f"bench row_update: nestpipe differs from PyTorch with {rule.name}; nothing was timed")

    candidates = [Candidate("nestpipe", ours)]
    if parsed.peers and storage.keys is None:
        candidates.append(Candidate("plain PyTorch", plain))
    shape = {"rule": rule.name, "rows": size, "dim": DIM, "stochastic": storage.keys is not None}
    moved = size * (2 * 4 * used + 4 * DIM)
    return Work(shape, candidates, moved, dtype=storage.data_type.value, check=check)
