"""Stage 4 on the owner: find or insert rows, fill the buffer, synchronise it with the batch before; and write rows
back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import StoreFullError
from ..ops.intersect import intersect
from ..ops.row_sync import row_sync
from ..types import KeyStatus, Retrieval, RowStore
from .counting import count_retrieval
from .host_rows import gather, write_back_rows
from .replicas import patch_averaged
from .routing import merge_sources
from .state import BatchState, OwnerKeys, RankState, RowHook, UnionKeys

__all__ = [
    "check_refused",
    "find",
    "gather_all",
    "gather_fresh",
    "retrieve",
    "sync",
    "undo_retrieval",
    "warm",
    "write_back",
]


def retrieve(rank: RankState, batch: BatchState, micro: int) -> None:
    """Merge the sources' keys, where `warm` has not, and find or insert their rows. Repeatable after
    `undo_retrieval`."""
    if not batch.owner:
        merge_sources(rank, batch)
    with batch.guard(rank.communicator.rank, "retrieve"):
        for binding, owner in zip(rank.bindings, batch.owner):
            wanted = owner.union or owner
            wanted.retrieval = binding.store.retrieve(wanted.keys, wanted.tables, wanted.counts, batch.clock)
            check_refused(binding.store, wanted)
            _narrow(owner)
        if rank.counting:
            count_retrieval(rank, batch)


def warm(rank: RankState, batch: BatchState, micro: int) -> None:
    """Merge the sources' keys, and ask the disk for rows of those that stores keep in files. Changes no store.

    It may run beside any retrieval: a row that is inserted or evicted meanwhile is asked for in vain, or not asked for.
    """
    merge_sources(rank, batch)
    with batch.guard(rank.communicator.rank, "warm"):
        for binding, owner in zip(rank.bindings, batch.owner):
            if binding.store.tier is not None:
                binding.store.warm(owner.keys, owner.tables)


def _narrow(owner: OwnerKeys) -> None:
    """The own group's part of what was found for the keys of all groups."""
    if owner.union is not None and owner.union.retrieval is not None:
        found, own = owner.union.retrieval, owner.union.own
        status = found.status[own] if len(found.status) else found.status
        owner.retrieval = Retrieval(found.handles[own], status, found.journal)


def check_refused(store: RowStore, owner: OwnerKeys | UnionKeys) -> None:
    """Nothing is dropped in silence: a key without a row is an error while no rule of its table says what becomes of
    it."""
    assert owner.retrieval is not None
    refused = owner.retrieval.status == KeyStatus.REFUSED
    if not bool(refused.any()):
        return
    strict = torch.tensor([spec.admission is None and spec.eviction is None for spec in store.tables])
    refused = torch.nonzero(refused & strict[owner.tables.to(torch.int64)]).squeeze(1)
    if len(refused):
        spec = store.tables[int(owner.tables[refused[0]])]
        raise StoreFullError(
            f"table {spec.name!r}: {len(refused)} new keys of this batch have no room (the first: "
            f"{int(owner.keys[refused[0]])}; this rank's quota is {spec.capacity} rows); raise the table's capacity, "
            "or give it an eviction rule, for example nk.policy.LRU()"
        )


def find(rank: RankState, batch: BatchState, micro: int) -> None:
    """Merge the sources' keys and look their rows up; inserts nothing and touches no metadata."""
    if not batch.owner:
        merge_sources(rank, batch)
    with batch.guard(rank.communicator.rank, "find"):
        for binding, owner in zip(rank.bindings, batch.owner):
            wanted = owner.union or owner
            handles = binding.store.find_handles(wanted.keys, wanted.tables)
            wanted.retrieval = Retrieval(handles, torch.empty(0, dtype=torch.uint8), None)
            _narrow(owner)


def undo_retrieval(rank: RankState, batch: BatchState) -> None:
    """Take back what `retrieve` did to the stores; batches are undone newest first."""
    for binding, owner in zip(rank.bindings, batch.owner):
        wanted = owner.union or owner
        if wanted.retrieval is not None:
            binding.store.undo(wanted.retrieval)
            wanted.retrieval = owner.retrieval = None


