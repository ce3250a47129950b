"""Case `nested`: a step of a DLRM whose tables are in host memory, by schedule; what lookups add to it.

`lookups alike` trains one batch again and again: all of its rows are in the buffers already, so that nothing comes from
the store. What a schedule's step takes longer than that is what its lookups expose.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch

import nestpipe_kernels as nk
from nestpipe_kernels.bench.on_device.frame import Candidate, Work, link_rate, scaled
from nestpipe_kernels.data import Batch
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.models import DLRM

__all__ = ["works"]

TABLES, DIM, BAG, NUMBERS = 26, 64, 4, 13
BATCHES = 6
"""Different batches, in turn."""
SCHEDULES = ("sequential", "dbp", "nested")


def _model(rows: int, width: int) -> DLRM:
    tables = [nk.EmbeddingBagConfig(rows, DIM, f"t{t}", feature_names=[f"f{t}"]) for t in range(TABLES)]
    collection = nk.EmbeddingBagCollection(tables, optimizer=nk.optim.RowWiseAdagrad(0.05))
    return DLRM(collection, NUMBERS, (width, DIM), (width, width, width))


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """16,384 samples of 26 bags of 4 uniform keys out of 26 tables of 400,000 rows: 1.7 M keys a step."""
    samples, rows = scaled(parsed, 16_384, 16), scaled(parsed, 400_000, 64)
    width = scaled(parsed, 2048, 8)
    batches = [_batch(samples, rows, parsed.seed + k) for k in range(BATCHES)]
    loops = {name: _Loop(backend, name, batches, rows, width) for name in SCHEDULES}
    loops["nested, lookups alike"] = _Loop(backend, "nested", batches[:1], rows, width)
    keys = samples * TABLES * BAG
    try:
        yield Work(
            {"samples": samples, "tables": TABLES, "rows": rows, "dim": DIM, "keys": keys, "width": width},
            [Candidate(name, loop.step) for name, loop in loops.items()],
            # Rows to the device and back, embedding and sum, padded to 256 + 64 bytes.
            bytes_moved=2.0 * keys * 320,
            rate=_rate_to_device(backend, keys * 320),
            keys=keys,
            inner=4,
        )
    finally:
        for loop in loops.values():
            loop.close()


class _Loop:
    """Training by a schedule, a step at a time."""

    def __init__(self, backend: DeviceBackend, schedule: str, batches: list[Batch], rows: int, width: int) -> None:
        model = _model(rows, width).to(backend.device)
        dense = torch.optim.SGD(model.parameters(), lr=0.01)
        config = nk.PipelineConfig(schedule=schedule, num_micro_batches=4, device=str(backend.device))
        self._pipeline = nk.NestedPipeline(model, dense, config=config)
        self._batches = cycle(batches)

    def step(self, k: int) -> Any:
        return self._pipeline.progress(self._batches)

    def close(self) -> None:
        self._pipeline.close()


def _batch(samples: int, rows: int, seed: int) -> Batch:
    chance = torch.Generator().manual_seed(seed)
    keys = torch.randint(rows, (TABLES * samples * BAG,), generator=chance)
    lengths = torch.full((TABLES * samples,), BAG)
    features = nk.KeyedJaggedTensor([f"f{t}" for t in range(TABLES)], keys, lengths=lengths)
    labels = (torch.rand(samples, generator=chance) < 0.3).to(torch.float32)
    return Batch(torch.randn(samples, NUMBERS, generator=chance), features, labels)


def _rate_to_device(backend: DeviceBackend, size: int) -> float:
    host = backend.pinned((size,), torch.uint8)
    host.zero_()
    there = torch.zeros(size, dtype=torch.uint8, device=backend.device)
    return link_rate(backend, lambda k: there.copy_(host, non_blocking=True), size)
