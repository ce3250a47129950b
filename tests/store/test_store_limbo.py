"""Rows on their way out of a store: limbo, undo to the bit, and a table at capacity for a long time."""

from __future__ import annotations

import pytest
import torch
from stores import StateOf, item_store, keys_of, table_zero, whole_rows

from nestpipe_kernels.policy import LRU, TTL, MinFrequency
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.store.embedding_store import RowMetadata
from nestpipe_kernels.types import KeyStatus, TableSpec

FOUND, INSERTED, _, REFUSED, NOT_ADMITTED = (int(status) for status in KeyStatus)


def retrieve(store, keys, batch):
    return store.retrieve(keys, table_zero(keys), None, batch)


def evicted(store, retrieval):
    return store.evicted(retrieval)[0].tolist()


def write(store, keys, value):
    handles = store.find_handles(keys, table_zero(keys))
    store.write_back(handles, torch.full((keys.numel(), store.row_floats), value))


def everything(store, num_keys=64):
    keys = torch.arange(num_keys)
    handles = store.find_handles(keys, table_zero(keys))
    metadata = store.read_metadata(handles)
    return [
        handles.tolist(),
        whole_rows(store, keys).tolist(),
        metadata.last_used.tolist(),
        metadata.frequency.tolist(),
        store.counters(),
        {name: counts.tolist() for name, counts in store.admission_state().items()},
        store.last_batch,
        len(store),
    ]


def test_undo_puts_evicted_rows_back_with_handles_rows_and_metadata():
    store = item_store(capacity=8, eviction=LRU(0.25), admission=MinFrequency(2))
    retrieve(store, torch.arange(10).repeat(2), 0)
    for key in range(8):
        write(store, keys_of(key), float(key))
    retrieve(store, keys_of(5, 6, 40, 41, 41, 8), 1)
    before = everything(store)
    second = retrieve(store, keys_of(40, 50, 50, 51, 51, 52, 1), 3)
    assert evicted(store, second) == [0, 2, 3, 4, 7]
    third = retrieve(store, keys_of(53, 53, 52, 54, 54), 4)
    assert third.status.tolist() == [INSERTED, FOUND, INSERTED, INSERTED, FOUND]
    store.undo(third)
    store.undo(second)
    assert everything(store) == before
    # Repeating it gives the same rows.
    again = retrieve(store, keys_of(40, 50, 50, 51, 51, 52, 1), 3)
    assert again.handles.tolist() == second.handles.tolist()
    assert again.status.tolist() == second.status.tolist()


def test_fault_32_rows_of_the_batch_and_the_one_before_are_never_victims():
    store = item_store(capacity=4, eviction=LRU(0.0))
    retrieve(store, keys_of(0, 1, 2, 3), 0)
    retrieve(store, keys_of(0, 1), 1)
    retrieval = retrieve(store, keys_of(2, 7, 8, 9), 2)
    assert evicted(store, retrieval) == [3]
    # 0 and 1 are in flight, 2 is of this batch: one room for three keys, the first gets it.
    assert retrieval.status.tolist() == [FOUND, INSERTED, REFUSED, REFUSED]
    assert sorted(store.keys().tolist()) == [0, 1, 2, 7]
    assert store.counters() == {"inserted": 5, "evicted": 1, "expired": 0, "refused": 2, "not_admitted": 0}


def test_fault_32_rows_in_flight_are_not_touched_when_their_neighbours_go():
    store = item_store(capacity=4, eviction=LRU(0.0))
    first = retrieve(store, keys_of(0, 1, 2, 3), 0)
    second = retrieve(store, keys_of(0, 1), 1)
    retrieve(store, keys_of(10, 11), 2)
    write(store, keys_of(10, 11), 5.0)
    # Batch 1 writes back after retrieval of batch 2, by handle.
    store.write_back(second.handles, torch.full((2, store.row_floats), 7.0))
    assert whole_rows(store, keys_of(0, 1))[:, 0].tolist() == [7.0, 7.0]
    assert whole_rows(store, keys_of(10, 11))[:, 0].tolist() == [5.0, 5.0]
    assert store.find_handles(keys_of(2, 3), table_zero(keys_of(2, 3))).tolist() == [-1, -1]
    assert set(first.handles[2:].tolist()).isdisjoint(store.export_table()[1].tolist())


