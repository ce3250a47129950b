"""Calls of a store in device memory and of the store in host memory, side by side: what tests on the emulator and on a
GPU have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels import init, policy
from nestpipe_kernels.optim import SGD, Adagrad
from nestpipe_kernels.store import DeviceStore, EmbeddingStore
from nestpipe_kernels.testing.policy_model import TableModel
from nestpipe_kernels.types import UNBOUNDED, KeyStatus, TableSpec

EXTREMES = [0, -1, -2, 1, 2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1, 2**32, -(2**32)]
INSERTED, FOUND = KeyStatus.INSERTED.value, KeyStatus.FOUND.value


def spec(name: str = "t", **settings: Any) -> TableSpec:
    return TableSpec(name, UNBOUNDED, settings.pop("start", None), settings.pop("seed", 3), **settings)


def device_store(*tables: TableSpec, dim: int = 4, optimizer: Any = None, **settings: Any) -> DeviceStore:
    """Small slabs, so that rows lie in several."""
    made: dict[str, Any] = {"device": "cpu", "rows_per_slab": 32, "optimizer": optimizer or SGD(lr=0.1), **settings}
    return DeviceStore(tables or (spec(),), dim=dim, **made)


def both(
    *tables: TableSpec,
    dim: int = 4,
    optimizer: Any = None,
    device: str = "cpu",
    undoable: bool = False,
    **settings: Any,
) -> tuple[DeviceStore, EmbeddingStore]:
    tables = tables or (spec(),)
    host = EmbeddingStore(tables, dim=dim, optimizer=optimizer or SGD(lr=0.1), **settings)
    made = device_store(*tables, dim=dim, optimizer=optimizer, device=device, undoable=undoable, **settings)
    return made, host


def bits(rows: Tensor) -> Tensor:
    return rows.view(torch.int32)


def contents(store: Any, table: int = 0) -> dict[int, tuple[int, int, tuple[int, ...]]]:
    """key -> (last_used, frequency, bits of the row)"""
    keys, handles = store.export_table(table)
    rows = torch.full((keys.numel(), store.row_floats), float("nan"))
    store.gather(handles, keys, torch.full_like(keys, table, dtype=torch.int32), rows, None)
    metadata = store.read_metadata(handles)
    values = zip(metadata.last_used.tolist(), metadata.frequency.tolist(), map(tuple, bits(rows).tolist()))
    return dict(zip(keys.tolist(), values))


def assert_same(device: Any, host: EmbeddingStore) -> None:
    for t in range(len(host.tables)):
        assert device.size(t) == host.size(t)
        assert contents(device, t) == contents(host, t)


def some_pairs(generator: torch.Generator, size: int, num_tables: int, spread: int) -> tuple[Tensor, Tensor]:
    keys = torch.randint(-spread, spread, (size,), generator=generator)
    keys[: len(EXTREMES)] = torch.tensor(EXTREMES)[: len(keys)]
    keys = keys[torch.randperm(size, generator=generator)]
    return keys, torch.randint(0, num_tables, (size,), generator=generator).int()


PROGRAM = ((spec("a"), spec("b", seed=9, default=init.Zeros()), spec("c")), {"dim": 5, "optimizer": Adagrad(lr=0.1)})
"""Tables and settings of `random_program`."""


def random_program(device: Any, host: EmbeddingStore) -> None:
    """Calls of all kinds on three tables; the index and the rows grow in between."""
    generator = torch.Generator().manual_seed(5)
    for step in range(7):
        keys, tables = some_pairs(generator, (0, 1, 130, 300)[step % 4], 3, 60 * (step + 1))
        counts = None if step % 2 else torch.randint(0, 5, keys.shape, generator=generator)
        embeddings = torch.full((keys.numel(), 5), float("nan"))
        ours = device.retrieve(keys, tables, counts, step - 1, embeddings)
        theirs = host.retrieve(keys, tables, counts, step - 1)
        assert torch.equal(ours.handles, theirs.handles)
        assert torch.equal(ours.status, theirs.status)
        assert torch.equal(embeddings, host.read_embeddings(theirs.handles, keys, tables))
        rows = torch.randn(keys.numel(), host.row_floats, generator=generator)
        _, last = np.unique(ours.handles.numpy(), return_index=True)
        for store in (device, host):
            store.write_back(ours.handles[last], rows[last])
        gone, of_tables = some_pairs(generator, 70, 3, 60 * (step + 1))
        assert torch.equal(device.erase_keys(gone, of_tables), host.erase_keys(gone, of_tables))
        assert torch.equal(device.find_handles(gone, of_tables), host.find_handles(gone, of_tables))
    assert_same(device, host)
    assert len(device) == len(host)
    assert device.last_batch == host.last_batch
    keys, status = device.find(torch.tensor(EXTREMES), "b")
    expected = host.find(torch.tensor(EXTREMES), "b")
    assert torch.equal(keys, expected[0]) and torch.equal(status, expected[1])
    for store in (device, host):
        store.clear("b")
    assert_same(device, host)
    assert device.counters("b")["inserted"] == 0
    device.clear()
    assert len(device) == 0 and not contents(device)
    assert device.find_or_insert(torch.tensor([7, 7]), "a")[1].tolist() == [INSERTED, FOUND]


RULES = [policy.LRU(slack=0.25), policy.LFU(slack=0.1), policy.TTL(2, slack=0.1)]


def full_tables(rule: Any) -> tuple[TableSpec, TableSpec]:
    return spec("a", capacity=70, eviction=rule), spec("b", capacity=30)


def evictions(rule: Any, device: Any, host: EmbeddingStore) -> None:
    """The full table refuses what the rule leaves no room for; a second table is never touched. Where the device's
    store can take retrievals back, some are taken back and repeated, and handles are alike, too."""
    model = TableModel("a", 70, eviction=rule)
    generator = torch.Generator().manual_seed(2)
    for step in range(7):
        keys = torch.randint(-70 - 15 * step, 15, (0 if step == 5 else 60,), generator=generator)
        batch, of_a = (step if step < 5 else step + 3), torch.zeros(keys.numel()).int()
        ours, theirs = device.retrieve(keys, of_a, None, batch), host.retrieve(keys, of_a, None, batch)
        expected, gone = model.retrieve(keys.tolist(), None, batch)
        assert ours.status.tolist() == theirs.status.tolist() == expected
        if ours.journal is not None:
            assert torch.equal(ours.handles, theirs.handles)
            assert device.evicted(ours)[0].tolist() == gone
        if ours.journal is not None and step in (2, 3, 6):
            taken_back(device, host, ours, theirs)
            again, theirs = device.retrieve(keys, of_a, None, batch), host.retrieve(keys, of_a, None, batch)
            assert torch.equal(again.handles, theirs.handles) and torch.equal(again.status, ours.status)
        ours, theirs = (s.retrieve(keys[:8] + step, of_a[:8] + 1, None, batch) for s in (device, host))
        assert torch.equal(ours.status, theirs.status)
        assert_same(device, host)
        assert device.export_table("a")[0].sort().values.tolist() == sorted(model.rows)
        for name, counted in device.counters("a").items():
            assert counted == host.counters("a")[name] == model.counters[name]
    assert device.counters("a")["evicted"] + device.counters("a")["expired"] > 0
    assert device.counters("b")["refused"] > 0


def taken_back(device: Any, host: EmbeddingStore, ours: Any, theirs: Any) -> None:
    for store, retrieval in ((device, ours), (host, theirs)):
        store.undo(retrieval)
    assert_same(device, host)
    assert device.last_batch == host.last_batch
    assert device.counters("a") == {name: host.counters("a")[name] for name in device.counters("a")}
