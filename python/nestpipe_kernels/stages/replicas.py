"""2D sparse parallelism: what the owners of one shard, one in each sparse group, tell each other (comm/topology).

*exact*: each owner passes on the key lists and the gradients of its group's sources, as they came. So every owner has
the lists of all sources in rank order, and retrieval, sums and updates are those of one group, on each copy alike.

*average*: key lists are passed on, so all copies hold the same rows with the same metadata, by decisions on the keys of
all ranks; gradients are not, and a copy updates the rows that its own group looked up, on the mean over that group.
Every k updates the rows that any group looked up since the last time become the mean over all copies: embedding and
optimizer state in float32, copies ascending from +0.0, divided by their number; an embedding of another storage type
is rounded to nearest once; `updates` becomes the largest. Frozen tables are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import exchange_same
from ..errors import CommunicationError
from ..ops.dedup import dedup
from ..ops.intersect import intersect
from ..ops.row_storage import pack_embeddings, unpack_embeddings
from ..ops.row_sync import row_sync
from ..types import RowStore, TouchedRows
from .messages import message_counts
from .state import AveragedRows, BatchState, OwnerKeys, RankState, StoreBinding
from .window import put_gradients

__all__ = [
    "average_announce",
    "average_copies",
    "average_rows",
    "average_send",
    "forget_evicted",
    "land_lists",
    "patch_averaged",
    "recv_replica_grads",
    "replicate_grads",
    "replicate_keys",
]


def _pass_on(
    rank: RankState, batch: BatchState, purpose: str, micro: int, message: Tensor, incoming: Sequence[int], what: str
) -> None:
    """Post a message to the owners of this shard in the other groups; `incoming[g]` is the length of theirs."""
    topology = rank.topology
    own, others = topology.group_number, topology.num_groups - 1
    send = message if others == 1 else message.repeat(others, *[1] * (message.dim() - 1))
    counts = [0 if g == own else len(message) for g in range(topology.num_groups)]
    expected = [0 if g == own else n for g, n in enumerate(incoming)]
    handle = topology.replicas.group(purpose).all_to_all(send, counts, expected, f"{batch.tag}/{what}")
    batch.post(f"replica_{purpose}", micro, handle)


def _by_group(rank: RankState, received: Tensor, incoming: Sequence[int], own: Tensor) -> list[Tensor]:
    """The messages of all groups, this rank's own among them."""
    number = rank.topology.group_number
    parts = list(torch.split(received, [0 if g == number else n for g, n in enumerate(incoming)]))
    parts[number] = own
    return parts


# ----------------------------------------------------------------------------------------------------------------- keys


def _list_lengths(rank: RankState, batch: BatchState) -> list[int]:
    topology = rank.topology
    return [sum(map(sum, batch.key_sizes[topology.sources(g)])) for g in range(topology.num_groups)]


def replicate_keys(rank: RankState, batch: BatchState, micro: int) -> None:
    """Pass the key lists of the own group's sources on to the other owners of this shard."""
    batch.group_keys = batch.land("keys.keys")
    _pass_on(rank, batch, "keys", 0, batch.group_keys, _list_lengths(rank, batch), "replica_keys")


def land_lists(rank: RankState, batch: BatchState) -> Tensor:
    """The key lists of all sources, by rank ascending."""
    own, batch.group_keys = batch.group_keys, None
    assert own is not None
    return torch.cat(_by_group(rank, batch.land("replica_keys"), _list_lengths(rank, batch), own))


# ------------------------------------------------------------------------------------------------------------ gradients


def _gradient_lengths(rank: RankState, batch: BatchState, micro: int) -> list[int]:
    dims, shards = [b.store.dim for b in rank.bindings], rank.topology.num_shards
    lengths = []
    for g in range(rank.topology.num_groups):
        per_peer = [owner.replica_grads[g][micro].per_peer for owner in batch.owner]
        lengths.append(sum(message_counts(per_peer, dims, shards, rank.gradient_wire, lead=True)))
    return lengths


def replicate_grads(rank: RankState, batch: BatchState, micro: int) -> None:
    """Pass the gradients of the own group's sources on to the other owners of this shard, as they came."""
    message = batch.group_grads.pop(micro)
    _pass_on(rank, batch, "grads", micro, message, _gradient_lengths(rank, batch, micro), f"replica_grads/{micro}")


