"""Rows pooled and updated in a store equal pooling and updating copies of them; errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from row_cases import MAX, MEAN, NONE, SUM, bag_case, bits, native_threads

from nestpipe_kernels import optim, policy
from nestpipe_kernels.ops.lookup_pool import pool_backward, pool_forward
from nestpipe_kernels.ops.row_update import row_update
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import DataType, StoreKeys


def _store(dim: int, **settings: Any) -> EmbeddingStore:
    return EmbeddingStore(name="t", dim=dim, optimizer=optim.Adam(0.1), seed=1, **settings)


def _setup(modes: list[int], weighted: bool = False, dim: int = 70, **settings: Any) -> tuple[Any, ...]:
    """A store with some of the case's rows, out of order; their handles; the bags."""
    case = bag_case(3, modes, size=700, dim=dim, num_rows=60, weighted=weighted)
    store = _store(dim, **settings)
    keys = torch.randperm(60, generator=torch.Generator().manual_seed(0)) * 7
    tables = torch.zeros(60, dtype=torch.int32)
    kept = keys[keys % 5 != 0]
    store.retrieve(kept, torch.zeros(len(kept), dtype=torch.int32), None, 0)
    bags = StoreKeys(keys, tables, case.bag_offsets, tuple(case.segment_bags), tuple(case.segment_modes), case.weights)
    return case, store, store.find_handles(keys, tables), keys, tables, bags


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("modes", "weighted"), [([SUM, MEAN, NONE], False), ([SUM, NONE], True), ([MEAN], False), ([MAX, SUM], False)]
)
def test_pool_equals_pooling_copies(modes: list[int], weighted: bool, threads: int) -> None:
    case, store, handles, keys, tables, bags = _setup(modes, weighted)
    ours, truth = case.outs(), case.outs()
    with native_threads(threads):
        store.pool(handles, keys, tables, case.slots, bags, ours)
    rows = store.read_embeddings(handles, keys, tables)
    pool_forward(rows, *case.bags(), truth, case.weights, implementation="reference")
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, truth))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [3, 70, 200])
@pytest.mark.parametrize(("modes", "weighted"), [([SUM, MEAN, NONE], False), ([SUM, NONE], True), ([MEAN], False)])
def test_update_equals_updating_copies(modes: list[int], weighted: bool, dim: int, threads: int) -> None:
    case, store, handles, keys, tables, bags = _setup(modes, weighted, dim)
    rates = torch.linspace(0, 1, len(keys))
    mask = torch.arange(len(keys)) % 3 != 0
    rows = torch.empty(len(keys), store.row_floats)
    store.gather(handles, keys, tables, rows, None)
    sums = torch.zeros(len(keys), dim)
    pool_backward(case.grads, None, *case.bags(), case.weights, sums, implementation="reference")
    row_update(rows, sums, store.optimizer, 4, rates, mask & (handles >= 0), implementation="reference")
    with native_threads(threads):
        store.update_pooled(handles, case.slots, bags, case.grads, 4, rates, mask)
    after = torch.empty(len(keys), store.row_floats)
    store.gather(handles, keys, tables, after, None)
    assert torch.equal(bits(after[handles >= 0]), bits(rows[handles >= 0]))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("modes", "weighted"), [([SUM, MEAN, NONE], False), ([SUM, NONE], True), ([MAX, SUM], False)])
def test_pool_keys_equals_pooling_copies(modes: list[int], weighted: bool, threads: int) -> None:
    case, store, _, keys, tables, _ = _setup(modes, weighted)
    there = case.slots >= 0
    listed = torch.where(there, keys[case.slots], -5)
    store.retrieve(keys, tables, None, 0)
    bags = StoreKeys(
        listed, torch.zeros(len(listed), dtype=torch.int32), case.bag_offsets, tuple(case.segment_bags),
        tuple(case.segment_modes), case.weights, there,
    )  # fmt: skip
    ours, truth = case.outs(), case.outs()
    with native_threads(threads):
        assert store.pool_keys(bags, ours)
    rows = store.read_embeddings(store.find_handles(keys, tables), keys, tables)
    pool_forward(rows, *case.bags(), truth, case.weights, implementation="reference")
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, truth))
    assert not store.pool_keys(replace(bags, valid=None), ours)  # -5 has no row
    assert not _store(70, data_type=DataType.BF16).pool_keys(bags, ours)


def _facts(store: EmbeddingStore, keys: torch.Tensor) -> list[Any]:
    handles = store.find_handles(keys, torch.zeros(len(keys), dtype=torch.int32))
    metadata = store.read_metadata(handles)
    return [metadata.last_used.tolist(), metadata.frequency.tolist(), store.last_batch, store.size("t")]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_occurrences_are_retrieved_as_their_distinct_keys_are(padded: bool, threads: int) -> None:
    size, generator = 60_000, torch.Generator().manual_seed(threads)
    keys = (torch.rand(size, generator=generator) ** 4 * 3000).to(torch.int64) * 11
    tables = torch.zeros(size, dtype=torch.int32)
    valid = torch.rand(size, generator=generator) < 0.7 if padded else None
    used = keys if valid is None else keys[valid]
    distinct, counts = used.unique(return_counts=True)
    ours, truth = _store(4), _store(4)
    for store in (ours, truth):
        store.retrieve(keys.unique(), tables[: len(keys.unique())], None, 3)
    before = _facts(ours, keys.unique())
    truth.retrieve(distinct, tables[: len(distinct)], counts, 5)
    with native_threads(threads):
        found = ours.retrieve_occurrences(keys, tables, valid, 5)
    assert found is not None
    assert _facts(ours, keys.unique()) == _facts(truth, keys.unique())
    assert found.keys.sort().values.tolist() == distinct.tolist()
    assert torch.equal(found.retrieval.handles, ours.find_handles(found.keys, found.tables))
    at = found.slots.to(torch.int64)
    assert bool((at[~valid] == -1).all()) if valid is not None else bool((at >= 0).all())
    assert torch.equal(found.keys[at[at >= 0]], used)
    ours.undo(found.retrieval)
    assert _facts(ours, keys.unique()) == before
    with pytest.raises(ValueError, match="has been undone already"):
        ours.undo(found.retrieval)


