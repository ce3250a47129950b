"""Lookups of a process that owns all rows: pooled and updated where they lie, with no exchange and no copy of rows.

Every result is what the exchanges would give, bit for bit: with one source, sums of gradients have one summand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ..ops.dedup import dedup
from ..ops.lookup_pool import pool_gradient_bound
from ..types import InPlaceStore, LookupCall, PoolingType, Retrieval, StoreKeys
from . import commit, retrieval
from .lookup_function import KeyedRows, StoredRows
from .retrieval import check_refused
from .state import BatchState, OwnerKeys, RankState, StoreBinding

__all__ = ["SeenRows", "is_local", "keyed", "look_up", "update"]

_LARGEST_GOOD = torch.finfo(torch.float32).max / 2
"""What stages/finite lets pass from one source."""


@dataclass
class SeenRows:
    """What a lookup found in one store, for the update that follows."""

    rows: StoredRows
    slots: Tensor
    """int32 [n], the row of each occurrence; -1 for padding."""
    version: tuple[int, int]
    """Of the store, after the lookup."""


def is_local(rank: RankState) -> bool:
    """Whether this rank owns all rows, and its stores can pool and update them in place."""
    alone = rank.communicator.size == 1 and not rank.poison
    return alone and all(
        getattr(binding.store, "pools_in_place", False) and binding.clip_limits is None for binding in rank.bindings
    )


def look_up(rank: RankState, batch: BatchState, call: LookupCall, training: bool) -> list[SeenRows]:
    """Find the rows of a call, or insert them if `training`; what fails is the batch's failure, and undone."""
    slots = []
    with batch.guard(rank.communicator.rank, "retrieve" if training else "find"):
        for binding in rank.bindings:
            keys, store = call.stores[binding.index], _in_place(binding)
            slots.append((_retrieve if training else _find)(store, keys, batch))
    if batch.failure is not None:
        if training:
            retrieval.undo_retrieval(rank, batch)
        return []
    seen = []
    for binding, owner, of_occurrences in zip(rank.bindings, batch.owner, slots):
        assert owner.retrieval is not None
        store = _in_place(binding)
        rows = StoredRows(store, owner.retrieval.handles, owner.keys, owner.tables)
        seen.append(SeenRows(rows, of_occurrences, store.version))
    return seen


def _in_place(binding: StoreBinding) -> InPlaceStore:
    return cast(InPlaceStore, binding.store)


def _retrieve(store: InPlaceStore, keys: StoreKeys, batch: BatchState) -> Tensor:
    """Rows of a store's keys, new ones inserted, into the batch; which of them each occurrence has."""
    found = store.retrieve_occurrences(keys.keys, keys.tables, keys.valid, batch.clock)
    if found is not None:
        batch.owner.append(_owner(found.keys, found.tables, found.slots, found.retrieval))
        return found.slots
    values, tables, counts, slots = _distinct(keys)
    owner = _owner(values, tables, slots, store.retrieve(values, tables, counts, batch.clock))
    batch.owner.append(owner)
    check_refused(store, owner)
    return slots


def _find(store: InPlaceStore, keys: StoreKeys, batch: BatchState) -> Tensor:
    """Rows of a store's keys as they are, into the batch; which of them each occurrence has."""
    rows, slots = _stored(store, keys)
    found = Retrieval(rows.handles, torch.empty(0, dtype=torch.uint8), None)
    batch.owner.append(_owner(rows.keys, rows.tables, slots, found))
    return slots


def _stored(store: InPlaceStore, keys: StoreKeys) -> tuple[StoredRows, Tensor]:
    values, tables, _, slots = _distinct(keys)
    return StoredRows(store, store.find_handles(values, tables), values, tables), slots


def keyed(rank: RankState, call: LookupCall) -> list[KeyedRows]:
    """The rows of a call as they are, found by key while they are pooled: nothing will be updated."""
    stores = [(_in_place(binding), call.stores[binding.index]) for binding in rank.bindings]
    return [KeyedRows(store, partial(_stored, store, keys)) for store, keys in stores]


def _owner(keys: Tensor, tables: Tensor, slots: Tensor, found: Retrieval) -> OwnerKeys:
    return OwnerKeys(keys, tables, torch.empty(0, dtype=torch.int64), slots, [len(keys)], [], [], found)


def _distinct(keys: StoreKeys) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The distinct keys in order of first appearance, their tables and counts, and which each occurrence is."""
    values, tables, kept = keys.keys, keys.tables, None
    if keys.valid is not None and not bool(keys.valid.all()):
        kept = torch.nonzero(keys.valid).squeeze(1)
        values, tables = values[kept], tables[kept]
    distinct = dedup(values, tables)
    slots = distinct.inverse
    if kept is not None:
        slots = torch.full((len(keys.keys),), -1, dtype=torch.int32)
        slots[kept] = distinct.inverse
    return values[distinct.unique_index], tables[distinct.unique_index], distinct.counts, slots


def update(
    rank: RankState, batch: BatchState, call: LookupCall, seen: Sequence[SeenRows], grads: list[list[Tensor | None]]
) -> bool:
    """Sum the gradients of a call's rows and update them, once; the step counts then.

    Returns:
        False where that takes the general way, and nothing has changed: max pooling, and gradients so large that some
        sum may not be finite.
    """
    commit.begin(rank, batch, 0)
    if batch.failure is not None:
        assert batch.failure.error is not None
        raise batch.failure.error
    for binding, found, given in zip(rank.bindings, seen, grads):
        keys = call.stores[binding.index]
        if PoolingType.MAX.code in keys.segment_modes:
            return False
        bags = found.slots, keys.bag_offsets, keys.segment_bags, keys.segment_modes, keys.weights
        if not pool_gradient_bound(given, *bags, binding.store.dim) <= _LARGEST_GOOD:
            return False
    for k, (binding, found, given) in enumerate(zip(rank.bindings, seen, grads)):
        _update_rows(binding, found, call.stores[binding.index], given, batch.step, batch.learning_rates[k])
    rank.step_count = batch.step
    return True


def _update_rows(
    binding: StoreBinding, seen: SeenRows, keys: StoreKeys, grads: list[Tensor | None], step: int, rates: Tensor
) -> None:
    """The rows that are there, of tables that are trained, each by the rate of its table."""
    store, rows = _in_place(binding), seen.rows
    handles = rows.handles
    if store.version != seen.version:
        handles = store.find_handles(rows.keys, rows.tables)
    mask: Tensor | None = None
    if not bool(binding.trainable.all()):
        mask = binding.trainable[rows.tables.to(torch.int64)]
    rate: float | Tensor = float(rates[0])
    if bool((rates != rates[0]).any()):
        rate = rates[rows.tables.to(torch.int64)]
    store.update_pooled(handles, seen.slots, keys, grads, step, rate, mask)