def recv_replica_grads(rank: RankState, batch: BatchState, micro: int) -> None:
    """Gradients of the other groups' sources into their boxes."""
    topology = rank.topology
    received = batch.land("replica_grads", micro)
    parts = _by_group(rank, received, _gradient_lengths(rank, batch, micro), received[:0])
    for number, message in enumerate(parts):
        if number != topology.group_number:
            moves = [owner.replica_grads[number][micro] for owner in batch.owner]
            put_gradients(rank, batch, micro, message, moves, topology.sources(number))


# ------------------------------------------------------------------------------------------------------------ averaging


def average_announce(rank: RankState, batch: BatchState, micro: int) -> None:
    """Note which rows may differ between the copies now; where averaging is due, tell the others how many there are."""
    if batch.verdict is None or not batch.verdict.ok:
        return
    for binding, owner in zip(rank.bindings, batch.owner):
        _touch(binding, owner)
    if batch.verdict.step % rank.topology.settings.average_every == 0:
        _announce(rank, batch)


def average_copies(rank: RankState, batch: BatchState) -> None:
    """Average now, in the stores: a batch without keys of its own. Collective."""
    _announce(rank, batch)
    average_send(rank, batch, 0)
    average_rows(rank, batch, 0)


def _announce(rank: RankState, batch: BatchState) -> None:
    for binding in rank.bindings:
        touched, store = _current(binding.store), binding.store
        rows = torch.empty(len(touched.keys), store.row_floats, dtype=torch.float32)
        batch.averaging.append(AveragedRows(touched.keys, touched.tables, touched.handles, rows))
        store.touched = None
    facts = torch.tensor([_facts(one) for one in batch.averaging]).flatten()
    group = rank.topology.replicas.group("rows")
    batch.post("replica_rows.sizes", 0, exchange_same(group, facts, f"{batch.tag}/replica_sizes"))


def _facts(one: AveragedRows) -> list[int]:
    """How many rows, and a number that tells whether they are the same in the same order."""
    odd = torch.arange(len(one.keys), dtype=torch.int64) * 2 + 1
    return [len(one.keys), int(((one.keys * 31 + one.tables) * odd).sum())]


def _touch(binding: StoreBinding, owner: OwnerKeys) -> None:
    store, found = binding.store, owner.union
    assert found is not None and found.retrieval is not None
    forget_evicted(store, owner)
    chosen = (found.retrieval.handles >= 0) & binding.trainable[found.tables.to(torch.int64)]
    before = _current(store)
    keys = torch.cat([before.keys, found.keys[chosen]])
    tables = torch.cat([before.tables, found.tables[chosen]])
    handles = torch.cat([before.handles, found.retrieval.handles[chosen]])
    once = dedup(keys, tables).unique_index
    store.touched = TouchedRows(keys[once], tables[once], handles[once], store.removals)


def forget_evicted(store: RowStore, owner: OwnerKeys) -> None:
    """Rows that a retrieval evicted are averaged no more."""
    retrieval = owner.union.retrieval if owner.union is not None else owner.retrieval
    if store.touched is None or retrieval is None or retrieval.journal is None:
        return
    keys, tables = store.evicted(retrieval)
    if len(keys):
        before = store.touched
        gone, _ = intersect(before.keys, before.tables, keys, tables)
        kept = torch.ones(len(before.keys), dtype=torch.bool)
        kept[gone] = False
        store.touched = TouchedRows(before.keys[kept], before.tables[kept], before.handles[kept], before.removals)


def _current(store: RowStore) -> TouchedRows:
    """What was noted so far, with handles that hold: rows that were removed from outside since then are left out."""
    noted = store.touched
    if noted is None:
        none = torch.empty(0, dtype=torch.int64)
        return TouchedRows(none, none.to(torch.int32), none, store.removals)
    if noted.removals == store.removals:
        return noted
    handles = store.find_handles(noted.keys, noted.tables)
    there = handles >= 0
    return TouchedRows(noted.keys[there], noted.tables[there], handles[there], store.removals)


