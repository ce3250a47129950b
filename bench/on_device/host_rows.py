"""Case `host_rows`: rows of a store in host memory into a buffer on the device, and back; the link is the floor."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch

import nestpipe_kernels as nk
from nestpipe_kernels.bench.on_device.frame import Candidate, Work, scaled
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.stages.host_rows import gather, write_back_rows

__all__ = ["works"]

DIM = 64


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """400,000 random rows out of 8 million, as a batch that shares nothing with the one before takes them."""
    total, count = scaled(parsed, 8_000_000, 256), scaled(parsed, 400_000, 64)
    tables = [nk.EmbeddingBagConfig(total, DIM, "t", feature_names=["f"])]
    store = nk.EmbeddingBagCollection(tables, optimizer=nk.optim.RowWiseAdagrad(0.05)).store("t").shared
    keys = torch.randperm(total, generator=torch.Generator().manual_seed(parsed.seed))
    for part in keys.split(1 << 20):
        store.retrieve(part, torch.zeros(len(part), dtype=torch.int32), torch.ones(len(part), dtype=torch.int64), 1)
    chosen = keys[:count].contiguous()
    table = torch.zeros(count, dtype=torch.int32)
    handles = store.find(chosen, table)
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
            rate=_link_rate(backend, copy, moved),
            inner=1,
        )


def _link_rate(backend: DeviceBackend, copy, moved: int) -> float:  # type: ignore[no-untyped-def]
    """Bytes per second of the copy alone: the best of a few."""
    best = float("inf")
    for _ in range(5):
        backend.synchronize()
        start = time.perf_counter()
        copy(0)
        backend.synchronize()
        best = min(best, time.perf_counter() - start)
    return moved / best
