"""Case `host_rows`: rows of a store in host memory into a buffer on the device, and back; the link is the floor."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

import nestpipe_kernels as nk
from nestpipe_kernels.bench.on_device.frame import Candidate, Work, link_rate, scaled
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.stages.host_rows import gather, write_back_rows
from nestpipe_kernels.store import EmbeddingStore

__all__ = ["works"]

DIM = 64
INSERTED = 1 << 20
"""Keys of a call that fills the store."""


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """400,000 random rows out of 8 million, as a batch that shares nothing with the one before takes them."""
    total, count = scaled(parsed, 8_000_000, 256), scaled(parsed, 400_000, 64)
    store = EmbeddingStore(name="t", dim=DIM, optimizer=nk.optim.RowWiseAdagrad(0.05))
    keys = torch.randperm(total, generator=torch.Generator().manual_seed(parsed.seed))
    for begin in range(0, total, INSERTED):
        store.find_or_insert(keys[begin : begin + INSERTED])
    chosen, table = keys[:count].clone(), torch.zeros(count, dtype=torch.int32)
    handles = store.find_handles(chosen, table)
    buffer = torch.zeros(count, store.row_floats, device=backend.device)
    moved = buffer.numel() * 4
    host = backend.pinned((count, store.row_floats), torch.float32)
    host.zero_()
    for way, step, copy in (
        (
            "to the device",
            lambda k: gather(store, handles, chosen, table, buffer, None, backend),
            lambda k: buffer.copy_(host, non_blocking=True),
        ),
        (
            "to the host",
            lambda k: write_back_rows(store, handles, buffer, backend),
            lambda k: host.copy_(buffer, non_blocking=True),
        ),
    ):
        yield Work(
            {"rows": total, "copied": count, "floats": store.row_floats, "way": way},
            [Candidate("nestpipe", step), Candidate("torch copy_ of rows in order", copy)],
            moved,
            rate=link_rate(backend, copy, moved),
            inner=1,
        )
