"""Admission counts of one table dealt out to another number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe_kernels.checkpoint.files import FileRecord, TensorFile, TensorFileWriter
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.manifest_parts import TableRecord
from nestpipe_kernels.checkpoint.names import admission_file
from nestpipe_kernels.checkpoint.tools.admission_files import EXACT, FILTER, Blocks, kind_of, open_admission
from nestpipe_kernels.checkpoint.tools.hashing import hash_keys, hash_name, slices_of
from nestpipe_kernels.checkpoint.tools.merge import merge_rows
from nestpipe_kernels.checkpoint.tools.reshard_rows import slices_of_rank
from nestpipe_kernels.checkpoint.tools.row_files import RowFile

__all__ = ["reshard_admission"]

_ROWS_AT_ONCE = 1 << 18


def reshard_admission(
    source: tuple[Path, Manifest, TableRecord], target: tuple[Path, int, int], owner: NDArray[np.uint16]
) -> dict[str, FileRecord]:
    """Write the admission files of one table; none where it has none.

    Exact counts go to the owners of their keys. A block of a filter goes to every rank that owns one of its slices;
    where it takes the block from several old ranks, the larger of each cell counts.

    Args:
        source: directory, manifest and table.
        target: directory, generation, number of the table.
        owner: uint16 [65536], the new owner of each slice, ascending.

    Returns:
        The records of the files by name, by rank.

    Raises:
        CheckpointError: a file is damaged or no admission file. OSError: as the system says.
    """
    directory, manifest, table = source
    if not table.admission_files:
        return {}
    ranks = int(owner[-1]) + 1
    paths = [target[0] / admission_file(target[1], target[2], rank) for rank in range(ranks)]
    with open_admission(directory, manifest, table) as files:
        return {EXACT: _exact, FILTER: _filter}[kind_of(files)](table, files, paths, owner)


def _exact(
    table: TableRecord, files: Sequence[TensorFile], paths: Sequence[Path], owner: NDArray[np.uint16]
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
                TensorFileWriter(path, {"keys": (torch.int64, (rows,)), "counts": (torch.int64, (rows,))}, inline=True)
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
    table: TableRecord, files: Sequence[TensorFile], paths: Sequence[Path], owner: NDArray[np.uint16]
) -> dict[str, FileRecord]:
    """A new rank takes blocks from the old ranks whose slices meet its own, as loading does."""
    blocks = Blocks(files, table)
    bounds = [slices_of_rank(owner, rank) for rank in range(len(paths))]
    sources = [
        {index for index, file in enumerate(table.files) if file.first_slice < end and first < file.end_slice}
        for first, end in bounds
    ]
    with contextlib.ExitStack() as stack:
        writers = []
        for path, (first, end), taken in zip(paths, bounds, sources):
            own = blocks.meeting(blocks.held_by(taken), first, end)
            shapes = {"blocks": (torch.int64, (len(own),)), "cells": (torch.uint8, (len(own), blocks.cells_per_block))}
            writers.append(stack.enter_context(TensorFileWriter(path, shapes, inline=True)))
            writers[-1].write("blocks", torch.from_numpy(own))
        for part in blocks.parts(blocks.held_by(range(len(files)))):
            for writer, (first, end), taken in zip(writers, bounds, sources):
                own = blocks.meeting(part.held_by(taken), first, end)
                if len(own):
                    writer.write("cells", part.cells(own, taken))
        return {path.name: writer.close() for path, writer in zip(paths, writers)}


def _steps(total: int, at_once: int) -> Iterator[tuple[int, int]]:
    for first in range(0, total, at_once):
        yield first, min(at_once, total - first)
