"""Admission and eviction in a store: the answers of the dictionary model, on any number of threads, and undo."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import EXTREMES, StateOf, item_store, keys_of, table_zero

from nestpipe_kernels._native import core
from nestpipe_kernels.policy import LFU, LRU, TTL, CountingFilter, MinFrequency, Probability, Score
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.testing.policy_model import TableModel
from nestpipe_kernels.types import TableSpec


def by_modulus(keys, last_used, frequency, batch):
    """A score with many ties, and infinities."""
    scores = (keys % 5).to(torch.float32) + 0.0 * batch
    return torch.where(keys % 7 == 0, float("inf"), scores)


ADMISSIONS = [
    None,
    MinFrequency(1),
    MinFrequency(3),
    MinFrequency(3, CountingFilter(4096)),
    MinFrequency(255, CountingFilter(5000)),
    Probability(0.5),
    Probability(0.25, seed=-3),
    Probability(0.0),
    Probability(1.0),
]
EVICTIONS = [
    None, LRU(), LRU(0.0), LRU(0.5), LFU(0.1), LFU(0.0), TTL(1), TTL(3, 0.2), TTL(40), Score(by_modulus, 0.2)
]  # fmt: skip

some_key = st.one_of(st.integers(0, 30), st.sampled_from(EXTREMES))
some_retrieval = st.tuples(
    st.just("retrieve"),
    st.lists(st.tuples(some_key, st.integers(0, 1), st.integers(1, 4)), max_size=25),
    st.sampled_from([0, 1, 1, 1, 2, 5]),
)
some_step = st.one_of(some_retrieval, st.tuples(st.just("undo"), st.none(), st.none()))


class Pair:
    """A store of two tables beside their models."""

    def __init__(self, specs):
        self.store = EmbeddingStore(specs, dim=2, optimizer=StateOf())
        self.models = [TableModel(s.name, s.capacity, s.admission, s.eviction) for s in specs]
        self.done = []
        self.batch = 0

    def retrieve(self, occurrences, batch):
        keys = torch.tensor([key for key, _, _ in occurrences], dtype=torch.int64)
        tables = torch.tensor([table for _, table, _ in occurrences], dtype=torch.int32)
        counts = torch.tensor([count for _, _, count in occurrences], dtype=torch.int64)
        retrieval = self.store.retrieve(keys, tables, counts, batch)
        evicted = list(zip(*(column.tolist() for column in self.store.evicted(retrieval))))
        expected = []
        for t, model in enumerate(self.models):
            mine = [(key, count) for key, table, count in occurrences if table == t]
            status, gone = model.retrieve([key for key, _ in mine], [count for _, count in mine], batch)
            assert retrieval.status[tables == t].tolist() == status
            expected += [(key, t) for key in gone]
        assert evicted == expected
        assert ((retrieval.handles >= 0) == (retrieval.status < 2)).all()
        self.done.append((retrieval, self.batch))
        self.batch = batch

    def undo(self):
        retrieval, self.batch = self.done.pop()
        self.store.undo(retrieval)
        for model in self.models:
            model.undo()

    def check(self):
        for t, model in enumerate(self.models):
            keys, handles = self.store.export_table(t)
            metadata = self.store.read_metadata(handles)
            rows = zip(keys.tolist(), metadata.last_used.tolist(), metadata.frequency.tolist())
            assert {key: (used, frequency) for key, used, frequency in rows} == model.rows
            assert torch.equal(self.store.find_handles(keys, torch.full((len(keys),), t, dtype=torch.int32)), handles)
            assert self.store.size(t) == len(model.rows)
            assert self.store.counters(t) == model.counters
            state = self.store.admission_state(t)
            if model.filter is None:
                assert dict(zip(state["keys"].tolist(), state["counts"].tolist())) == model.ghosts
            else:
                blocks = {block: cells for block, cells in model.filter.blocks.items() if any(cells)}
                assert dict(zip(state["blocks"].tolist(), state["cells"].tolist())) == blocks
        assert self.store.last_batch == max(model.largest_batch for model in self.models)


@given(
    st.sampled_from(ADMISSIONS),
    st.sampled_from(EVICTIONS),
    st.integers(0, 12),
    st.lists(some_step, min_size=1, max_size=14),
    st.sampled_from([1, 2, 4]),
)
@settings(max_examples=250, deadline=None)
def test_a_store_does_what_the_model_does(admission, eviction, capacity, steps, threads):
    core().set_num_threads(threads)
    specs = [
        TableSpec("a", -1, None, 0, capacity, admission=admission, eviction=eviction),
        TableSpec("b", -1, None, 0, 9, admission=MinFrequency(2), eviction=LRU()),
    ]
    pair = Pair(specs)
    for what, occurrences, ahead in steps:
        if what == "retrieve":
            # Now and then without a batch: no metadata, no eviction.
            pair.retrieve(occurrences, -1 if ahead == 0 and len(occurrences) % 2 else max(pair.batch, 0) + ahead)
            pair.done = pair.done[-1:] if ahead > 1 else pair.done[-2:]
        elif pair.done:
            pair.undo()
        pair.check()


def copy_of(store, specs, order):
    """The same keys in another order, with rows, metadata and counts: as after loading a checkpoint."""
    other = EmbeddingStore(specs, dim=2, optimizer=StateOf())
    for t in range(len(specs)):
        keys, handles = store.export_table(t)
        shuffled = torch.randperm(keys.numel(), generator=torch.Generator().manual_seed(order))
        keys, handles = keys[shuffled], handles[shuffled]
        tables = torch.full((keys.numel(),), t, dtype=torch.int32)
        rows = torch.empty(keys.numel(), store.row_floats)
        store.gather(handles, keys, tables, rows, None)
        other.load_rows(keys, tables, rows, store.read_metadata(handles))
        other.load_admission_state(t, store.admission_state(t))
        other.load_counters(t, store.counters(t))
    return other


@given(
    st.sampled_from(ADMISSIONS),
    st.sampled_from(EVICTIONS),
    st.lists(some_retrieval, min_size=4, max_size=10),
    st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_a_store_that_was_loaded_decides_as_the_one_that_was_saved(admission, eviction, steps, order):
    specs = [TableSpec("a", -1, None, 0, 7, admission=admission, eviction=eviction), TableSpec("b", -1, None, 0, 9)]
    store, batch = EmbeddingStore(specs, dim=2, optimizer=StateOf()), 0
    stores = [store]
    for number, (_, occurrences, ahead) in enumerate(steps):
        if number == len(steps) // 2:
            stores.append(copy_of(store, specs, order))
        batch += ahead
        keys = torch.tensor([key for key, _, _ in occurrences], dtype=torch.int64)
        tables = torch.tensor([table for _, table, _ in occurrences], dtype=torch.int32)
        retrievals = [one.retrieve(keys, tables, None, batch) for one in stores]
        seen = []
        for one, retrieval in zip(stores, retrievals):
            gone = one.evicted(retrieval)
            found = [sorted(one.keys(t).tolist()) for t in (0, 1)]
            counts = {name: value.tolist() for name, value in one.admission_state(0).items()}
            seen.append((retrieval.status.tolist(), gone[0].tolist(), found, counts, one.counters(0)))
        assert seen[0] == seen[-1]


@pytest.mark.parametrize("admission", [None, MinFrequency(3)])
def test_occurrences_stop_at_the_largest_integer(admission):
    """Wrapped around, the most frequent row would be the first to go, and the most frequent key would never get one."""
    store = item_store(capacity=2, eviction=LFU(0.0), admission=admission)
    keys, largest = keys_of(7, 7, 8), 2**63 - 1
    for batch, counts in enumerate([(largest, largest, 5), (1, largest, 1)]):
        store.retrieve(keys, table_zero(keys), torch.tensor(counts), batch)
    assert store.metadata(keys_of(7, 8)).frequency.tolist() == [largest, 6]
    store.retrieve(keys_of(9), table_zero(keys_of(9)), torch.tensor([9]), 4)
    assert sorted(store.keys().tolist()) == [7, 9]


def test_counts_and_batches_out_of_range_are_refused():
    store, keys = item_store(capacity=2, eviction=LFU()), keys_of(1, 2)
    with pytest.raises(ValueError, match=r"retrieve: counts must be >= 0, got -3 at position 1"):
        store.retrieve(keys, table_zero(keys), torch.tensor([1, -3]), 0)
    for batch in (-2, 2**62 + 1, 2**64):
        with pytest.raises(ValueError, match=rf"retrieve: batch must be an index in \[0, 2\^62\], or .* got {batch}"):
            store.find_or_insert(keys, batch=batch)
    for kind in (1.0, True, "1"):
        with pytest.raises(TypeError, match=rf"retrieve: batch must be an integer, got {kind!r}"):
            store.find_or_insert(keys, batch=kind)
    assert len(store) == 0
