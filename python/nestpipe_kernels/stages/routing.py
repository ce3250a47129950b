"""Stages 1-3: the next batch, fetched and copied, its micro-batches and their keys, and the exchange of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comm.router import KeyLists, pack, part_of, route_keys, transfers, unpack
from ..errors import CommunicationError
from ..ops.dedup import dedup
from ..ops.mean_sources import entries_by_row
from ..types import LookupCall, StoreKeys, empty_store_keys
from .messages import FIXED_WORDS, Flags, pack_flags, unpack_flags
from .micro_batches import micro_batches
from .owner_pool import land_parts, pool_at_owners, post_parts
from .state import BatchState, OwnerKeys, Parts, RankState, StorePlan, UnionKeys

__all__ = [
    "announce",
    "concat_keys",
    "copy",
    "exchange_keys",
    "fetch",
    "merge_sources",
    "plan_keys",
    "prefetch",
    "route",
]


def prefetch(rank: RankState, batch: BatchState, micro: int) -> None:
    """Draw the next batch and copy it: the loader and the caller may reuse their tensors at once.

    Where what comes is no batch yet, it is only kept, and `fetch` and `copy` do the rest.
    """
    source = rank.source
    if source is None or source.exhausted:
        return
    batch.promised_plain = rank.weighted is False  # here, where it does not depend on how far other lanes are
    with batch.guard(rank.communicator.rank, "prefetch"):
        if not hasattr(source.iterator, "__next__"):
            raise TypeError(
                f"progress() draws from an iterator, got {type(source.iterator).__name__}; pass iter(loader), made "
                "once for the epoch, or use run(loader)"
            )
        try:
            raw = next(source.iterator)
        except StopIteration:
            source.exhausted = True
            return
        if rank.fetch is not None:
            batch.item = (raw,)
        else:
            _take(rank, batch, raw, own=False)
        batch.has_batch = True
    batch.inputs = rank.inputs


def fetch(rank: RankState, batch: BatchState, micro: int) -> None:
    """Turn what was drawn into a batch, unless that was done before."""
    if batch.has_batch and batch.raw is None and batch.failure is None:
        assert rank.fetch is not None and batch.item is not None
        with batch.guard(rank.communicator.rank, "fetch"):
            batch.raw = rank.fetch(batch.item[0])


def copy(rank: RankState, batch: BatchState, micro: int) -> None:
    """Bring what was fetched to the device; on a CPU it is there."""
    if batch.has_batch and batch.failure is None:
        with batch.guard(rank.communicator.rank, "copy"):
            _take(rank, batch, batch.raw, own=True)
    batch.inputs = rank.inputs


def _take(rank: RankState, batch: BatchState, raw: Any, own: bool) -> None:
    """Note a batch and its size; `own`: nobody else writes its tensors. The first one with samples is captured: on the
    thread that runs the model, whoever calls this."""
    from ..capture.split import batch_size_of, check_size, split
    from ..capture.tree import arrays_as_tensors

    raw = arrays_as_tensors(raw)
    batch.size = batch_size_of(raw)
    if rank.split_batch is not None:
        check_size(raw, batch.size)
    if not batch.size:
        return
    batch.raw = raw if own else split(raw, [torch.arange(batch.size)], rank.split_batch)[0]
    if rank.inputs is None and rank.capture is not None:
        rank.inputs = rank.capture(batch.raw)


def route(rank: RankState, batch: BatchState, micro: int) -> None:
    """Split into micro-batches, list keys by owner, and announce how many keys each owner will get."""
    if batch.has_batch and batch.failure is None:
        with batch.guard(rank.communicator.rank, "route"):
            batch.micro = micro_batches(rank, batch)
            batch.plans = plan_keys(rank, [m.calls for m in batch.micro])
    if batch.failure is not None or not batch.plans:
        batch.plans = plan_keys(rank, [{} for _ in range(rank.num_micro_batches)])
    announce(rank, batch)


def concat_keys(calls: Sequence[StoreKeys]) -> StoreKeys:
    """Occurrences of several calls as one list, in call order."""
    if len(calls) == 1:
        return calls[0]
    if not calls:
        return empty_store_keys()
    offsets, bags, modes = [torch.zeros(1, dtype=torch.int64)], [0], []
    total = 0
    for call in calls:
        offsets.append(call.bag_offsets[1:] + total)
        base = bags[-1]
        bags += [base + b for b in call.segment_bags[1:]]
        modes += list(call.segment_modes)
        total += len(call.keys)
    weighted = any(c.weights is not None for c in calls)
    padded = any(c.valid is not None for c in calls)
    return StoreKeys(
        keys=torch.cat([c.keys for c in calls]),
        tables=torch.cat([c.tables for c in calls]),
        bag_offsets=torch.cat(offsets),
        segment_bags=tuple(bags),
        segment_modes=tuple(modes),
        weights=torch.cat(
            [c.weights if c.weights is not None else torch.ones(len(c.keys), dtype=torch.float32) for c in calls]
        )
        if weighted
        else None,
        valid=torch.cat([c.valid if c.valid is not None else torch.ones(len(c.keys), dtype=torch.bool) for c in calls])
        if padded
        else None,
    )


def plan_keys(rank: RankState, micro_calls: Sequence[dict[str, list[LookupCall]]]) -> list[StorePlan]:
    """The source side of every store, for the lookups of each micro-batch."""
    plans = []
    for binding in rank.bindings:
        lists = [
            concat_keys([call.stores[binding.index] for _, _, call in binding.lookups(calls)]) for calls in micro_calls
        ]
        valid = None
        if any(one.valid is not None for one in lists):
            valid = torch.cat(
                [one.valid if one.valid is not None else torch.ones(len(one.keys), dtype=torch.bool) for one in lists]
            )
        source = route_keys(
            torch.cat([one.keys for one in lists]),
            torch.cat([one.tables for one in lists]),
            valid,
            [len(one.keys) for one in lists],
            binding.store.table_hashes,
            rank.slice_owner,
            rank.topology.num_shards,
            rank.track_use,
        )
        parts: list[Parts] = []
        if binding.pooled:
            parts, lists = pool_at_owners(rank, binding, source, lists, micro_calls)
        rows, grads = transfers(source.lists, len(lists))
        shape = (len(source.lists.keys) + sum(len(one.move.positions) for one in parts), binding.store.dim)
        received = rank.pool.empty(shape)
        if rank.poison:
            received.fill_(float("nan"))
        plans.append(StorePlan(source, rows, grads, received, rank.pool.zeros(shape), list(lists), parts))
    return plans


def announce(rank: RankState, batch: BatchState) -> None:
    """Post this rank's flags and the lengths of its key lists to every owner, in all sparse groups."""
    batch.promised_plain |= not batch.size
    flags = _flags(rank, batch)
    world = rank.communicator.size
    shards = [peer % rank.topology.num_shards for peer in range(world)]
    pooled = [plan for plan in batch.plans if plan.parts]
    sizes = [
        [plan.source.lists.per_peer[shard] for plan in batch.plans]
        + [sum(one.lengths[shard] for one in plan.parts) for plan in pooled]
        for shard in shards
    ]
    messages = [pack_flags(flags, announced) for announced in sizes]
    words = FIXED_WORDS + len(batch.plans) + len(pooled)
    group = rank.communicator.group("keys")
    ones = [1] * world
    handle = group.all_to_all(torch.stack(messages).view(world, words), ones, ones, f"{batch.tag}/sizes")
    batch.post("keys.sizes", 0, handle)


