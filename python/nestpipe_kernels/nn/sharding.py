"""Whole tables with a fixed vocabulary out of all ranks' stores, and the keys of them that this rank owns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.comm import SparseGroups, Topology, communicator_for
from nestpipe_kernels.nn.weights import pieces, read_embeddings
from nestpipe_kernels.ops.owners import default_slice_owner, owners
from nestpipe_kernels.types import RowStore

__all__ = ["all_rows", "owned_keys", "rank_quota"]


def rank_quota(capacity: int | None, process_group: Any, sparse_groups: SparseGroups) -> int | None:
    """This rank's share of a table's capacity; shares of all ranks of a sparse group sum to it."""
    if capacity is None:
        return None
    topology = Topology(communicator_for(process_group), sparse_groups)
    return capacity // topology.num_shards + (topology.shard < capacity % topology.num_shards)


def owned_keys(
    store: RowStore, table: int, num_embeddings: int, process_group: Any, sparse_groups: SparseGroups
) -> Tensor:
    """int64 [m]: the ids of a fixed vocabulary that this rank owns, ascending."""
    topology = Topology(communicator_for(process_group), sparse_groups)
    keys = torch.arange(num_embeddings)
    if topology.num_shards == 1:
        return keys
    return keys[_owners(store, table, keys, topology.num_shards) == topology.shard]


def all_rows(
    store: RowStore, table: int, num_embeddings: int, process_group: Any, sparse_groups: SparseGroups
) -> Tensor:
    """float32 [num_embeddings, dim]: every id's embedding, from the rank of the first sparse group that owns it.

    Collective over `process_group` if it has several ranks: all of them must ask for the same tables in the same order.
    """
    communicator = communicator_for(process_group)
    if communicator.size == 1:
        return read_embeddings(store, table, torch.arange(num_embeddings))
    topology = Topology(communicator, sparse_groups)
    group = communicator.group("control")
    weight = torch.empty(num_embeddings, store.dim, dtype=torch.float32)
    for start, stop in pieces(num_embeddings):
        keys = torch.arange(start, stop)
        owner = _owners(store, table, keys, topology.num_shards)
        by_rank = torch.argsort(owner, stable=True)
        per_rank = torch.bincount(owner, minlength=communicator.size).tolist()
        mine = read_embeddings(store, table, keys[owner == communicator.rank])
        handle = group.all_to_all(
            mine.repeat(communicator.size, 1),
            [mine.size(0)] * communicator.size,
            per_rank,
            f"weight of table {store.tables[table].name!r}, ids from {start}",
        )
        weight[keys[by_rank]] = handle.wait()
    return weight


def _owners(store: RowStore, table: int, keys: Tensor, world_size: int) -> Tensor:
    tables = torch.full((keys.numel(),), table, dtype=torch.int32)
    return owners(keys, tables, store.table_hashes, default_slice_owner(world_size)).to(torch.int64)
