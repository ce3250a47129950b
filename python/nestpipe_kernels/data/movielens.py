"""MovieLens: does a user rate a film 4 or higher, from user, film and the films that the user rated just before.

Read are, told apart by their first line: RecBole's .inter (typed header `user_id:token ...`, tab-separated), u.data
(tab-separated, no header), ratings.dat (`::`), and CSV with a header (`userId,movieId,rating,timestamp` or
`user_id,movie_id,...`; further columns are ignored, quoted commas are fine). "Before" and the order of samples follow
the timestamp; equal timestamps follow the file's order. Ids are the keys, as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.data.batch import Batch
from nestpipe_kernels.data.dataset import DEFAULT_BATCH_SIZE, TableSchema
from nestpipe_kernels.data.text_files import csv_rows, malformed, parse_finite, parse_key, read_lines
from nestpipe_kernels.jagged import KeyedJaggedTensor

__all__ = ["MovieLensDataset", "Ratings", "read_ratings"]

_KNOWN_FILES = ("u.data", "ratings.dat", "ratings.csv")
_COLUMN_NAMES = {
    "user": ("user_id", "userId"),
    "item": ("item_id", "movie_id", "movieId"),
    "rating": ("rating",),
    "timestamp": ("timestamp",),
}


@dataclass
class Ratings:
    """All ratings of a file, in its order."""

    users: Tensor
    """int64 [n]"""
    items: Tensor
    """int64 [n]"""
    ratings: Tensor
    """float32 [n]"""
    timestamps: Tensor
    """float64 [n], seconds."""


def read_ratings(path: str | Path) -> Ratings:
    """Read a ratings file, or the ratings file of a folder (*.inter, u.data, ratings.dat or ratings.csv).

    Raises:
        FileNotFoundError: no such file, or a folder without one.
        ValueError: an empty or unknown file or a wrong row, with file, line, expected and got.
    """
    path = _find_file(Path(path))
    columns: tuple[list[int], list[int], list[float], list[float]] = ([], [], [], [])
    for number, user, item, rating, timestamp in _rows(path):
        columns[0].append(parse_key(user, path, number, "user"))
        columns[1].append(parse_key(item, path, number, "item"))
        columns[2].append(parse_finite(rating, path, number, "rating"))
        columns[3].append(parse_finite(timestamp, path, number, "timestamp"))
    if not columns[0]:
        raise ValueError(f"movielens: {path} has a header but no ratings")
    return Ratings(
        torch.tensor(columns[0], dtype=torch.int64),
        torch.tensor(columns[1], dtype=torch.int64),
        torch.tensor(columns[2], dtype=torch.float32),
        torch.tensor(columns[3], dtype=torch.float64),
    )


def _find_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [*sorted(path.glob("*.inter")), *(path / name for name in _KNOWN_FILES if (path / name).is_file())]
    if not found:
        raise FileNotFoundError(f"movielens: the folder {path} has none of *.inter, {', '.join(_KNOWN_FILES)}")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"movielens: the folder {path} has several ratings files ({names}); name one of them")
    return found[0]


def _rows(path: Path) -> Iterator[tuple[int, str, str, str, str]]:
    """(line number, user, item, rating, timestamp) as text."""
    lines = read_lines(path, "movielens")
    first = next(lines, "")
    if "::" in first:
        rows = (line.split("::") for line in _again(first, lines))
        yield from _pick(path, 1, rows, (0, 1, 2, 3), 4)
    elif ":token" in first:
        names = [column.split(":")[0] for column in first.split("\t")]
        yield from _pick(path, 2, (line.split("\t") for line in lines), _positions(names, path), len(names))
    elif "\t" in first:
        yield from _pick(path, 1, (line.split("\t") for line in _again(first, lines)), (0, 1, 2, 3), 4)
    elif "," in first and not first[0].isdigit():
        names = next(csv_rows([first], path, 1))
        yield from _pick(path, 2, csv_rows(lines, path, 2), _positions(names, path), len(names))
    else:
        layouts = "a .inter header, tab-separated u.data, ratings.dat with ::, or a CSV header"
        raise malformed(path, 1, layouts, first)


def _again(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _positions(names: Sequence[str], path: Path) -> tuple[int, ...]:
    """Where user, item, rating and timestamp stand among the header's names."""
    found = []
    for choices in _COLUMN_NAMES.values():
        at = [i for i, name in enumerate(names) if name in choices]
        if len(at) != 1:
            raise malformed(path, 1, f"one column {' or '.join(choices)} in the header", ",".join(names))
        found.append(at[0])
    return tuple(found)


