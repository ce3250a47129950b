"""The merge of sorted row files: every row once, in (index shard, key) order, in bounded parts; and its hash."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe_kernels.checkpoint.tools.hashing import hash_keys, hash_name, shards_of, slices_of
from nestpipe_kernels.checkpoint.tools.merge import merge_rows
from nestpipe_kernels.errors import CheckpointError
from nestpipe_kernels.ops.owners import NUM_SLICES, owners

TABLE = "item"
EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**62, -(2**31)]


class ArraySource:
    """A file whose columns are arrays; notes the reads."""

    def __init__(self, name: str, keys: np.ndarray) -> None:
        self.name = name
        self.keys = keys
        self.longest_read = 0

    @property
    def rows(self) -> int:
        return len(self.keys)

    def read(self, column: str, first_row: int, rows: int) -> np.ndarray:
        assert column == "keys" and first_row + rows <= self.rows
        self.longest_read = max(self.longest_read, rows)
        return self.keys[first_row : first_row + rows]


def in_order(keys: np.ndarray) -> np.ndarray:
    return keys[np.lexsort((keys, shards_of(hash_keys(hash_name(TABLE), keys))))]


def some_keys(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count, dtype=np.int64, endpoint=True)
    return np.unique(np.concatenate([drawn, EXTREMES]).astype(np.int64))


def split(keys: np.ndarray, files: int, seed: int = 1) -> list[ArraySource]:
    chosen = np.random.default_rng(seed).integers(0, files, len(keys))
    return [ArraySource(f"file {f}", in_order(keys[chosen == f])) for f in range(files)]


@pytest.mark.parametrize("name", ["", "item", "käse/表"])
def test_hash_is_the_stores(name: str) -> None:
    from nestpipe_kernels._native import core

    assert hash_name(name) == core().hash_name(name) % 2**64
    keys = some_keys(100_000)
    hashes = torch.tensor([hash_name(name)], dtype=torch.uint64).view(torch.int64)
    slices = owners(torch.from_numpy(keys), None, hashes, torch.arange(NUM_SLICES, dtype=torch.int32))
    assert (slices.numpy() == slices_of(hash_keys(hash_name(name), keys))).all()


@pytest.mark.parametrize("count", [0, 1, 63, 1000, 50_000])
@pytest.mark.parametrize("files", [1, 2, 5])
def test_every_row_once_in_order(count: int, files: int) -> None:
    keys = some_keys(count) if count else np.empty(0, np.int64)
    sources = split(keys, files)
    parts = list(merge_rows(TABLE, sources, 4096))
    merged = np.concatenate([keys[:0], *(part.keys for part in parts)])
    assert (merged == in_order(keys)).all() and len(merged) == len(keys)
    for part in parts:
        rows = np.concatenate([sources[s].keys[first : first + n] for s, first, n in part.takes])
        assert (rows[part.order] == part.keys).all()
        assert (part.hashes == hash_keys(hash_name(TABLE), part.keys)).all()
        assert len(part) <= 4096
        for position in range(0, len(part), 97):
            assert part.keys[position] in sources[part.origin[position]].keys
    assert all(source.longest_read <= 4096 for source in sources)


def test_files_are_taken_front_to_back() -> None:
    sources = split(some_keys(30_000), 3)
    taken = [0, 0, 0]
    for part in merge_rows(TABLE, sources, 4096):
        for source, first, rows in part.takes:
            assert first == taken[source]
            taken[source] += rows
    assert taken == [source.rows for source in sources]


def test_parts_are_sorted_by_owner_first() -> None:
    sources = split(some_keys(20_000), 3)
    for part in merge_rows(TABLE, sources, 4096, also_by=lambda hashes: slices_of(hashes) >> 14):
        owner = slices_of(part.hashes) >> 14
        assert (owner[1:] >= owner[:-1]).all()
        for rank in range(4):
            assert (part.keys[owner == rank] == in_order(part.keys[owner == rank])).all()


def test_files_without_rows_in_common_shards() -> None:
    """One file ends before the other begins."""
    keys = in_order(some_keys(5000))
    sources = [ArraySource("first", keys[:2500]), ArraySource("second", keys[2500:])]
    merged = np.concatenate([part.keys for part in merge_rows(TABLE, sources, 2048)])
    assert (merged == keys).all()


def test_a_key_of_two_files_is_named() -> None:
    keys = in_order(some_keys(3000))
    sources = [ArraySource("a.safetensors", keys[:2000]), ArraySource("b.safetensors", keys[1999:])]
    with pytest.raises(CheckpointError, match=rf"b\.safetensors: key {keys[1999]} is in a\.safetensors too"):
        list(merge_rows(TABLE, sources, 2048))


def test_two_checkpoints_may_share_keys() -> None:
    keys = in_order(some_keys(3000))
    sources = [ArraySource("a", keys[:2000]), ArraySource("b", keys[1000:])]
    parts = list(merge_rows(TABLE, sources, 2048, twice=True))
    merged, origin = (np.concatenate([getattr(p, f) for p in parts]) for f in ("keys", "origin"))
    twice = np.flatnonzero(merged[1:] == merged[:-1])
    assert (merged[twice] == keys[1000:2000]).all()
    assert (origin[twice] == 0).all() and (origin[twice + 1] == 1).all()


@pytest.mark.parametrize("at", [0, 1022, 1023, 1024, 2998])
def test_rows_out_of_order_are_named(at: int) -> None:
    """Also where one window's last row and the next one's first are swapped."""
    keys = in_order(some_keys(3000))
    keys[[at, at + 1]] = keys[[at + 1, at]]
    with pytest.raises(CheckpointError, match=r"a\.safetensors: rows must ascend by \(index shard, key\), got key"):
        list(merge_rows(TABLE, [ArraySource("a.safetensors", keys)], 1024))


def test_a_row_twice_in_a_file_is_named() -> None:
    keys = in_order(some_keys(100))
    keys[51] = keys[50]
    with pytest.raises(CheckpointError, match=rf"got key {keys[50]} of shard \d+ before key {keys[50]}"):
        list(merge_rows(TABLE, [ArraySource("a.safetensors", keys)], 1024))
