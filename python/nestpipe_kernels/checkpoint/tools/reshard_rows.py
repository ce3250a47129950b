"""Rows of one table dealt out to another number of ranks: merged from the old files, split by owner, streamed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe_kernels.checkpoint.files import FileRecord, TensorFileWriter
from nestpipe_kernels.checkpoint.layout import DTYPES
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.manifest_parts import TableFile, TableRecord
from nestpipe_kernels.checkpoint.names import table_file
from nestpipe_kernels.checkpoint.tools.hashing import hash_keys, hash_name, slices_of
from nestpipe_kernels.checkpoint.tools.merge import Part, merge_rows
from nestpipe_kernels.checkpoint.tools.row_files import RowFile, open_rows, read_column, rows_at_once
from nestpipe_kernels.checkpoint.tools.text import Progress
from nestpipe_kernels.checkpoint.workers import OrderedWorkers

__all__ = ["owner_of_slices", "reshard_table", "slices_of_rank"]

_COPIES = 10
"""Of the widest column, alive at once: pieces and joined here; what waits for the workers; joined and sorted there."""
_BYTES_BEHIND = 6 << 20
_KEYS_AT_ONCE = 1 << 18
NUM_SLICES = 65536


def owner_of_slices(ranks: int) -> NDArray[np.uint16]:
    """uint16 [65536], ascending: the rank that owns each slice."""
    return (np.arange(NUM_SLICES, dtype=np.int64) * ranks // NUM_SLICES).astype(np.uint16)


def slices_of_rank(owner: NDArray[np.uint16], rank: int) -> tuple[int, int]:
    """(first, end) of a rank's slices; (0, 0) if it owns none."""
    first, end = np.searchsorted(owner, [rank, rank + 1], "left").tolist()
    return (first, end) if end > first else (0, 0)


def reshard_table(
    source: tuple[Path, Manifest, TableRecord], target: tuple[Path, int, int, int], meter: Progress
) -> tuple[TableRecord, dict[str, FileRecord]]:
    """Write the row files of one table.

    Args:
        source: directory, manifest and table.
        target: directory, generation, number of the table, number of ranks.
        meter: told of the bytes that were read.

    Returns:
        The table's record (admission files apart), and the records of its files by name.

    Raises:
        CheckpointError: a file is damaged, or its rows are not in order or not distinct.
        OSError: full disk, no permission, ...: files of this table that are not complete are gone.
    """
    directory, manifest, table = source
    out, generation, number, ranks = target
    owner = owner_of_slices(ranks)
    with open_rows(directory, manifest, table) as files:
        counts = _count_rows(files, table, owner, ranks)
    names = [table_file(generation, number, rank) for rank in range(ranks)]
    with contextlib.ExitStack() as stack:
        files = stack.enter_context(open_rows(directory, manifest, table))
        writers = [
            stack.enter_context(TensorFileWriter(out / name, _tensors(table, rows), inline=True))
            for name, rows in zip(names, counts)
        ]
        parts = merge_rows(
            table.hash_name, files, rows_at_once([table], _COPIES), also_by=lambda hashes: owner[slices_of(hashes)]
        )
        columns = [name for name in table.tensors(0) if name != "keys"]
        workers = OrderedWorkers(_BYTES_BEHIND, f"write table {number}")
        stack.callback(workers.cancel)
        for part in parts:
            meter.add(_move(part, files, columns, writers, owner, workers))
        workers.finish()
        records = {name: writer.close() for name, writer in zip(names, writers)}
    placed = [
        TableFile(name, rank, rows, *slices_of_rank(owner, rank))
        for rank, (name, rows) in enumerate(zip(names, counts))
    ]
    return replace(table, files=placed, admission_files=[]), records


def _tensors(table: TableRecord, rows: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (DTYPES[dtype], shape) for name, (dtype, shape) in table.tensors(rows).items()}


def _count_rows(files: Sequence[RowFile], table: TableRecord, owner: NDArray[np.uint16], ranks: int) -> list[int]:
    """Rows that each of the new ranks gets."""
    table_hash = hash_name(table.hash_name)
    counts = np.zeros(ranks, np.int64)
    for file in files:
        for first in range(0, file.rows, _KEYS_AT_ONCE):
            keys = file.read("keys", first, min(_KEYS_AT_ONCE, file.rows - first))
            counts += np.bincount(owner[slices_of(hash_keys(table_hash, keys))], minlength=ranks)
    result: list[int] = counts.tolist()
    return result


def _move(
    part: Part,
    files: Sequence[RowFile],
    columns: Sequence[str],
    writers: Sequence[TensorFileWriter],
    owner: NDArray[np.uint16],
    workers: OrderedWorkers,
) -> int:
    """All columns of a part, each to the files of its rows' owners; returns the bytes.

    This thread reads, the workers sort and write, column by column in the order of the parts.
    """
    owners = owner[slices_of(part.hashes)]
    bounds = np.searchsorted(owners, np.arange(len(writers) + 1)).tolist()
    order = None if (part.order[1:] > part.order[:-1]).all() else torch.from_numpy(part.order)
    keys = torch.from_numpy(part.keys)
    workers.put("keys", _Task("keys", keys, None, bounds, writers), keys.nbytes)
    num_bytes = keys.nbytes
    for name in columns:
        data = read_column(files, part, name)
        num_bytes += data.nbytes
        workers.put(name, _Task(name, data, order, bounds, writers), 2 * data.nbytes)
    return num_bytes


@dataclass
class _Task:
    """Sort one column of a part and write it."""

    name: str
    data: Tensor
    order: Tensor | None
    """None: it is sorted."""
    bounds: Sequence[int]
    writers: Sequence[TensorFileWriter]

    def __call__(self) -> None:
        data = self.data if self.order is None else self.data.index_select(0, self.order)
        for writer, first, end in zip(self.writers, self.bounds[:-1], self.bounds[1:]):
            if end > first:
                writer.write(self.name, data[first:end])
