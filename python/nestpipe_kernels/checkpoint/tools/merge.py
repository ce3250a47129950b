"""Rows of one table from several sorted files as one stream in the same order, a bounded part at a time.

Row files, and those of exact admission counts, are sorted by (index shard, key). A window of keys of each file is
looked at; rows up to the smallest of the windows' last keys can come from no later window, so they are a part: how
many rows it takes from each file, and the permutation that sorts them. Columns are then read in file order, front to
back, one by one: a part costs memory for its keys and for the columns that are being moved, whatever the size of a
table or of an index shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nestpipe_kernels.checkpoint.tools.hashing import hash_keys, hash_name, shards_of
from nestpipe_kernels.errors import CheckpointError

__all__ = ["Part", "RowSource", "check_sorted", "merge_rows"]


class RowSource(Protocol):
    """One row file (or several that follow each other)."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def rows(self) -> int: ...

    def read(self, column: str, first_row: int, rows: int) -> NDArray[Any]:
        """[rows, ...] of a column."""
        ...


@dataclass
class Part:
    """Rows that follow each other in (index shard, key) order.

    Attributes:
        takes: (source, first row, rows) in the order of the sources: what the part consists of.
        order: int64 [n], positions within the takes' rows, sorted.
        keys: int64 [n], sorted.
        hashes: uint64 [n], of `keys`.
        origin: int32 [n], the source that each row comes from, sorted.
    """

    takes: list[tuple[int, int, int]]
    order: NDArray[np.int64]
    keys: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    origin: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass
class _Window:
    source: RowSource
    index: int
    read_to: int = 0
    keys: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    shards: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    last_shard: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """[0 or 1] of the last row that was read, in the window or not."""
    last_key: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def finished(self) -> bool:
        """Everything of the file is in the window or has left it."""
        return self.read_to == self.source.rows

    def refill(self, rows: int, table_hash: int) -> None:
        missing = min(rows - len(self.keys), self.source.rows - self.read_to)
        if missing <= 0:
            return
        keys = np.ascontiguousarray(self.source.read("keys", self.read_to, missing), dtype=np.int64)
        hashes = hash_keys(table_hash, keys)
        shards = shards_of(hashes)
        check_sorted(self.source.name, np.concatenate([self.last_shard, shards]), np.concatenate([self.last_key, keys]))
        self.last_shard, self.last_key = shards[-1:], keys[-1:]
        self.keys = np.concatenate([self.keys, keys])
        self.hashes = np.concatenate([self.hashes, hashes])
        self.shards = np.concatenate([self.shards, shards])
        self.read_to += missing

    def rows_up_to(self, bound: tuple[int, int]) -> int:
        """How many of the window's rows do not come after (shard, key)."""
        first = int(np.searchsorted(self.shards, bound[0], "left"))
        last = int(np.searchsorted(self.shards, bound[0], "right"))
        return first + int(np.searchsorted(self.keys[first:last], bound[1], "right"))

    def last(self) -> tuple[int, int]:
        return int(self.shards[-1]), int(self.keys[-1])

    def drop(self, rows: int) -> None:
        self.keys, self.hashes, self.shards = self.keys[rows:], self.hashes[rows:], self.shards[rows:]


def check_sorted(name: str, shards: NDArray[np.uint8], keys: NDArray[np.int64]) -> None:
    """Raise CheckpointError, naming the file, unless rows ascend by (index shard, key)."""
    ascending = (shards[1:] > shards[:-1]) | ((shards[1:] == shards[:-1]) & (keys[1:] > keys[:-1]))
    if not ascending.all():
        at = int(np.argmin(ascending))
        raise CheckpointError(
            f"{name}: rows must ascend by (index shard, key), got key {keys[at]} of shard {shards[at]} before key "
            f"{keys[at + 1]} of shard {shards[at + 1]}"
        )


def merge_rows(
    table: str,
    sources: Sequence[RowSource],
    rows_in_part: int,
    *,
    also_by: Callable[[NDArray[np.uint64]], NDArray[Any]] | None = None,
    twice: bool = False,
) -> Iterator[Part]:
    """Yield the rows of all sources in (index shard, key) order.

    Args:
        table: the name that hashes of the table's keys start from.
        sources: sorted files.
        rows_in_part: at most so many rows are looked at at once (but one of each source).
        also_by: hashes -> number: rows of a part are sorted by that first (their owners, say); 16 bits are fastest.
        twice: a key may come from two sources (of two checkpoints); they then follow each other in source order.

    Raises:
        CheckpointError: a source is not sorted, or a key comes twice.
    """
    table_hash = hash_name(table)
    windows = [_Window(source, index) for index, source in enumerate(sources)]
    size = max(rows_in_part // max(len(windows), 1), 1)
    while True:
        for window in windows:
            window.refill(size, table_hash)
        windows = [window for window in windows if len(window.keys)]
        if not windows:
            return
        bound = min((w.last() for w in windows if not w.finished), default=max(w.last() for w in windows))
        counts = [window.rows_up_to(bound) for window in windows]
        part = _part(windows, counts, also_by)
        if not twice:
            _check_distinct(part, sources)
        for window, count in zip(windows, counts):
            window.drop(count)
        yield part


def _part(
    windows: list[_Window], counts: list[int], also_by: Callable[[NDArray[np.uint64]], NDArray[Any]] | None
) -> Part:
    taken = [(w, n) for w, n in zip(windows, counts) if n]
    keys = np.concatenate([w.keys[:n] for w, n in taken])
    hashes = np.concatenate([w.hashes[:n] for w, n in taken])
    origin = np.repeat(np.array([w.index for w, _ in taken], np.int32), [n for _, n in taken])
    by = [] if len(taken) == 1 else [keys, np.concatenate([w.shards[:n] for w, n in taken])]
    if also_by is not None:
        by.append(also_by(hashes))
    order = np.lexsort(by) if by else np.arange(len(keys))
    takes = [(w.index, w.read_to - len(w.keys), n) for w, n in taken]
    return Part(takes, order, keys[order], hashes[order], origin[order])


def _check_distinct(part: Part, sources: Sequence[RowSource]) -> None:
    same = part.keys[1:] == part.keys[:-1]
    if same.any():
        at = int(np.argmax(same))
        names = sources[int(part.origin[at])].name, sources[int(part.origin[at + 1])].name
        raise CheckpointError(f"{names[1]}: key {part.keys[at]} is in {names[0]} too; a key has one row")
