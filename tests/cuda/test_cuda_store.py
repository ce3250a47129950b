"""The store in device memory on a GPU, after the same calls as the store in host memory; skipped without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import store_programs as programs
import torch
from torch import Tensor

from nestpipe_kernels._native import cuda as cuda_kernels
from nestpipe_kernels.store import DeviceStore, EmbeddingStore, RowMetadata
from nestpipe_kernels.types import Retrieval, TableSpec

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(cuda_kernels() is None, reason="this installation has no CUDA kernels"),
]


class FromHost:
    """A store on a GPU whose callers give and get tensors of the host; what a call fills comes back, too."""

    def __init__(self, store: DeviceStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return (lambda *given: self._call(found, given)) if callable(found) else found

    def _call(self, function: Any, given: tuple[Any, ...]) -> Any:
        moved = [_moved(value, self._store.device) for value in given]
        result = _moved(function(*moved), torch.device("cpu"))
        for value, copy in zip(given, moved):
            if isinstance(value, Tensor):
                value.copy_(copy)
        return result


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, RowMetadata):
        return RowMetadata(value.last_used.to(device), value.frequency.to(device))
    if isinstance(value, Retrieval):
        return Retrieval(value.handles.to(device), value.status.to(device), value.journal)
    return tuple(_moved(part, device) for part in value) if isinstance(value, tuple) else value


def both(*tables: TableSpec, **settings: Any) -> tuple[FromHost, EmbeddingStore]:
    device, host = programs.both(*tables, device="cuda", **settings)
    return FromHost(device), host


def test_cuda_store_random_program() -> None:
    programs.random_program(*both(*programs.PROGRAM[0], **programs.PROGRAM[1]))


@pytest.mark.parametrize("undoable", [False, True])
@pytest.mark.parametrize("rule", programs.RULES, ids=lambda rule: type(rule).__name__)
def test_cuda_store_evicts_the_rows_that_the_host_store_does(rule: Any, undoable: bool) -> None:
    programs.evictions(rule, *both(*programs.full_tables(rule), undoable=undoable))


def test_cuda_store_many_keys_at_once() -> None:
    """2 M keys, each in four places, in an index that grows from nothing; then half of them go and come back."""
    device, host = both(dim=8)
    keys = torch.randint(-(1 << 62), 1 << 62, (1 << 21,), generator=torch.Generator().manual_seed(1))
    again = torch.cat([keys, keys.flip(0), keys, keys[::2]])
    tables = torch.zeros(len(again), dtype=torch.int32)
    for store_keys in (again, keys[::2].contiguous(), again):
        own = tables[: len(store_keys)]
        ours, theirs = (store.retrieve(store_keys, own, None, -1) for store in (device, host))
        assert torch.equal(ours.handles, theirs.handles) and torch.equal(ours.status, theirs.status)
        gone = keys[1::2].contiguous()
        assert torch.equal(device.erase(gone), host.erase(gone))
    found, status = device.find(keys)
    expected = host.find(keys)
    assert torch.equal(found, expected[0]) and torch.equal(status, expected[1])
