"""Which keys a store holds: extreme keys, repetitions, capacity, undo, growth, memory, threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import EXTREMES, StateOf, item_store, keys_of, table_zero, whole_rows

from nestpipe_kernels._native import core
from nestpipe_kernels.errors import StoreFullError
from nestpipe_kernels.init import Zeros
from nestpipe_kernels.optim import RowWiseAdagrad
from nestpipe_kernels.policy import LRU
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import KeyStatus, TableSpec

FOUND, INSERTED, ABSENT, REFUSED = (int(status) for status in list(KeyStatus)[:4])


def test_fault_11_extreme_keys_are_ordinary():
    store = item_store()
    keys = keys_of(*EXTREMES)
    assert store.find(keys)[1].tolist() == [ABSENT] * len(EXTREMES)
    assert store.find_or_insert(keys)[1].tolist() == [INSERTED] * len(EXTREMES)
    assert store.find(keys)[1].tolist() == [FOUND] * len(EXTREMES)
    assert store.keys().tolist() == EXTREMES
    assert store.erase(keys_of(0, -1))[:].tolist() == [FOUND, FOUND]
    assert store.find(keys)[1].tolist() == [ABSENT, ABSENT] + [FOUND] * (len(EXTREMES) - 2)


@given(st.integers(-(2**62), 2**62), st.integers(0, 62))
@settings(max_examples=50, deadline=None)
def test_fault_12_keys_that_differ_in_one_bit_have_rows_of_their_own(key, bit):
    store = item_store()
    rows, status = store.find_or_insert(keys_of(key, key ^ (1 << bit)))
    assert status.tolist() == [INSERTED, INSERTED]
    assert not torch.equal(rows[0], rows[1])


def test_fault_12_large_keys_keep_their_digits():
    store = item_store()
    store.find_or_insert(keys_of(6221888200042590280))
    assert store.find(keys_of(6221888200042590281))[1].tolist() == [ABSENT]
    with pytest.raises(TypeError, match=r"find_or_insert: keys must be int64, got float64 \(shape \[1\]\)"):
        store.find_or_insert(torch.tensor([6221888200042590280.0], dtype=torch.float64))


def test_calls_without_keys_on_several_tables():
    specs = [TableSpec(name, 4, Zeros(), 0) for name in "ab"]
    store = EmbeddingStore(specs, dim=2, optimizer=StateOf())
    for table in ("b", "a", "b"):
        assert store.find_or_insert(keys_of(), table)[0].shape == (0, 2)
    assert store.find_or_insert(keys_of(3), "a")[1].tolist() == [INSERTED]
    assert store.find(keys_of(3), "b")[1].tolist() == [ABSENT]


def test_repetitions_insert_once_and_count_each():
    store = item_store()
    rows, status = store.find_or_insert(keys_of(7, 7, 8, 7), batch=3)
    assert status.tolist() == [INSERTED, FOUND, INSERTED, FOUND]
    assert torch.equal(rows[0], rows[3])
    assert len(store) == 2
    assert store.metadata(keys_of(7, 8, 9)).frequency.tolist() == [3, 1, 0]
    assert store.metadata(keys_of(7, 8, 9)).last_used.tolist() == [3, 3, -1]


def test_rows_go_where_the_caller_says():
    store = item_store()
    expected, _ = store.find_or_insert(keys_of(3, 4, 3))
    out = torch.zeros(3, store.dim)
    rows, status = store.find_or_insert(keys_of(4, 9, 3), out=out)
    assert rows is out and status.tolist() == [FOUND, INSERTED, FOUND]
    assert torch.equal(out[0], expected[1]) and torch.equal(out[2], expected[0])
    assert torch.equal(out, store.find(keys_of(4, 9, 3))[0])
    wrong = rf"find_or_insert: out must be a contiguous CPU tensor of float32 \[2, {store.dim}\], got float32 \[3,"
    with pytest.raises(ValueError, match=wrong):
        store.find_or_insert(keys_of(10, 11), out=out)
    assert len(store) == 3


@pytest.mark.parametrize("threads", [1, 3])
def test_large_calls_are_as_many_small_ones(threads):
    """Old, new, repeated and refused keys, in a result that is larger than the caches: written past them."""
    generator = torch.Generator().manual_seed(threads)
    keys = torch.randint(-120_000, 120_000, (150_000,), generator=generator) * 7919
    whole, parts = (item_store(64, capacity=80_000, eviction=LRU(slack=0.0)) for _ in range(2))
    before = core().num_threads()
    core().set_num_threads(threads)
    try:
        for call, offset in enumerate((0, 30_011 * 7919)):
            counted = keys + offset
            rows, status = whole.find_or_insert(counted, batch=5 * call)
            assert {FOUND, INSERTED, REFUSED} == set(status.tolist())
            expected = whole.find(counted)[0]
            assert torch.equal(rows.view(torch.int32), expected.view(torch.int32))
            held = whole.keys()
            assert len(held) == 80_000 == len(held.unique())
            assert torch.equal(whole.find_handles(held, table_zero(held)), whole.export_table()[1])
        small = torch.cat([parts.find_or_insert(part, batch=0)[1] for part in keys.split(700)])
        rows, status = item_store(64, capacity=80_000, eviction=LRU(slack=0.0)).find_or_insert(keys, batch=0)
        assert torch.equal(small, status)
        assert torch.equal(parts.find(keys)[0], rows)
    finally:
        core().set_num_threads(before)


def test_fault_15_reading_inserts_nothing():
    store = item_store()
    before = store.memory()
    rows, _ = store.find(keys_of(1, 2))
    assert len(store) == 0
    assert store.memory() == before
    inserted, _ = store.find_or_insert(keys_of(1, 2))
    assert torch.equal(rows, inserted)


def test_fault_30_capacity_refuses_only_what_does_not_fit():
    spec = TableSpec("small", -1, None, 0, capacity=3)
    store = EmbeddingStore([spec, TableSpec("large", -1, None, 0)], dim=2, optimizer=StateOf())
    keys, tables = keys_of(1, 2, 1, 3, 4, 4, 5), torch.tensor([0, 0, 0, 0, 0, 0, 1], dtype=torch.int32)
    retrieval = store.retrieve(keys, tables, None, 0)
    assert retrieval.status.tolist() == [INSERTED, INSERTED, FOUND, INSERTED, REFUSED, REFUSED, INSERTED]
    assert (retrieval.handles < 0).tolist() == [False] * 4 + [True, True, False]
    assert store.size("small") == 3
    # A refused key reads its initial row, and asking again finds no more room.
    assert torch.isfinite(store.read_embeddings(retrieval.handles, keys, tables)).all()
    assert store.retrieve(keys, tables, None, 1).status.tolist() == [0, 0, 0, 0, REFUSED, REFUSED, 0]
    store.erase(keys_of(2), table="small")
    assert store.retrieve(keys_of(4), table_zero(keys_of(4)), None, 1).status.tolist() == [INSERTED]


def test_fault_31_a_full_table_raises_and_changes_nothing():
    store = item_store(capacity=2)
    store.find_or_insert(keys_of(1))
    with pytest.raises(
        StoreFullError, match=r"table 'item' is full: 2 of 4 keys found no room beside its 1 rows \(capac"
    ):
        store.find_or_insert(keys_of(1, 2, 3, 4))
    assert store.keys().tolist() == [1]
    assert store.metadata(keys_of(1)).frequency.tolist() == [1]


def test_fault_30_capacity_zero():
    store = item_store(capacity=0)
    with pytest.raises(StoreFullError, match="1 of 1 keys found no room beside its 0 rows"):
        store.find_or_insert(keys_of(1))
    assert store.find(keys_of(1))[1].tolist() == [ABSENT]


def test_too_little_memory_is_reported_and_changes_nothing():
    store = item_store(memory_limit=200_000)
    store.find_or_insert(keys_of(1, 2))
    with pytest.raises(
        StoreFullError, match="no memory for the new ones of 50000 keys of table 'item', which has 2 rows"
    ):
        store.find_or_insert(torch.arange(50_000))
    assert store.keys().tolist() == [1, 2]
    assert store.find(torch.arange(4))[1].tolist() == [ABSENT, FOUND, FOUND, ABSENT]


@pytest.mark.parametrize("remove", [lambda store: store.erase(keys_of(0, 1)), lambda store: store.clear()])
def test_undo_after_keys_were_erased_is_refused(remove):
    store = item_store()
    keys = torch.arange(10)
    retrieval = store.retrieve(keys, table_zero(keys), None, 0)
    remove(store)
    store.find_or_insert(torch.arange(100, 110))
    size = len(store)
    with pytest.raises(ValueError, match="undo: keys were erased since this retrieval"):
        store.undo(retrieval)
    assert len(store) == size


def test_undo_and_repeat_give_the_same_handles():
    store = item_store()
    store.find_or_insert(torch.arange(100))
    store.erase(keys_of(3, 50, 7))
    keys = torch.arange(90, 200)
    first = store.retrieve(keys, table_zero(keys), None, 4)
    store.undo(first)
    assert len(store) == 97
    again = store.retrieve(keys, table_zero(keys), None, 4)
    assert torch.equal(first.handles, again.handles)
    assert torch.equal(first.status, again.status)
    store.undo(again)
    with pytest.raises(ValueError, match="undo: this retrieval has been undone already"):
        store.undo(again)


@pytest.mark.parametrize("capacity", [None, 1000])
def test_free_rows_are_used_again_in_the_order_in_which_they_lie(capacity):
    store = item_store(capacity=capacity)
    store.find_or_insert(torch.arange(100))
    store.erase(keys_of(70, 3, 50, 7))
    # Repeated keys take no row, whether found, new in a free row, or new in one that never was used.
    keys = keys_of(500, 8, 500, 501, 8, 502, 501, 503, 504, 504, 505, 500)
    retrieval = store.retrieve(keys, table_zero(keys), None, 4)
    assert retrieval.handles.tolist() == [3, 8, 3, 7, 8, 50, 7, 70, 100, 100, 101, 3]
    assert store.metadata(keys_of(500, 8, 504)).frequency.tolist() == [3, 3, 2]
    assert store.counters()["inserted"] == 106
    assert store.keys()[:8].tolist() == [0, 1, 2, 500, 4, 5, 6, 501]


@pytest.mark.parametrize("capacity", [None, 10**6])
def test_a_large_call_writes_the_rows_that_small_ones_do(capacity):
    size = 120_000  # past the caches: 36 MB of rows
    keys = torch.randperm(size) * 977
    stores = [EmbeddingStore(dim=64, optimizer=RowWiseAdagrad(0.1), name="item", capacity=capacity) for _ in range(2)]
    large, status = stores[0].find_or_insert(keys, batch=3)
    small = torch.cat([stores[1].find_or_insert(part, batch=3)[0] for part in keys.split(5000)])
    assert torch.equal(large, small) and int(status.sum()) == size
    again, status = stores[0].find_or_insert(keys, batch=4)
    assert torch.equal(again, large) and int(status.sum()) == 0
    few = keys[::97].contiguous()
    assert torch.equal(whole_rows(stores[0], few), whole_rows(stores[1], few))
    metadata = stores[0].metadata(keys)
    assert metadata.frequency.unique().tolist() == [2] and metadata.last_used.unique().tolist() == [4]
    stores[0].erase(keys[: size // 2])
    mixed = torch.cat([keys, keys[:1000]])
    assert torch.equal(stores[0].find_or_insert(mixed, batch=5)[0], torch.cat([large, large[:1000]]))


def test_buffer_rows_have_zeros_behind_the_updates():
    store = item_store(dim=5)
    keys = torch.arange(40)
    store.find_or_insert(keys)
    rows = whole_rows(store, keys)
    used = 5 + store.state_floats + 1
    assert rows.shape[1] > used and not rows[:, used:].view(torch.int32).any()
    columns = torch.full((40, rows.shape[1] - 3), 7.0)
    store.copy_columns(store.find_handles(keys, table_zero(keys)), [(12, columns)])
    assert torch.equal(columns, rows[:, 3:])
    metadata = store.metadata(keys)
    store.load_columns(torch.arange(40, 80), None, [(0, torch.ones_like(rows))], metadata)
    store.load_columns(keys, None, [(0, torch.ones_like(rows))], metadata)
    assert torch.equal(store.metadata(torch.arange(80)).frequency, torch.ones(80, dtype=torch.int64))
    assert store.find(torch.arange(80))[1].unique().tolist() == [FOUND]


def test_undo_of_a_call_with_repeated_keys_restores_what_was_before_it():
    store = item_store()
    keys = torch.tensor([4, 9])
    store.retrieve(keys, table_zero(keys), torch.tensor([3, 2]), 6)
    again = torch.tensor([9, 4, 9, 5, 9])
    store.undo(store.retrieve(again, table_zero(again), None, 8))
    after = store.metadata(keys)
    assert (after.last_used.tolist(), after.frequency.tolist()) == ([6, 6], [3, 2])
    assert len(store) == 2


def test_fault_33_a_key_inserted_again_starts_from_its_initial_row():
    store = item_store(dim=5)
    keys = keys_of(11, 12, 13)
    store.find_or_insert(keys)
    fresh = whole_rows(store, keys)
    handles = store.find_handles(keys, table_zero(keys))
    store.write_back(handles, torch.full((3, store.row_floats), 9.0))
    store.erase(keys)
    assert torch.equal(whole_rows(store, keys), fresh)
    store.find_or_insert(keys_of(12, 11, 13))
    assert torch.equal(whole_rows(store, keys), fresh)
    assert store.metadata(keys).frequency.tolist() == [1, 1, 1]


def test_fault_30_growth_in_calls_of_10_000():
    store = item_store(dim=2)
    keys = torch.randperm(300_000, generator=torch.Generator().manual_seed(0)) * 64 - 5_000_000
    for start in range(0, 300_000, 10_000):
        _, status = store.find_or_insert(keys[start : start + 10_000])
        assert int((status == INSERTED).sum()) == 10_000
    assert len(store) == 300_000
    handles = store.find_handles(keys, table_zero(keys))
    assert torch.equal(handles, torch.arange(300_000))
    assert int((store.find_handles(keys + 1, table_zero(keys)) >= 0).sum()) == 0
    # 64-byte buckets of 5 slots, at least half full after growing by 1.5 from 0.8: 12 bytes of entry in at most 25.
    assert store.memory()["index"] <= 300_000 * 26


def test_growth_is_spread_over_calls():
    """Shards grow in turn: the index is longer after every call, and never by much (by 9 % with equal lengths)."""
    store = item_store(dim=1)
    keys = torch.randperm(700_000, generator=torch.Generator().manual_seed(0))
    store.find_or_insert(keys[:300_000])
    size, grown = store.memory()["index"], []
    for part in keys[300_000:].split(5000):
        store.find_or_insert(part)
        size, before = store.memory()["index"], size
        grown.append(size / before - 1)
    assert max(grown) < 0.04
    assert min(grown) > 0


def test_fault_24_memory_is_flat_over_1000_calls_on_the_same_keys():
    store = item_store()
    keys = torch.arange(10)
    store.find_or_insert(keys)
    before = store.memory()
    for step in range(1000):
        store.find_or_insert(keys, batch=step)
    assert store.memory() == before


def test_erasing_and_inserting_new_keys_reuses_memory():
    store = item_store()
    store.find_or_insert(torch.arange(1000))
    before = store.memory()
    for step in range(1, 100):
        store.erase(torch.arange(1000) + 1000 * (step - 1))
        store.find_or_insert(torch.arange(1000) + 1000 * step)
    after = store.memory()
    assert (after["slabs"], after["metadata"]) == (before["slabs"], before["metadata"])
    assert after["index"] < 3 * before["index"]


def test_handles_and_values_do_not_depend_on_threads():
    results = []
    for threads in (1, 2, 4):
        core().set_num_threads(threads)
        store = item_store(dim=3)
        generator = torch.Generator().manual_seed(1)
        for step in range(5):
            keys = torch.randint(-30_000, 30_000, (20_000,), generator=generator)
            store.retrieve(keys, table_zero(keys), None, step)
            store.erase(keys[::7])
        keys, handles = store.export_table()
        results.append((keys, handles, whole_rows(store, keys), store.metadata(keys).frequency))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other))


def test_handles_stay_valid_while_the_store_grows():
    store = item_store()
    keys = torch.arange(50)
    handles = store.retrieve(keys, table_zero(keys), None, 0).handles
    rows = torch.arange(50 * store.row_floats, dtype=torch.float32).reshape(50, store.row_floats)
    store.write_back(handles, rows)
    store.find_or_insert(torch.arange(1000, 60_000))
    out = torch.empty_like(rows)
    store.gather(handles, keys, table_zero(keys), out, None)
    used = 2 * store.dim + 1
    assert torch.equal(out[:, :used], rows[:, :used])