def _flags(rank: RankState, batch: BatchState) -> Flags:
    plain = batch.promised_plain
    return Flags(batch.index, rank.num_micro_batches, batch.training, batch.has_batch, batch.failure, plain=plain)


def exchange_keys(rank: RankState, batch: BatchState, micro: int) -> None:
    """Check every rank's announcement, then post the keys; decides, alike on all ranks, whether the batch goes on."""
    received = batch.land("keys.sizes")
    expect = _flags(rank, batch)
    peers = [unpack_flags(received[p], p, expect) for p in range(rank.communicator.size)]
    lists = FIXED_WORDS + len(batch.plans)
    batch.key_sizes, batch.part_sizes = received[:, FIXED_WORDS:lists].tolist(), received[:, lists:].tolist()
    if any(n < 0 for sizes in [*batch.key_sizes, *batch.part_sizes] for n in sizes):
        raise CommunicationError(f"a rank announced a negative number of keys: {batch.key_sizes}")
    failed = [p for p, flags in enumerate(peers) if flags.failed]
    batch.ended = not failed and not any(flags.has_batch for flags in peers)
    batch.skipped = batch.ended or bool(failed)
    batch.weighted_sources = not all(flags.plain for flags in peers)
    if failed:
        batch.remote = peers[failed[0]].as_failure(failed[0])
    if batch.skipped:
        return
    topology = rank.topology
    message, counts = pack([plan.source.lists for plan in batch.plans], topology.num_shards)
    group = topology.group.group("keys")
    incoming = [sum(sizes) for sizes in batch.key_sizes[topology.sources()]]
    batch.post("keys.keys", 0, group.all_to_all(message, counts, incoming, f"{batch.tag}/keys"))
    if batch.part_sizes[0]:
        post_parts(rank, batch)


