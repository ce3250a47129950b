"""Case `row_sync`: rows of 1 KB from places of a buffer to places of another, ours and by torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from nestpipe_kernels.bench.on_device.frame import Candidate, Work, scaled
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.ops.row_sync import cuda as kernels
from nestpipe_kernels.ops.row_sync import row_sync

__all__ = ["works"]

ROW_FLOATS = 256


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """100,000 of 200,000 rows; indices on the device, and, as in a pipeline, on the host."""
    rows, count = scaled(parsed, 200_000, 16), scaled(parsed, 100_000, 8)
    chance = torch.Generator().manual_seed(parsed.seed)
    source = torch.randn(rows, ROW_FLOATS, generator=chance).to(backend.device)
    index, place = torch.randperm(rows, generator=chance)[:count], torch.randperm(rows, generator=chance)[:count]
    there, here = index.to(backend.device), place.to(backend.device)
    ours, hosted, other = torch.zeros((3, rows, ROW_FLOATS), device=backend.device)

    def check() -> None:
        kernels.row_sync(source, ours, there, here)
        row_sync(source, hosted, index, place)
        other.index_copy_(0, here, source.index_select(0, there))
        if not (torch.equal(ours, other) and torch.equal(hosted, other)):
            raise ValueError("bench row_sync: nestpipe differs from torch; nothing was timed")

    candidates = [
        Candidate("nestpipe", lambda k: kernels.row_sync(source, ours, there, here)),
        Candidate("nestpipe, indices on the host", lambda k: row_sync(source, hosted, index, place)),
    ]
    if parsed.peers:
        candidates.append(
            Candidate(
                "torch.index_select + index_copy_",
                lambda k: other.index_copy_(0, here, source.index_select(0, there)),
            )
        )
    moved = count * (2 * 4 * ROW_FLOATS + 2 * 8)
    yield Work({"rows": rows, "floats": ROW_FLOATS, "copied": count}, candidates, moved, check=check)