def test_occurrences_of_new_keys_and_of_rows_that_may_leave_take_the_general_way() -> None:
    tables = torch.zeros(3, dtype=torch.int32)
    store = _store(4)
    store.retrieve(torch.tensor([1, 2]), tables[:2], None, 0)
    before = _facts(store, torch.tensor([1, 2]))
    assert store.retrieve_occurrences(torch.tensor([1, 1, 9]), tables, None, 1) is None
    assert _facts(store, torch.tensor([1, 2])) == before
    assert store.retrieve_occurrences(torch.tensor([1, 1, 9]), tables, torch.tensor([True, True, False]), 1)
    evicting = _store(4, capacity=8, eviction=policy.LRU())
    evicting.retrieve(torch.tensor([1]), tables[:1], None, 0)
    assert evicting.retrieve_occurrences(torch.tensor([1]), tables[:1], None, 1) is None


def test_frequencies_of_occurrences_stop_at_the_largest() -> None:
    store, tables = _store(4), torch.zeros(3, dtype=torch.int32)
    keys, largest = torch.tensor([7, 7, 7]), 2**63 - 1
    store.retrieve(keys[:1], tables[:1], torch.tensor([largest - 1]), 0)
    assert store.retrieve_occurrences(keys, tables, None, -1) is not None
    assert _facts(store, keys[:1])[:2] == [[0], [largest]]


def test_version_follows_keys() -> None:
    store = _store(4)
    tables = torch.zeros(2, dtype=torch.int32)
    seen = [store.version]
    retrieval = store.retrieve(torch.tensor([1, 2]), tables, None, 0)
    seen.append(store.version)
    store.find_handles(torch.tensor([1, 9]), tables)
    store.update_pooled(
        retrieval.handles,
        torch.tensor([0, 1]),
        StoreKeys(torch.tensor([1, 2]), tables, torch.tensor([0, 1, 2]), (0, 2), (SUM,)),
        [torch.ones(2, 4)],
        1,
        0.1,
    )
    assert store.version == seen[-1]
    store.erase_keys(torch.tensor([1]), tables[:1])
    seen.append(store.version)
    store.retrieve(torch.tensor([1]), tables[:1], None, 1)
    seen.append(store.version)
    store.clear()
    seen.append(store.version)
    assert len(set(seen)) == len(seen)


def test_rows_of_another_type_are_pooled_but_not_updated() -> None:
    case, store, handles, keys, tables, bags = _setup([SUM], data_type=DataType.FP16)
    assert not store.pools_in_place
    ours, truth = case.outs(), case.outs()
    store.pool(handles, keys, tables, case.slots, bags, ours)
    pool_forward(store.read_embeddings(handles, keys, tables), *case.bags(), truth)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, truth))
    with pytest.raises(ValueError, match="update_pooled: rows must be float32 and in memory; gather them instead"):
        store.update_pooled(handles, case.slots, bags, case.grads, 1, 0.1)


def test_errors_change_nothing() -> None:
    case, store, handles, keys, tables, bags = _setup([SUM], dim=4)
    before = store.read_embeddings(handles, keys, tables)
    outs = [torch.full_like(out, 5.0) for out in case.outs()]
    unknown, outside = handles.clone(), case.slots.clone()
    unknown[3], outside[2] = 1 << 40, 60
    with pytest.raises(IndexError, match="row handles must be in"):
        store.pool(unknown, keys, tables, case.slots, bags, outs)
    with pytest.raises(IndexError, match="lookup_pool: slots must lie in"):
        store.pool(handles, keys, tables, outside, bags, outs)
    with pytest.raises(IndexError, match="row handles must be in"):
        store.update_pooled(unknown, case.slots, bags, case.grads, 1, 0.1)
    with pytest.raises(IndexError, match="lookup_pool: slots must lie in"):
        store.update_pooled(handles, outside, bags, case.grads, 1, 0.1)
    with pytest.raises(ValueError, match="row_update: step must be an integer >= 1"):
        store.update_pooled(handles, case.slots, bags, case.grads, 0, 0.1)
    with pytest.raises(ValueError, match="row_update: lr must be finite"):
        store.update_pooled(handles, case.slots, bags, case.grads, 1, float("inf"))
    with pytest.raises(TypeError, match="retrieve_occurrences: valid must be"):
        store.retrieve_occurrences(keys, tables, case.slots, 0)
    with pytest.raises(ValueError, match="outs must have one matrix per segment"):
        store.pool_keys(StoreKeys(keys, tables, torch.tensor([0, len(keys)]), (0, 1), (SUM,)), [])
    most = StoreKeys(keys, tables, bags.bag_offsets, bags.segment_bags, (MAX,))
    with pytest.raises(ValueError, match="update_pooled: pooling max is not supported; gather the rows"):
        store.update_pooled(handles, case.slots, most, case.grads, 1, 0.1)
    assert torch.equal(store.read_embeddings(handles, keys, tables), before)
    assert all(bool((out == 5.0).all()) for out in outs)