def test_fault_33_a_key_that_returns_starts_from_its_initial_row():
    store = item_store(capacity=2, eviction=LRU(0.0))
    fresh = whole_rows(store, keys_of(1, 2)).clone()
    retrieve(store, keys_of(1, 2), 0)
    assert torch.equal(whole_rows(store, keys_of(1, 2)), fresh)
    write(store, keys_of(1, 2), 3.0)
    retrieve(store, keys_of(3, 4), 2)
    write(store, keys_of(3, 4), 4.0)
    for batch in (4, 6, 8):
        retrieval = retrieve(store, keys_of(*((1, 2) if batch % 4 == 0 else (3, 4))), batch)
        assert retrieval.status.tolist() == [INSERTED, INSERTED]
        assert store.metadata(keys_of(1, 2, 3, 4)).frequency.sum() == 2
    assert torch.equal(whole_rows(store, keys_of(1, 2)), fresh)


def test_undo_out_of_order_or_too_late_is_refused():
    store = item_store(capacity=2, eviction=LRU(0.0))
    first = retrieve(store, keys_of(1, 2), 0)
    second = retrieve(store, keys_of(3), 2)
    with pytest.raises(ValueError, match="undo: this is not the newest retrieval of the store: undo newer ones first"):
        store.undo(first)
    third = retrieve(store, keys_of(4), 4)
    store.undo(third)
    with pytest.raises(ValueError, match="undo: rows that this retrieval evicted are free since"):
        store.undo(second)
    with pytest.raises(ValueError, match="evicted: rows that this retrieval evicted are free, their keys forgotten"):
        store.evicted(second)
    with pytest.raises(ValueError, match="undo: this retrieval has been undone already"):
        store.undo(third)
    assert evicted(store, third) == []
    fourth = retrieve(store, keys_of(5), 6)
    assert evicted(store, fourth) == [1]
    store.erase(keys_of(77))
    with pytest.raises(ValueError, match="undo: keys were erased since this retrieval"):
        store.undo(fourth)


def test_limbo_lasts_until_the_batch_after_the_next():
    store = item_store(capacity=4, eviction=LRU(0.0))
    retrieve(store, keys_of(0, 1, 2, 3), 0)
    retrieve(store, keys_of(2, 3, 3), 0)
    two = retrieve(store, keys_of(10, 11), 2)
    three = retrieve(store, keys_of(12), 3)
    assert (evicted(store, two), evicted(store, three)) == ([0, 1], [2])
    highest = int(torch.cat([two.handles, three.handles]).max())
    assert highest == 6  # nothing was used again
    four = retrieve(store, keys_of(13), 4)
    assert evicted(store, four) == [3]
    assert four.handles.tolist()[0] < 4
    assert evicted(store, three) == [2]


def test_a_table_at_capacity_stays_as_large_as_it_is():
    store = item_store(capacity=500, eviction=LRU(), admission=MinFrequency(2))
    generator = torch.Generator().manual_seed(1)
    seen = []
    for batch in range(10_000):
        # Hot keys, and others that never come again.
        keys = torch.cat([torch.randint(0, 600, (24,), generator=generator), 1000 + 3 * batch + torch.arange(3)])
        keys = torch.cat([keys, keys[-2:]])
        retrieve(store, keys, batch)
        assert len(store) <= 500
        if batch >= 1000 and batch % 1000 == 0:
            memory = store.memory()
            seen.append((memory["slabs"], memory["metadata"]))
    assert len(set(seen)) == 1
    counters = store.counters()
    assert counters["evicted"] > 10_000
    assert counters["inserted"] - counters["evicted"] == len(store)


def test_memory_of_a_process_stays_flat_at_capacity():
    resident = []
    store = item_store(dim=16, capacity=2000, eviction=LRU(0.1))
    for batch in range(10_000):
        retrieve(store, torch.arange(batch * 50, batch * 50 + 100), batch)
        if batch in (2000, 9999):
            resident.append((store.memory(), _resident_bytes()))
    warm, last = resident[0][0], resident[1][0]
    # A shard of the index keeps the length of its fullest moment: extremes still come up, ever more rarely.
    assert last["index"] <= 1.25 * warm["index"]
    # How many rows there are at the moment, and what of the slabs is not theirs, goes up and down.
    flat = ("slabs", "metadata", "admission", "file", "untouched")
    assert [last[name] for name in flat] == [warm[name] for name in flat]
    assert max(last["keys"], warm["keys"]) <= 2000 * 12
    # 500,000 keys came by; a row is 144 bytes, so keeping what they leave behind would show.
    assert resident[1][1] - resident[0][1] < 8 << 20


def _resident_bytes():
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def test_rows_expire_without_a_capacity():
    store = item_store(eviction=TTL(32))
    retrieve(store, torch.arange(10), 0)
    retrieve(store, keys_of(3), 16)
    assert evicted(store, retrieve(store, keys_of(20), 33)) == []  # looked for at even batches only
    retrieval = retrieve(store, keys_of(4), 34)
    assert evicted(store, retrieval) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert retrieval.status.tolist() == [FOUND]
    assert store.counters() == {"inserted": 11, "evicted": 0, "expired": 8, "refused": 0, "not_admitted": 0}


