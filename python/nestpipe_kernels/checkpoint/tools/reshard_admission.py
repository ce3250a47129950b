"""Admission counts of one table dealt out to another number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe_kernels.checkpoint.files import FileRecord, TensorFile, TensorFileWriter, open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.manifest_parts import TableRecord
from nestpipe_kernels.checkpoint.names import admission_file
from nestpipe_kernels.checkpoint.tools.hashing import hash_keys, hash_name, slices_of
from nestpipe_kernels.checkpoint.tools.merge import merge_rows
from nestpipe_kernels.checkpoint.tools.row_files import RowFile
from nestpipe_kernels.errors import CheckpointError

__all__ = ["reshard_admission"]

_ROWS_AT_ONCE = 1 << 18
_CELLS_AT_ONCE = 4 << 20
_NUM_SLICES = 65536


def reshard_admission(
    source: tuple[Path, Manifest, TableRecord], target: tuple[Path, int, int], owner: NDArray[np.int32]
) -> dict[str, FileRecord]:
    """Write the admission files of one table; none where it has none.

    Exact counts go to the owners of their keys. A block of a filter goes to every rank that owns one of its slices; of
    blocks that several old ranks had a part of, the larger of each cell counts.

    Args:
        source: directory, manifest and table.
        target: directory, generation, number of the table.
        owner: int32 [65536], the new owner of each slice, ascending.

    Returns:
        The records of the files by name, by rank.

    Raises:
        CheckpointError: a file is damaged or no admission file. OSError: as the system says.
    """
    directory, manifest, table = source
    if not table.admission_files:
        return {}
    ranks = int(owner[-1]) + 1
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(open_tensor_file(directory / name, manifest.files[name]))
            for name in table.admission_files
        ]
        paths = [target[0] / admission_file(target[1], target[2], rank) for rank in range(ranks)]
        if all(set(file.regions) == {"keys", "counts"} for file in files):
            return _exact(table, files, paths, owner)
        if all(set(file.regions) == {"blocks", "cells"} for file in files):
            return _filter(files, paths, owner, table)
    raise CheckpointError(
        f"checkpoint: {directory / table.admission_files[0]}: admission counts must be keys and counts, or blocks and "
        f"cells, got {', '.join(files[0].regions) or 'nothing'}"
    )


def _exact(
    table: TableRecord, files: Sequence[TensorFile], paths: Sequence[Path], owner: NDArray[np.int32]
) -> dict[str, FileRecord]:
    counts = np.zeros(len(paths), np.int64)
    table_hash = hash_name(table.hash_name)
    for file in files:
        for first, rows in _steps(file.regions["keys"].shape[0], _ROWS_AT_ONCE):
            slices = slices_of(hash_keys(table_hash, file.read("keys", first, rows).numpy()))
            counts += np.bincount(owner[slices], minlength=len(paths))
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                TensorFileWriter(path, {"keys": (torch.int64, (rows,)), "counts": (torch.int64, (rows,))})
            )
            for path, rows in zip(paths, counts.tolist())
        ]
        sources = [RowFile(file) for file in files]
        for part in merge_rows(
            table.hash_name, sources, _ROWS_AT_ONCE, also_by=lambda hashes: owner[slices_of(hashes)]
        ):
            taken = [files[index].read("counts", first, rows) for index, first, rows in part.takes]
            values = torch.cat(taken)[torch.from_numpy(part.order)]
            bounds = np.searchsorted(owner[slices_of(part.hashes)], np.arange(len(paths) + 1)).tolist()
            for writer, first, end in zip(writers, bounds[:-1], bounds[1:]):
                writer.write("keys", torch.from_numpy(part.keys[first:end]))
                writer.write("counts", values[first:end])
        return {path.name: writer.close() for path, writer in zip(paths, writers)}


def _filter(
    files: Sequence[TensorFile], paths: Sequence[Path], owner: NDArray[np.int32], table: TableRecord
) -> dict[str, FileRecord]:
    numbers = [file.read("blocks").numpy() for file in files]
    width = {file.regions["cells"].shape[1:] for file in files}
    num_blocks = _num_blocks(table, files[0], width)
    for file, blocks in zip(files, numbers):
        if len(blocks) and not (blocks[0] >= 0 and blocks[-1] < num_blocks and (blocks[1:] > blocks[:-1]).all()):
            raise CheckpointError(f"checkpoint: {file.path}: blocks must ascend in 0 .. {num_blocks - 1}")
    slices_per_block = _NUM_SLICES // num_blocks
    held = np.unique(np.concatenate(numbers)) if numbers else np.empty(0, np.int64)
    first_owner = owner[held * slices_per_block]
    last_owner = owner[(held + 1) * slices_per_block - 1]
    cells = next(iter(width))[0]
    with contextlib.ExitStack() as stack:
        writers = []
        for rank, path in enumerate(paths):
            own = held[(first_owner <= rank) & (last_owner >= rank)]
            writer = TensorFileWriter(
                path, {"blocks": (torch.int64, (len(own),)), "cells": (torch.uint8, (len(own), cells))}
            )
            writers.append(stack.enter_context(writer))
            writer.write("blocks", torch.from_numpy(own))
        taken = [0] * len(files)
        for start, count in _steps(len(held), max(_CELLS_AT_ONCE // cells, 1)):
            some = held[start : start + count]
            merged = torch.zeros(count, cells, dtype=torch.uint8)
            for index, (file, blocks) in enumerate(zip(files, numbers)):
                until = int(np.searchsorted(blocks, some[-1], "right"))
                at = torch.from_numpy(np.searchsorted(some, blocks[taken[index] : until]))
                rows = file.read("cells", taken[index], until - taken[index])
                merged[at] = torch.maximum(merged[at], rows)
                taken[index] = until
            for rank, writer in enumerate(writers):
                mine = (first_owner[start : start + count] <= rank) & (last_owner[start : start + count] >= rank)
                if mine.any():
                    writer.write("cells", merged[torch.from_numpy(mine)])
        return {path.name: writer.close() for path, writer in zip(paths, writers)}


def _num_blocks(table: TableRecord, file: TensorFile, width: set[tuple[int, ...]]) -> int:
    """Blocks of the whole filter, from its bytes and those of a block."""
    rule = (table.admission or {}).get("filter")
    cells = rule.get("cells") if isinstance(rule, dict) else None
    if not isinstance(cells, int) or cells < 1:
        raise CheckpointError(f"checkpoint: {file.path}: table {table.name!r} has cells but no filter in its admission")
    blocks = 1
    while blocks < _NUM_SLICES and blocks * 2 * 512 <= cells:
        blocks *= 2
    if width != {(cells // blocks,)}:
        raise CheckpointError(
            f"checkpoint: {file.path}: cells must be of {cells // blocks} bytes a block, got {sorted(width)}"
        )
    return blocks


def _steps(total: int, at_once: int) -> Iterator[tuple[int, int]]:
    for first in range(0, total, at_once):
        yield first, min(at_once, total - first)
