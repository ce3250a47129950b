"""Pooling at the owner: an owner sends one row for the rows of a bag that it has, and gets one gradient back.

A *part* is what one owner has of one bag in one micro-batch, at least one occurrence. The source tells each owner its
parts as entries of the key list that it sends anyway; both sides then have the same parts in the same order (by owner
or source, then as occurrences come). To the source a part is one more row, behind the rows of its keys, which one
micro-batch uses: a bag of the model becomes the list of its parts, owners ascending. The source divides means, of sums
and of their gradients, so that an owner only adds; and it adds an entry's occurrences in the order in which the source
would.

What counts as finite (stages/finite): both sides add up the largest magnitudes of the gradients that a row gets; the
row is bad if this bound of its gradient is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..comm.router import NEVER, SourceKeys, Transfer
from ..errors import CommunicationError
from ..ops.bucketize import bucketize
from ..ops.gather_rows import gather_rows
from ..ops.lookup_pool import pool_backward, pool_forward
from ..ops.wire_rows import wire_dtype, wire_width
from ..types import DataType, LookupCall, PoolingType, StoreKeys
from .state import BatchState, OwnerKeys, Parts, RankState, StoreBinding

__all__ = [
    "add_gradients",
    "land_parts",
    "note_bounds",
    "partial_rows",
    "pool_at_owners",
    "post_parts",
    "select_features",
]

_SUM, _MEAN = PoolingType.SUM.code, PoolingType.MEAN.code
Ints = npt.NDArray[np.int64]


def select_features(bindings: Sequence[StoreBinding], setting: bool | str | Sequence[str]) -> None:
    """Note in each store's binding which features' bags owners pool: `setting` as `PipelineConfig.owner_pooling`.

    Raises:
        ValueError: a named feature is not there, or cannot be pooled at its owner; with True, if one cannot.
    """
    known: set[str] = set()
    for binding in bindings:
        flags = []
        for feature, mode, weighted in binding.module.store_segments(binding.index):
            known.add(feature)
            wanted = setting in (True, "auto") if isinstance(setting, bool | str) else feature in setting
            reason = _reason(mode, weighted)
            if wanted and reason and setting != "auto":
                raise ValueError(
                    f"owner_pooling: feature {feature!r} of {binding.module_name!r} {reason}; name the features to "
                    "pool (owner_pooling=['a', 'b']), or use 'auto', which leaves such features out"
                )
            flags.append(wanted and not reason)
        binding.pooled = tuple(flags) if any(flags) else ()
    unknown = [] if isinstance(setting, bool | str) else sorted(set(setting) - known)
    if unknown:
        raise ValueError(f"owner_pooling: no embedding module has features {unknown}; there are {sorted(known)}")


def _reason(mode: PoolingType, weighted: bool) -> str:
    if mode is PoolingType.NONE:
        return "is not pooled: its rows are what the model wants"
    if mode is PoolingType.MAX:
        return "is pooled by max, whose gradient needs the rows at the source"
    return "has per-sample weights, whose gradients need the rows at the source" if weighted else ""


# ------------------------------------------------------------------------------------------------ the source


def pool_at_owners(
    rank: RankState,
    binding: StoreBinding,
    source: SourceKeys,
    lists: Sequence[StoreKeys],
    calls: Sequence[dict[str, list[LookupCall]]],
) -> tuple[list[Parts], list[StoreKeys]]:
    """The parts of every micro-batch, and its occurrences with parts in their place; `source` and `calls` (the
    micro-batches' lookups) are changed to match."""
    keys = source.lists
    world, peers = len(keys.per_peer), keys.peers().numpy()
    flags = np.array(binding.pooled)
    numbers = [len(binding.lookups(call)) for call in calls]
    made = [_Bags(one, s, flags, n, peers, world) for one, s, n in zip(lists, source.slots, numbers)]
    if rank.owner_pooling_auto:
        saves = flags & _saves(rank, binding, made, len(keys.keys))
        if not np.array_equal(saves, flags):
            made = [_Bags(one, s, saves, n, peers, world) for one, s, n in zip(lists, source.slots, numbers)]
    first, last = (torch.full((len(keys.keys),), NEVER, dtype=torch.int64) for _ in range(2))
    for micro, one in enumerate(made):
        last[one.plain] = micro
    for micro in reversed(range(len(made))):
        first[made[micro].plain] = micro
    keys.first, keys.last = first, last
    parts, derived, base = [], [], len(keys.keys)
    for micro, one in enumerate(made):
        parts.append(one.parts(base))
        occurrences, source.slots[micro] = one.derived(base)
        _replace_calls(binding, calls[micro], occurrences)
        derived.append(occurrences)
        base += one.num_parts
    return parts, derived


class _Bags:
    """One micro-batch's occurrences in a store, those to be pooled grouped by owner."""

    def __init__(
        self, keys: StoreKeys, slots: Tensor, flags: npt.NDArray[np.bool_], calls: int, peers: Ints, world: int
    ) -> None:
        self._keys, self._slots = keys, slots.numpy()
        self._bags = np.arange(len(keys.bag_offsets) - 1).repeat(np.diff(keys.bag_offsets.numpy()))
        self._bag_flags = np.tile(flags, calls).repeat(np.diff(np.array(keys.segment_bags)))
        pooled = self._bag_flags[self._bags]
        self._kept = np.flatnonzero(~pooled)
        chosen = np.flatnonzero(pooled & (self._slots >= 0))
        owner = peers[self._slots[chosen]]
        order, lengths = bucketize(torch.from_numpy(owner.astype(np.int32)), world)
        owner, self._chosen = owner[order.numpy()], chosen[order.numpy()]
        self.lengths: list[int] = lengths.tolist()
        self.entries, self.chosen_bags = self._slots[self._chosen], self._bags[self._chosen]
        begins = np.ones(len(owner), dtype=bool)
        begins[1:] = (np.diff(self.chosen_bags) != 0) | (np.diff(owner) != 0)
        self.starts = np.flatnonzero(begins)
        self._per_peer: list[int] = np.bincount(owner[self.starts], minlength=world).tolist()
        self.num_parts = len(self.starts)
        plain = self._slots[self._kept]
        self.plain = torch.from_numpy(plain[plain >= 0])
        """List entries whose rows travel, of every occurrence."""

    def parts(self, base: int) -> Parts:
        """As the owners pool them; the first one's row lies at `base`."""
        return Parts(
            torch.from_numpy(self.entries),
            torch.from_numpy(np.append(self.starts, len(self.entries))),
            Transfer(torch.arange(base, base + self.num_parts), self._per_peer),
            self.lengths,
        )

    def derived(self, base: int) -> tuple[StoreKeys, Tensor]:
        """Occurrences and slots with every pooled bag made of its parts, owners ascending."""
        keys, part_bags = self._keys, self.chosen_bags[self.starts]
        bags = np.concatenate([self._bags[self._kept], part_bags])
        slots = np.concatenate([self._slots[self._kept], base + np.arange(self.num_parts)])
        tables = keys.tables.numpy()
        tables = np.concatenate([tables[self._kept], tables[self._chosen[self.starts]]])
        order = np.argsort(bags, kind="stable")
        number = len(self._bag_flags)
        offsets = np.zeros(number + 1, dtype=np.int64)
        np.cumsum(np.bincount(bags, minlength=number), out=offsets[1:])
        firsts = np.array(keys.segment_bags[:-1], dtype=np.int64)
        pooled = [size > 0 and bool(self._bag_flags[at]) for at, size in zip(firsts, np.diff(keys.segment_bags))]
        modes = tuple(_SUM if flag else mode for flag, mode in zip(pooled, keys.segment_modes))
        counts = np.ones(number, dtype=np.float32)
        for segment, (start, stop) in enumerate(pairwise(keys.segment_bags)):
            if pooled[segment] and keys.segment_modes[segment] == _MEAN:
                counts[start:stop] = self._valid_lengths()[start:stop]
        placed = torch.from_numpy(slots[order])
        changed = StoreKeys(
            placed, torch.from_numpy(tables[order]), torch.from_numpy(offsets), keys.segment_bags, modes,
            divisors=torch.from_numpy(counts),
        )  # fmt: skip
        return changed, placed

    def _valid_lengths(self) -> Ints:
        return np.maximum(np.bincount(self.chosen_bags, minlength=len(self._bag_flags)), 1)

    def segments(self, bags: Ints, number: int) -> Ints:
        """Which of a call's `number` segments each bag belongs to."""
        found = np.searchsorted(np.array(self._keys.segment_bags), bags, side="right") - 1
        return found % max(number, 1)


def _saves(rank: RankState, binding: StoreBinding, made: Sequence[_Bags], entries: int) -> npt.NDArray[np.bool_]:
    """bool [segments]: features whose parts are fewer bytes, with the lists that tell them, than their rows."""
    number = len(binding.pooled)
    parts, occurrences = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
    seen = np.zeros((number, entries), dtype=bool)
    for one in made:
        segments = one.segments(one.chosen_bags, number)
        occurrences += np.bincount(segments, minlength=number)
        parts += np.bincount(segments[one.starts], minlength=number)
        seen[segments, one.entries] = True
    dim = binding.store.dim
    width = sum(wire_width(dim, wire) * wire_dtype(wire).itemsize for wire in (rank.row_wire, rank.gradient_wire))
    result: npt.NDArray[np.bool_] = parts * width + 4 * occurrences < seen.sum(1) * width
    return result


def _replace_calls(binding: StoreBinding, calls: dict[str, list[LookupCall]], whole: StoreKeys) -> None:
    """Give each call its piece of the micro-batch's occurrences."""
    bag = segment = 0
    offsets, changed = whole.bag_offsets, []
    assert whole.divisors is not None
    for call in calls.get(binding.module_name, []):
        old = call.stores[binding.index]
        bags = slice(bag, bag + old.segment_bags[-1])
        at = slice(int(offsets[bags.start]), int(offsets[bags.stop]))
        stores = list(call.stores)
        stores[binding.index] = StoreKeys(
            whole.keys[at],
            whole.tables[at],
            (offsets[bags.start : bags.stop + 1] - at.start).contiguous(),
            old.segment_bags,
            whole.segment_modes[segment : segment + len(old.segment_modes)],
            divisors=whole.divisors[bags],
        )
        changed.append(replace(call, stores=stores))
        bag, segment = bags.stop, segment + len(old.segment_modes)
    if changed:
        calls[binding.module_name] = changed


# ---------------------------------------------------------------------------------------------- the messages


def post_parts(rank: RankState, batch: BatchState) -> None:
    """Tell every owner its parts: per store int32 occurrences of each micro-batch, then list entries, part after part;
    the first entry e of a part is -1 - e."""
    group = rank.topology.group.group("keys")
    messages: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(group.size)]
    for plan in batch.plans:
        if not plan.parts:
            continue
        starts = np.cumsum([0, *plan.source.lists.per_peer])
        for peer, message in enumerate(messages):
            message.append(np.array([one.lengths[peer] for one in plan.parts], dtype=np.int32))
        for one in plan.parts:
            told = one.entries.numpy() - starts[:-1].repeat(one.lengths)
            begins = one.offsets.numpy()[:-1]
            told[begins] = -1 - told[begins]
            for message, piece in zip(messages, np.split(told.astype(np.int32), np.cumsum(one.lengths)[:-1])):
                message.append(piece)
    sizes = [sum(map(len, pieces)) for pieces in messages]
    stores, heads = len(batch.part_sizes[0]), rank.num_micro_batches
    incoming = [stores * heads + sum(announced) for announced in batch.part_sizes]
    flat = torch.from_numpy(np.concatenate([piece for pieces in messages for piece in pieces]))
    batch.post("keys.parts", 0, group.all_to_all(flat, sizes, incoming, f"{batch.tag}/parts"))