def test_erasing_and_clearing_drop_limbo():
    store = item_store(capacity=4, eviction=LRU(0.0))
    retrieve(store, keys_of(0, 1, 2, 3), 0)
    retrieve(store, keys_of(4, 5), 2)
    store.erase(keys_of(4))
    handles = retrieve(store, keys_of(6), 3).handles
    assert int(handles.max()) < 6
    store.clear()
    assert (len(store), store.counters()["inserted"], store.last_batch) == (0, 0, -1)
    assert retrieve(store, torch.arange(6), 0).status.tolist() == [INSERTED] * 4 + [REFUSED] * 2


def test_a_small_table_beside_a_large_one_evicts_its_own_rows():
    small = TableSpec("small", -1, None, 0, 20, eviction=LRU(0.1))
    store = EmbeddingStore([TableSpec("large", -1, None, 0), small], dim=2, optimizer=StateOf())
    keys = torch.arange(20_000)
    store.retrieve(keys, table_zero(keys), None, 0)
    for batch in range(0, 60, 2):
        keys = torch.arange(batch * 5, batch * 5 + 10)
        retrieval = store.retrieve(keys, torch.ones(10, dtype=torch.int32), None, batch)
        gone, tables = store.evicted(retrieval)
        assert (tables == 1).all()
        assert gone.numel() == 0 or int(gone.max()) < batch * 5
        assert store.size("small") <= 20
    assert store.size("large") == 20_000


def test_a_large_table_evicts_exactly_the_rows_unused_for_longest():
    # Large enough that the choice starts from a sample.
    store = item_store(dim=1, capacity=40_000, eviction=LRU(0.25))
    order = torch.randperm(40_000, generator=torch.Generator().manual_seed(0))
    for batch in range(40):
        retrieve(store, order[batch * 1000 : (batch + 1) * 1000], batch)
    retrieval = retrieve(store, keys_of(-1), 60)
    gone = set(evicted(store, retrieval))
    assert len(gone) == 10_001
    assert gone >= set(order[:10_000].tolist())
    assert gone <= set(order[:11_000].tolist())


def test_not_admitted_keys_have_no_handle_and_read_the_default_row():
    store = item_store(admission=MinFrequency(3))
    assert retrieve(store, keys_of(1, 1, 2), 0).status.tolist() == [NOT_ADMITTED] * 3
    retrieval = retrieve(store, keys_of(1, 2), 1)
    assert retrieval.status.tolist() == [INSERTED, NOT_ADMITTED]
    assert (retrieval.handles >= 0).tolist() == [True, False]
    assert store.metadata(keys_of(1, 2)).frequency.tolist() == [3, 0]
    assert store.admission_state()["counts"].tolist() == [2]


def test_a_row_that_came_back_may_go_again_as_soon_as_before():
    """Its age must be that of its last use: a younger one would hide it from the next choice."""
    store = item_store(capacity=2, eviction=LRU(0.0))
    retrieve(store, keys_of(1, 2), 0)
    second = retrieve(store, keys_of(3, 4), 2)
    assert evicted(store, second) == [1, 2]
    store.undo(second)
    again = retrieve(store, keys_of(5, 6), 2)
    assert again.status.tolist() == [INSERTED, INSERTED]
    store.undo(again)
    # The same where all rows of that age are chosen at once.
    assert retrieve(store, keys_of(7, 8), 2).status.tolist() == [INSERTED, INSERTED]


def test_metadata_written_by_an_old_handle_brings_no_row_back():
    store = item_store(capacity=1, eviction=LRU(0.0))
    handle = retrieve(store, keys_of(1), 0).handles
    retrieve(store, keys_of(2), 2)
    store.write_metadata(handle, RowMetadata(keys_of(1), keys_of(9)))
    assert store.keys().tolist() == [2]
    assert retrieve(store, keys_of(3), 4).status.tolist() == [INSERTED]
    assert store.keys().tolist() == [3]
    assert store.counters()["evicted"] == 2


def test_written_metadata_moves_the_index_of_the_next_batch():
    store = item_store(eviction=TTL(5))
    handle = retrieve(store, keys_of(1), 0).handles
    store.write_metadata(handle, RowMetadata(keys_of(40), keys_of(1)))
    assert store.last_batch == 40
    store.find_or_insert(keys_of(2))
    assert store.metadata(keys_of(2)).last_used.tolist() == [41]
