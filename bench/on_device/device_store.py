"""Case `device_store`: a store in the device's memory: keys found, and found or inserted, their rows copied out."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

import nestpipe_kernels as nk
from nestpipe_kernels.bench.on_device.frame import Candidate, Work, scaled
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.store import DeviceStore, EmbeddingStore
from nestpipe_kernels.types import UNBOUNDED, KeyStatus, TableSpec

__all__ = ["works"]

DIM = 64
STORE_BYTES, ROW_BYTES = 16_000_000_000, 320 + 23
"""Of a row with its record, and of the index at its load of 0.75."""
INSERTED, CALLS = 1 << 22, 8
"""Keys of a call that fills the store; calls that are measured in turn."""
FIND_BYTES, INSERT_BYTES = 590, 720
"""Of a key: csrc/include/nestpipe/cuda/device_store.h."""


def works(parsed: argparse.Namespace, backend: DeviceBackend) -> Iterator[Work]:
    """1 M uniform keys a call, of 46 M in a store of 16 GB; also calls of which a tenth of the keys is new."""
    total, size = scaled(parsed, STORE_BYTES // ROW_BYTES, 256), scaled(parsed, 1 << 20, 64)
    generator = torch.Generator().manual_seed(parsed.seed)
    table = TableSpec("t", UNBOUNDED, nk.init.Uniform(-0.1, 0.1), parsed.seed)
    store = DeviceStore([table], dim=DIM, optimizer=nk.optim.RowWiseAdagrad(0.05), device=backend.device)
    new = size // 10 + 1
    store.reserve(total + new)
    # Odd multiples: distinct keys, spread over all of int64.
    keys = (torch.arange(total) * -0x61C8864680B583EB).to(backend.device)
    for begin in range(0, total, INSERTED):
        store.find_or_insert(keys[begin : begin + INSERTED])
    calls = [keys[torch.randint(total, (size,), generator=generator).to(backend.device)] for _ in range(CALLS)]
    out = torch.empty(size, DIM, device=backend.device)
    rows = torch.empty(total, DIM, device=backend.device).uniform_()
    places = [torch.randint(total, (size,), generator=generator).to(backend.device) for _ in range(CALLS)]
    known = Candidate(
        "torch.index_select of known rows", lambda k: torch.index_select(rows, 0, places[k % CALLS], out=out)
    )
    shape = {"keys": total, "per_call": size, "dim": DIM, "bytes": sum(store.memory().values())}
    yield Work(
        {**shape, "call": "find"},
        [Candidate("nestpipe", lambda k: store.find(calls[k % CALLS], out=out)), *([known] if parsed.peers else [])],
        FIND_BYTES * size,
        keys=size,
        check=lambda: _check(store, table, calls[0]),
    )
    yield Work(
        {**shape, "call": "find_or_insert", "new": 0},
        [Candidate("nestpipe", lambda k: store.find_or_insert(calls[k % CALLS], batch=max(k, 0), out=out))],
        INSERT_BYTES * size,
        keys=size,
    )
    strange = keys[:new] ^ 1
    mixed = [torch.cat([call[: size - new], strange]) for call in calls]
    yield Work(
        {**shape, "call": "find_or_insert", "new": new},
        [
            Candidate(
                "nestpipe",
                lambda k: store.find_or_insert(mixed[k % CALLS], batch=max(k, 0), out=out),
                prepare=lambda k: store.erase(strange),
            )
        ],
        INSERT_BYTES * size,
        keys=size,
    )


def _check(store: DeviceStore, table: TableSpec, keys: Tensor) -> None:
    """Untrained rows: what a store in host memory gives for keys that it does not have."""
    some = keys[:1000]
    found, status = store.find(some)
    host = EmbeddingStore([table], dim=DIM, optimizer=store.optimizer)
    expected, _ = host.find(some.cpu())
    if bool((status != KeyStatus.FOUND.value).any()) or not torch.equal(found.cpu(), expected):
        raise ValueError("bench device_store: rows found differ from those of the host's store; nothing was timed")
