"""Rows of one table in two checkpoints, at whatever numbers of ranks: streamed side by side, compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.manifest_parts import TableRecord
from nestpipe_kernels.checkpoint.tools.merge import Part, merge_rows
from nestpipe_kernels.checkpoint.tools.row_files import RowFile, open_rows, read_column, rows_at_once
from nestpipe_kernels.errors import CheckpointError

__all__ = ["ColumnDifference", "KeyDifference", "RowsDifference", "Side", "compare_files", "compare_rows"]

_COPIES = 8
"""Of the widest column, alive at once: pieces, joined, both sides picked, and their comparison."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class KeyDifference:
    """Keys that one checkpoint alone has: how many, and the first of them in file order."""

    number: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, keys: NDArray[np.int64], show: int) -> None:
        """Count further keys int64 [n]."""
        self.number += len(keys)
        self.first += keys[: max(show - len(self.first), 0)].tolist()


@dataclass
class ColumnDifference:
    """One column's rows that differ.

    Attributes:
        rows: how many.
        largest: of |a - b| over all elements that are finite in both.
        examples: (key, element, a, b) of the first of them: its first element that differs.
    """

    rows: int = 0
    largest: float = 0.0
    examples: list[tuple[int, int, float | int, float | int]] = field(default_factory=list)


@dataclass
class RowsDifference:
    """Everything about the rows of one table."""

    common: int = 0
    only_first: KeyDifference = field(default_factory=KeyDifference)
    only_second: KeyDifference = field(default_factory=KeyDifference)
    columns: dict[str, ColumnDifference] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """No difference at all."""
        return not (self.only_first.number or self.only_second.number or any(c.rows for c in self.columns.values()))


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints."""

    directory: Path
    manifest: Manifest
    table: TableRecord


def compare_rows(first: Side, second: Side, columns: Sequence[str], show: int) -> RowsDifference:
    """Read the named columns of both and compare the rows of common keys.

    Embeddings of different storage types are compared as float32; everything else bit by bit.

    Args:
        first, second: must have the same hash name, and columns of the same width.
        columns: names of tensors that both have.
        show: examples kept of each difference.

    Raises:
        CheckpointError: a file is damaged, or rows are not as the format demands.
        OSError: the system could not read.
    """
    rows = rows_at_once([first.table, second.table], _COPIES)
    with (
        open_rows(first.directory, first.manifest, first.table) as ours,
        open_rows(second.directory, second.manifest, second.table) as theirs,
    ):
        return compare_files(first.table.hash_name, (ours, theirs), columns, rows, show)


def compare_files(
    hash_name: str,
    sides: tuple[Sequence[RowFile], Sequence[RowFile]],
    columns: Sequence[str],
    rows: int,
    show: int,
) -> RowsDifference:
    """Compare open files with `keys` and the named columns, `rows` at a time. Raises as `compare_rows`."""
    found = RowsDifference(columns={name: ColumnDifference() for name in columns})
    files = [*sides[0], *sides[1]]
    for part in merge_rows(hash_name, files, rows, twice=True):
        left, right = _compare_keys(found, part, files, len(sides[0]), show)
        for name in columns:
            data = _same_type(files, part, name)
            _compare_column(found.columns[name], data, part, left, right, show)
    return found


def _compare_keys(
    found: RowsDifference, part: Part, files: Sequence[RowFile], num_first: int, show: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Counts keys; returns the positions in the part of the common ones, of either side."""
    of_first = part.origin < num_first
    left = np.flatnonzero(part.keys[1:] == part.keys[:-1])
    bad = of_first[left] == of_first[left + 1]
    if bad.any():
        at = int(left[int(np.argmax(bad))])
        names = files[int(part.origin[at])].name, files[int(part.origin[at + 1])].name
        raise CheckpointError(f"checkpoint: {names[1]}: key {part.keys[at]} is in {names[0]} too; a key has one row")
    alone = np.ones(len(part), bool)
    alone[left] = alone[left + 1] = False
    found.common += len(left)
    found.only_first.add(part.keys[alone & of_first], show)
    found.only_second.add(part.keys[alone & ~of_first], show)
    return left, left + 1


def _same_type(files: Sequence[RowFile], part: Part, column: str) -> Tensor:
    """As read_column; float32 where the takes differ in type."""
    types = {files[source].file.regions[column].dtype for source, _, _ in part.takes}
    if len(types) == 1:
        return read_column(files, part, column)
    pieces = [files[source].file.read(column, first, rows).to(torch.float32) for source, first, rows in part.takes]
    return torch.cat(pieces)


def _compare_column(
    difference: ColumnDifference,
    data: Tensor,
    part: Part,
    left: NDArray[np.int64],
    right: NDArray[np.int64],
    show: int,
) -> None:
    bits = data.view(_BITS[data.element_size()]).reshape(len(data), -1)
    of_first, of_second = (torch.from_numpy(part.order[side]) for side in (left, right))
    unequal = torch.ne(bits[of_first], bits[of_second])
    rows = unequal.any(1).nonzero().flatten()
    if rows.numel() == 0:
        return
    difference.rows += rows.numel()
    values = data.reshape(len(data), -1)
    a, b = values[of_first[rows]], values[of_second[rows]]
    distance = (a.to(torch.float64) - b.to(torch.float64)).abs()
    finite = distance[distance.isfinite()]
    if finite.numel():
        difference.largest = max(difference.largest, float(finite.max()))
    for n in range(min(show - len(difference.examples), rows.numel())):
        element = int(unequal[rows[n]].to(torch.uint8).argmax())
        key = int(part.keys[left[int(rows[n])]])
        difference.examples.append((key, element, a[n, element].item(), b[n, element].item()))