def _pick(
    path: Path, first_line: int, rows: Iterator[list[str]], positions: Sequence[int], num_fields: int
) -> Iterator[tuple[int, str, str, str, str]]:
    user, item, rating, timestamp = positions
    for number, fields in enumerate(rows, first_line):
        if len(fields) != num_fields:
            raise malformed(path, number, f"{num_fields} fields", fields)
        yield number, fields[user], fields[item], fields[rating], fields[timestamp]


class MovieLensDataset:
    """One sample per rating, by time.

    Features: `user`, `item`, and `history`, the up to `history_length` films that the user rated before (oldest
    first; an empty bag for a user's first rating). `history` shares the table `item`. Label: rating >= 4.

    Args:
        path: a ratings file or its folder.
        history_length: most films of a history, >= 0.

    Raises:
        FileNotFoundError, ValueError: as `read_ratings`; ValueError for a negative history_length.
    """

    name = "movielens"
    num_dense = 0
    feature_names = ("user", "item", "history")
    tables = (TableSchema("user", ("user",)), TableSchema("item", ("item", "history")))
    default_batch_size = DEFAULT_BATCH_SIZE

    def __init__(self, path: str | Path, history_length: int = 50) -> None:
        if history_length < 0:
            raise ValueError(f"movielens: history_length must be >= 0, got {history_length}")
        table = read_ratings(path)
        users, timestamps = table.users.numpy(), table.timestamps.numpy()
        # A user's ratings side by side, by time (lexsort is stable): a history is then one slice of `_by_user`.
        by_user = np.lexsort((timestamps, users))
        is_first = np.diff(users[by_user], prepend=users[by_user[0]] + 1) != 0
        place = np.arange(len(users))
        since_first = place - np.maximum.accumulate(np.where(is_first, place, 0))
        length = np.minimum(since_first, history_length)
        place_of = np.empty_like(place)
        place_of[by_user] = place

        by_time = np.argsort(timestamps, kind="stable")
        place_by_time = place_of[by_time]
        self._users = table.users[torch.from_numpy(by_time)]
        self._items = table.items[torch.from_numpy(by_time)]
        self._labels = (table.ratings[torch.from_numpy(by_time)] >= 4).to(torch.float32)
        self._by_user = table.items[torch.from_numpy(by_user)]
        self._history_length = torch.from_numpy(length[place_by_time])
        self._history_start = torch.from_numpy(place_by_time) - self._history_length

    def __len__(self) -> int:
        return self._labels.numel()

    def batch(self, indices: Tensor) -> Batch:
        """The ratings at `indices` (int64 [m], positions in time order)."""
        size = indices.numel()
        lengths = self._history_length[indices]
        ends = torch.cumsum(lengths, 0)
        shift = torch.repeat_interleave(self._history_start[indices] - (ends - lengths), lengths)
        history = self._by_user[torch.arange(shift.numel()) + shift]
        sparse = KeyedJaggedTensor(
            self.feature_names,
            torch.cat([self._users[indices], self._items[indices], history]),
            lengths=torch.cat([torch.ones(2 * size, dtype=torch.int64), lengths]),
            stride=size,
        )
        return Batch(torch.empty(size, 0), sparse, self._labels[indices])