def land_parts(rank: RankState, batch: BatchState) -> None:
    """What the sources told: the parts of every micro-batch, sources ascending."""
    message, at = batch.land("keys.parts").numpy(), 0
    pooled = [owner for binding, owner in zip(rank.bindings, batch.owner) if binding.pooled]
    told: list[list[list[npt.NDArray[np.int32]]]] = [[[] for _ in range(rank.num_micro_batches)] for _ in pooled]
    for peer, announced in enumerate(batch.part_sizes):
        for store, total in enumerate(announced):
            lengths = message[at : at + rank.num_micro_batches].astype(np.int64)
            at += rank.num_micro_batches
            if int(lengths.sum()) != total or int(lengths.min()) < 0:
                raise CommunicationError(f"rank {peer} announced {total} occurrences to pool and sent {lengths.sum()}")
            for micro, piece in enumerate(np.split(message[at : at + total], np.cumsum(lengths)[:-1])):
                told[store][micro].append(piece)
            at += total
    for owner, micros in zip(pooled, told):
        owner.parts = [_owner_parts(owner.per_peer, pieces) for pieces in micros]
        owner.bounds = torch.zeros(len(owner.slot), dtype=torch.float64)


def _owner_parts(per_peer: Sequence[int], pieces: Sequence[npt.NDArray[np.int32]]) -> Parts:
    lengths = [len(piece) for piece in pieces]
    words = np.concatenate(pieces).astype(np.int64)
    begins = words < 0
    words[begins] = -1 - words[begins]
    if (words >= np.array(per_peer).repeat(lengths)).any():
        raise CommunicationError("a source told parts with entries that its key list does not have")
    entries = words + np.cumsum([0, *per_peer])[:-1].repeat(lengths)
    starts = np.flatnonzero(begins)
    numbers = [int((piece < 0).sum()) for piece in pieces]
    offsets = torch.from_numpy(np.append(starts, len(words)))
    return Parts(torch.from_numpy(entries), offsets, Transfer(torch.arange(len(starts)), numbers), lengths)