def merge_sources(rank: RankState, batch: BatchState) -> None:
    """The owner's view: the lists of all sources, and the distinct keys among them in order of first appearance."""
    from .replicas import land_lists

    topology, everyone = rank.topology, batch.group_keys is not None
    sources = topology.sources()
    message = land_lists(rank, batch) if everyone else batch.land("keys.keys")
    sizes = batch.key_sizes if everyone else batch.key_sizes[sources]
    for binding, lists in zip(rank.bindings, unpack(message, sizes)):
        if everyone and topology.mode == "average":
            owner = _merged(rank, _part(lists, sources), slice(0, topology.num_shards))
            owner.union = _union(lists, owner, sum(lists.per_peer[: sources.start]))
        else:
            owner = _merged(rank, lists, sources if everyone else slice(0, topology.num_shards))
        if batch.training:
            owner.boxes = rank.pool.zeros((len(owner.slot), binding.store.dim))
            owner.by_row = entries_by_row(owner.slot, len(owner.keys))
        batch.divisors = [1.0] * len(owner.per_peer)
        batch.owner.append(owner)
    if batch.part_sizes and batch.part_sizes[0]:
        land_parts(rank, batch)


def _merged(rank: RankState, lists: KeyLists, served: slice) -> OwnerKeys:
    """Distinct keys of some sources; rows go to, and gradients come from, those `served` by this rank."""
    distinct = dedup(lists.keys, lists.tables)
    slot = distinct.inverse.to(torch.int64)
    rows, grads = transfers(lists, rank.num_micro_batches)
    owner = OwnerKeys(
        keys=lists.keys[distinct.unique_index],
        tables=lists.tables[distinct.unique_index],
        counts=torch.zeros(len(distinct.unique_index), dtype=torch.int64).index_add_(0, slot, lists.counts),
        slot=slot,
        per_peer=lists.per_peer,
        rows=rows,
        grads=grads,
    )
    topology = rank.topology
    if len(lists.per_peer) > topology.num_shards:
        owner.rows = [part_of(one, served) for one in rows]
        owner.grads = [part_of(one, served) for one in grads]
        owner.replica_grads = [
            [part_of(one, topology.sources(number)) for one in grads] for number in range(topology.num_groups)
        ]
    return owner


def _part(lists: KeyLists, peers: slice) -> KeyLists:
    """The lists of some consecutive peers."""
    start, per_peer = sum(lists.per_peer[: peers.start]), lists.per_peer[peers]
    at = slice(start, start + sum(per_peer))
    return KeyLists(
        keys=lists.keys[at],
        tables=lists.tables[at],
        counts=lists.counts[at],
        first=lists.first[at],
        last=lists.last[at],
        used=None if lists.used is None else lists.used[at],
        per_peer=per_peer,
    )


def _union(lists: KeyLists, owner: OwnerKeys, start: int) -> UnionKeys:
    """Distinct keys of all groups; the own group's lists begin at `start`."""
    distinct = dedup(lists.keys, lists.tables)
    slot = distinct.inverse.to(torch.int64)
    own = torch.empty(len(owner.keys), dtype=torch.int64)
    own[owner.slot] = slot[start : start + len(owner.slot)]
    return UnionKeys(
        keys=lists.keys[distinct.unique_index],
        tables=lists.tables[distinct.unique_index],
        counts=torch.zeros(len(distinct.unique_index), dtype=torch.int64).index_add_(0, slot, lists.counts),
        own=own,
    )