def _in_buffer(one: AveragedRows, owner: OwnerKeys) -> tuple[Tensor, Tensor]:
    """(positions in `one`, rows of the owner's buffer) of rows that both have."""
    assert owner.retrieval is not None
    there, here = intersect(one.keys, one.tables, owner.keys, owner.tables)
    same = one.handles[there] == owner.retrieval.handles[here]
    return there[same], here[same]


def _owner(batch: BatchState, store: int) -> OwnerKeys | None:
    return batch.owner[store] if batch.owner else None


def _used_floats(binding: StoreBinding) -> int:
    store = binding.store
    return store.embedding_words + store.optimizer.state_floats(store.dim) + 1


def average_send(rank: RankState, batch: BatchState, micro: int) -> None:
    """This copy's rows, from the buffer where the batch has them and from the store, to the other copies."""
    if not batch.averaging:
        return
    facts = batch.land("replica_rows.sizes")
    mine = rank.topology.group_number
    for number in range(rank.topology.num_groups):
        if not torch.equal(facts[number], facts[mine]):
            raise CommunicationError(
                f"averaging: sparse groups {mine} and {number} hold different rows of shard {rank.topology.shard}: "
                f"{facts[mine, ::2].tolist()} and {facts[number, ::2].tolist()} to average; rows that are written, "
                "loaded or erased from outside must be so in all groups alike"
            )
    pieces = []
    for k, (binding, one) in enumerate(zip(rank.bindings, batch.averaging)):
        binding.store.gather(one.handles, one.keys, one.tables, one.rows, None)
        owner = _owner(batch, k)
        if owner is not None:
            assert owner.buffer is not None
            there, here = _in_buffer(one, owner)
            row_sync(owner.buffer, one.rows, here, there)
        pieces.append(one.rows[:, : _used_floats(binding)].reshape(-1))
    message = torch.cat(pieces)
    _pass_on(rank, batch, "rows", 0, message, [len(message)] * rank.topology.num_groups, "replica_rows")


def average_rows(rank: RankState, batch: BatchState, micro: int) -> None:
    """The mean of all copies into the buffer, for rows of this batch, and into the store for the others."""
    if not batch.averaging:
        return
    lengths = [one.rows.shape[0] * _used_floats(b) for b, one in zip(rank.bindings, batch.averaging)]
    received = batch.land("replica_rows")
    parts = _by_group(rank, received, [sum(lengths)] * rank.topology.num_groups, received[:0])
    by_store = [torch.split(part, lengths) if len(part) else () for part in parts]
    for k, (binding, one) in enumerate(zip(rank.bindings, batch.averaging)):
        width = _used_floats(binding)
        copies = [split[k].view(-1, width) if split else one.rows[:, :width].clone() for split in by_store]
        _put_mean(binding.store, copies, one.rows)
        others = torch.ones(len(one.keys), dtype=torch.bool)
        owner = _owner(batch, k)
        if owner is not None:
            assert owner.buffer is not None
            there, here = _in_buffer(one, owner)
            row_sync(one.rows, owner.buffer, there, here)
            others[there] = False
        binding.store.write_back(one.handles[others], one.rows[others])


def _put_mean(store: RowStore, copies: Sequence[Tensor], out: Tensor) -> None:
    """Write the mean of copies float32 [n, used words] into rows `out` float32 [n, row_floats]."""
    words = store.embedding_words
    end = words + store.optimizer.state_floats(store.dim)
    embedding = torch.zeros(len(out), store.dim, dtype=torch.float32)
    state = torch.zeros(len(out), end - words, dtype=torch.float32)
    for copy in copies:
        embedding += unpack_embeddings(copy, store.dim, store.data_type)
        state += copy[:, words:end]
    updates = torch.stack([copy[:, end].contiguous().view(torch.int32) for copy in copies]).amax(0)
    pack_embeddings(embedding / len(copies), out, store.data_type)
    out[:, words:end] = state / len(copies)
    out.view(torch.int32)[:, end] = updates


def patch_averaged(previous: BatchState, batch: BatchState) -> None:
    """Rows of this batch that were gathered before they were averaged after the batch before."""
    for owner, one in zip(batch.owner, previous.averaging):
        assert owner.buffer is not None
        there, here = _in_buffer(one, owner)
        row_sync(one.rows, owner.buffer, there, here)