# ------------------------------------------------------------------------------------------------- the owner


def partial_rows(owner: OwnerKeys, micro: int, dim: int, data_type: DataType) -> Tensor:
    """float32 [parts, dim]: the sum of each part's rows, in the order of its occurrences."""
    parts = owner.parts[micro]
    assert owner.buffer is not None
    slots, rows = owner.slot[parts.entries], owner.buffer[:, :dim]
    if data_type is not DataType.FP32:
        rows = gather_rows(owner.buffer, slots, dim, data_type=data_type)
        slots = torch.arange(len(slots))
    number = len(parts.offsets) - 1
    sums = torch.empty(number, dim, dtype=torch.float32)
    pool_forward(rows, slots, parts.offsets, (0, number), (_SUM,), [sums])
    return sums


def add_gradients(owner: OwnerKeys, micro: int, gradients: Tensor) -> None:
    """The parts' gradients float32 [parts, dim] of one micro-batch, to each of their occurrences, into the boxes."""
    parts, number = owner.parts[micro], len(gradients)
    assert owner.boxes is not None
    pool_backward([gradients], None, parts.entries, parts.offsets, (0, number), (_SUM,), None, owner.boxes)


def note_bounds(bounds: Tensor, parts: Parts, peaks: Tensor) -> None:
    """bounds float64 [entries] += the largest magnitude in the gradient of every occurrence, as both sides add it.
    `peaks`: float32, that of each part."""
    if not len(peaks):
        return
    of_occurrences = peaks.numpy().repeat(np.diff(parts.offsets.numpy()))
    added = np.bincount(parts.entries.numpy(), of_occurrences, minlength=len(bounds))
    bounds += torch.from_numpy(added)