def gather_all(rank: RankState, batch: BatchState, micro: int) -> None:
    """Every row of the batch from the store into its buffer."""
    batch.counts.kept = 0
    if batch.failure is not None or (batch.verdict is not None and not batch.verdict.ok):
        return
    with batch.guard(rank.communicator.rank, "gather"):
        for binding, owner in zip(rank.bindings, batch.owner):
            assert owner.retrieval is not None
            owner.buffer = binding.buffer(batch.index % 2, len(owner.keys), rank.poison)
            gather(binding.store, owner.retrieval.handles, owner.keys, owner.tables, owner.buffer, None, rank.backend)


def gather_fresh(rank: RankState, batch: BatchState, micro: int) -> None:
    """Rows that the batch before does not hold, from the store; the others come with `sync`."""
    if batch.failure is not None:
        return
    before = batch.previous.owner if batch.previous is not None else []
    with batch.guard(rank.communicator.rank, "gather"):
        for k, (binding, owner) in enumerate(zip(rank.bindings, batch.owner)):
            assert owner.retrieval is not None
            owner.buffer = binding.buffer(batch.index % 2, len(owner.keys), rank.poison)
            handles, keys, tables = owner.retrieval.handles, owner.keys, owner.tables
            index = None
            last = before[k] if before else None
            if last is not None and last.buffer is not None and last.retrieval is not None:
                there, here = intersect(last.keys, last.tables, keys, tables)
                held = (last.retrieval.handles[there] >= 0) & (handles[here] >= 0)
                owner.shared_before, owner.shared_here = there[held], here[held]
                fresh = torch.ones(len(keys), dtype=torch.bool)
                fresh[owner.shared_here] = False
                batch.counts.kept += len(owner.shared_here)
                index = torch.nonzero(fresh).squeeze(1)
                handles, keys, tables = handles[index], keys[index], tables[index]
            gather(binding.store, handles, keys, tables, owner.buffer, index, rank.backend)


def sync(rank: RankState, batch: BatchState, micro: int) -> None:
    """Rows that the batch before holds too, from its buffer, after its update."""
    previous, batch.previous = batch.previous, None
    if batch.failure is not None or previous is None:
        return
    with batch.guard(rank.communicator.rank, "sync"):
        for owner, last in zip(batch.owner, previous.owner):
            if owner.shared_here is not None and owner.shared_before is not None:
                assert owner.buffer is not None and last.buffer is not None
                row_sync(last.buffer, owner.buffer, owner.shared_before, owner.shared_here)
        patch_averaged(previous, batch)


def write_back(rank: RankState, batch: BatchState, micro: int) -> None:
    """Updated rows into the store, by handle; then the hooks hear which keys are there, and which rows have gone."""
    if batch.verdict is None or not batch.verdict.ok:
        return
    for binding, owner in zip(rank.bindings, batch.owner):
        assert owner.retrieval is not None and owner.buffer is not None
        write_back_rows(binding.store, owner.retrieval.handles, owner.buffer, rank.backend)
    for binding, owner in zip(rank.bindings, batch.owner):
        assert owner.retrieval is not None
        if rank.on_write_back:
            there = owner.retrieval.handles >= 0
            _tell(rank.on_write_back, batch.verdict.step, binding.store, owner.keys[there], owner.tables[there])
        if rank.on_eviction:
            keys, tables = binding.store.evicted(owner.retrieval)
            _tell(rank.on_eviction, batch.verdict.step, binding.store, keys, tables)


def _tell(hooks: Sequence[RowHook], step: int, store: RowStore, keys: Tensor, tables: Tensor) -> None:
    for k, table in enumerate(store.tables):
        chosen = keys[tables == k]
        if len(chosen):
            for hook in hooks:
                hook(step, table.name, chosen)
