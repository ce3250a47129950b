"""Rows, slots and metadata survive any change of the number of ranks."""

from __future__ import annotations

import torch
from store_cases import all_keys, contents, fill, load_stores, make_store, save_stores

from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.ops.owners import default_slice_owner, owners


def _saved(tmp_path, world: int = 1):
    stores = [make_store() for _ in range(world)]
    for rank, store in enumerate(stores):
        fill(store, rank, world)
    save_stores(tmp_path, stores)
    return stores


def test_fault_41_one_to_four_to_two_to_three_to_one_ranks_keep_every_row_and_slot(tmp_path) -> None:
    stores = _saved(tmp_path)
    expected = contents(stores)
    assert len(expected) == sum(keys.numel() for keys in all_keys())
    for world in (4, 2, 3, 1):
        stores = [make_store() for _ in range(world)]
        load_stores(tmp_path, stores)
        assert contents(stores) == expected
        for rank, store in enumerate(stores):  # rows lie where routing looks for them
            for table in range(3):
                keys = store.keys(table)
                numbers = torch.full((keys.numel(),), table, dtype=torch.int32)
                assert bool((owners(keys, numbers, store.table_hashes, default_slice_owner(world)) == rank).all())
        save_stores(tmp_path, stores)
    assert Manifest.load(tmp_path).generation == 5
