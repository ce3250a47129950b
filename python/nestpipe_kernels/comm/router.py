"""Which keys go to which rank, the messages that carry them, and who sends which rows when.

A *key list* holds the distinct (table, key) pairs that one rank (the source) asks another (the owner) for in one batch
and one store. Both sides hold the same lists in the same order, so rows and gradients later travel without any index:
for micro-batch i each side computes the same positions from `first`, `last` (send once) or `used` (send for every
micro-batch).

Message of a key: int64 words [key, table << 48 | first << 36 | last << 24 | count] and, where rows are sent for every
micro-batch, [used], the bit set of micro-batches. Lists of all stores share one exchange; sizes travel before, and are
checked (stages/routing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..ops.bucketize import bucketize
from ..ops.dedup import dedup
from ..ops.owners import owners

__all__ = ["NEVER", "KeyLists", "SourceKeys", "Transfer", "pack", "part_of", "route_keys", "transfers", "unpack"]

_COUNT_BITS, _MICRO_BITS, _TABLE_BITS = 24, 12, 15
NEVER = (1 << _MICRO_BITS) - 1
"""`first` and `last` of a key whose row does not travel: its owner pools it (stages/owner_pool)."""


@dataclass
class KeyLists:
    """The key lists between this rank and every peer, for one store, concatenated by peer ascending."""

    keys: Tensor
    """int64 [M]"""
    tables: Tensor
    """int32 [M]"""
    counts: Tensor
    """int64 [M] occurrences in the batch."""
    first: Tensor
    """int64 [M] first micro-batch that uses the key."""
    last: Tensor
    """int64 [M] last micro-batch that uses it."""
    used: Tensor | None
    """int64 [M] bit i: micro-batch i uses it; None with send once."""
    per_peer: list[int]
    """[W] lengths of the lists."""

    def peers(self) -> Tensor:
        """int64 [M]: the peer whose list each entry belongs to."""
        return torch.from_numpy(np.arange(len(self.per_peer)).repeat(self.per_peer))


@dataclass
class SourceKeys:
    """A source's view of one store and batch: its lists, and where each occurrence's row will be."""

    lists: KeyLists
    slots: list[Tensor]
    """Per micro-batch int64 [n_i]: position in `lists` of every occurrence, -1 for padding."""


@dataclass
class Transfer:
    """What moves for one micro-batch: positions in the lists, ascending (so by peer), and how many for each peer."""

    positions: Tensor
    """int64 [m]"""
    per_peer: list[int]
    """[W]"""


def route_keys(
    keys: Tensor,
    tables: Tensor,
    valid: Tensor | None,
    micro_sizes: Sequence[int],
    table_hashes: Tensor,
    slice_owner: Tensor,
    world_size: int,
    track_use: bool,
) -> SourceKeys:
    """Distinct keys of a batch grouped by owner, and the slot of every occurrence.

    Args:
        keys, tables: int64 / int32 [n] occurrences, micro-batch after micro-batch.
        valid: bool [n] or None; False marks padding.
        micro_sizes: occurrences of each micro-batch, sum n.
        table_hashes: int64 [T]. slice_owner: int32 [65536].
        track_use: record the bit set of micro-batches of each key (send for every micro-batch).

    Raises:
        ValueError: a key occurs 2^24 times or more, or there are 2^15 tables or more in the store.
    """
    micro = torch.from_numpy(np.arange(len(micro_sizes)).repeat(micro_sizes))
    kept = None if valid is None or bool(valid.all()) else torch.nonzero(valid).squeeze(1)
    if kept is not None:
        keys, tables, micro = keys[kept], tables[kept], micro[kept]
    distinct = dedup(keys, tables)
    unique_keys, unique_tables = keys[distinct.unique_index], tables[distinct.unique_index]
    if len(table_hashes) >= 1 << _TABLE_BITS:
        raise ValueError(f"route: a store holds at most {(1 << _TABLE_BITS) - 1} tables, got {len(table_hashes)}")
    if len(unique_keys) and int(distinct.counts.max()) >= 1 << _COUNT_BITS:
        hot = int(distinct.counts.argmax())
        raise ValueError(
            f"route: key {int(unique_keys[hot])} occurs {int(distinct.counts[hot])} times in one rank's batch, at most "
            f"{(1 << _COUNT_BITS) - 1} are supported; use smaller batches"
        )
    owner = owners(unique_keys, unique_tables, table_hashes, slice_owner)
    order, per_peer = bucketize(owner, world_size)
    position = torch.empty(len(order), dtype=torch.int64)
    position[order] = torch.arange(len(order))
    inverse = distinct.inverse.to(torch.int64)
    occurrence = position[inverse]
    last = torch.zeros(len(order), dtype=torch.int64)
    np.maximum.at(last.numpy(), occurrence.numpy(), micro.numpy())
    used = torch.zeros(len(order), dtype=torch.int64) if track_use else None
    if used is not None:
        for i, chosen in enumerate(_by_micro(occurrence, micro, len(micro_sizes))):
            used[chosen] |= 1 << i
    lists = KeyLists(
        keys=unique_keys[order],
        tables=unique_tables[order],
        counts=distinct.counts.to(torch.int64)[order],
        first=micro[distinct.unique_index][order],
        last=last,
        used=used,
        per_peer=per_peer.tolist(),
    )
    slots = occurrence
    if kept is not None:
        slots = torch.full((len(valid) if valid is not None else 0,), -1, dtype=torch.int64)
        slots[kept] = occurrence
    return SourceKeys(lists, list(slots.split_with_sizes(list(micro_sizes))))


def _by_micro(occurrence: Tensor, micro: Tensor, num_micro: int) -> list[Tensor]:
    return list(torch.split(occurrence, torch.bincount(micro, minlength=num_micro).tolist()))


def transfers(lists: KeyLists, num_micro: int) -> tuple[list[Transfer], list[Transfer]]:
    """(rows, gradients): what moves for each micro-batch. The same on both sides of every list."""
    peers, world = lists.peers(), len(lists.per_peer)
    if lists.used is not None:
        both = []
        for i in range(num_micro):
            positions = torch.nonzero((lists.used >> i) & 1).squeeze(1)
            both.append(Transfer(positions, torch.bincount(peers[positions], minlength=world).tolist()))
        return both, both
    return _grouped(lists.first, peers, num_micro, world), _grouped(lists.last, peers, num_micro, world)


def part_of(transfer: Transfer, peers: slice) -> Transfer:
    """What of a transfer goes to, or comes from, some consecutive peers."""
    start = sum(transfer.per_peer[: peers.start])
    per_peer = transfer.per_peer[peers]
    return Transfer(transfer.positions[start : start + sum(per_peer)], per_peer)


def _grouped(micro: Tensor, peers: Tensor, num_micro: int, world: int) -> list[Transfer]:
    moved = torch.nonzero(micro != NEVER).squeeze(1) if bool((micro == NEVER).any()) else None
    if moved is not None:
        micro, peers = micro[moved], peers[moved]
    order, counts = bucketize((micro * world + peers).to(torch.int32), num_micro * world)
    if moved is not None:
        order = moved[order]
    per_peer = counts.view(num_micro, world).tolist()
    parts = order.split_with_sizes([sum(row) for row in per_peer])
    return [Transfer(part, row) for part, row in zip(parts, per_peer)]


def pack(lists: Sequence[KeyLists], world_size: int) -> tuple[Tensor, list[int]]:
    """One message for all stores: int64 [sum, words] grouped by peer, then store; and rows for each peer."""
    blocks: list[list[Tensor]] = [[] for _ in range(world_size)]
    for one in lists:
        words = [one.keys, (one.tables.to(torch.int64) << 48) | (one.first << 36) | (one.last << 24) | one.counts]
        if one.used is not None:
            words.append(one.used)
        for peer, part in enumerate(torch.split(torch.stack(words, 1), one.per_peer)):
            blocks[peer].append(part)
    counts = [sum(len(part) for part in parts) for parts in blocks]
    return torch.cat([part for parts in blocks for part in parts]), counts


def unpack(message: Tensor, sizes: Sequence[Sequence[int]]) -> list[KeyLists]:
    """The lists of every store out of a received message; `sizes[peer][store]` were announced before."""
    num_stores, tracked = len(sizes[0]), message.shape[1] == 3
    parts = torch.split(message, [n for peer in sizes for n in peer])
    result = []
    for s in range(num_stores):
        words = torch.cat([parts[p * num_stores + s] for p in range(len(sizes))])
        meta = words[:, 1]
        result.append(
            KeyLists(
                keys=words[:, 0].contiguous(),
                tables=((meta >> 48) & ((1 << _TABLE_BITS) - 1)).to(torch.int32),
                counts=meta & ((1 << _COUNT_BITS) - 1),
                first=(meta >> 36) & ((1 << _MICRO_BITS) - 1),
                last=(meta >> 24) & ((1 << _MICRO_BITS) - 1),
                used=words[:, 2].contiguous() if tracked else None,
                per_peer=[peer[s] for peer in sizes],
            )
        )
    return result
