"""Admission counts of one table in a checkpoint: which kind, and the blocks of a filter over all ranks, streamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe_kernels.checkpoint.files import TensorFile, open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.manifest_parts import TableRecord
from nestpipe_kernels.errors import CheckpointError

__all__ = ["EXACT", "FILTER", "BlockPart", "Blocks", "kind_of", "open_admission"]

EXACT, FILTER = "exact", "filter"
_CELLS_AT_ONCE = 4 << 20
_NUM_SLICES = 65536
_SMALLEST_BLOCK = 512


@contextlib.contextmanager
def open_admission(directory: Path, manifest: Manifest, table: TableRecord) -> Iterator[list[TensorFile]]:
    """All admission files of a table, by rank. Raises CheckpointError or OSError, naming the file."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(open_tensor_file(directory / name, manifest.files[name]))
            for name in table.admission_files
        ]


def kind_of(files: Sequence[TensorFile]) -> str:
    """EXACT or FILTER. Raises CheckpointError for anything else."""
    kinds = {frozenset({"counts", "keys"}): EXACT, frozenset({"blocks", "cells"}): FILTER}
    found = [kinds.get(frozenset(file.regions)) for file in files]
    for file, kind in zip(files, found):
        if kind is None or kind != found[0]:
            raise CheckpointError(
                f"checkpoint: {file.path}: admission counts must be keys and counts, or blocks and cells, on all ranks "
                f"alike, got {', '.join(file.regions) or 'nothing'}"
            )
    return found[0] or EXACT


@dataclass
class BlockPart:
    """Some blocks that follow each other, from each file that has them."""

    numbers: list[NDArray[np.int64]]
    """By file: which blocks, ascending."""
    rows: list[Tensor]
    """By file: uint8 [n, cells_per_block]."""

    def held_by(self, files: Iterable[int]) -> NDArray[np.int64]:
        """Numbers of the blocks that one of some files has, ascending."""
        return _union(self.numbers, files)

    def cells(self, wanted: NDArray[np.int64], files: Iterable[int]) -> Tensor:
        """uint8 [n, cells_per_block] of blocks (ascending); where several of the files have one, the larger cells."""
        merged = torch.zeros(len(wanted), self.rows[0].shape[1], dtype=torch.uint8)
        for index in files:
            common, at, there = np.intersect1d(wanted, self.numbers[index], assume_unique=True, return_indices=True)
            if len(common):
                here = torch.from_numpy(at)
                merged[here] = torch.maximum(merged[here], self.rows[index][torch.from_numpy(there)])
        return merged


class Blocks:
    """The blocks of a table's filter in the files of all ranks.

    Raises:
        CheckpointError: files that do not fit the table's rule, or blocks out of order.
    """

    def __init__(self, files: Sequence[TensorFile], table: TableRecord) -> None:
        self._files = files
        self._numbers: list[NDArray[np.int64]] = [file.read("blocks").numpy() for file in files]
        self.num_blocks = _num_blocks(table, files)
        for file, blocks in zip(files, self._numbers):
            inside = not len(blocks) or (blocks[0] >= 0 and blocks[-1] < self.num_blocks)
            if not (inside and (blocks[1:] > blocks[:-1]).all()):
                raise CheckpointError(f"checkpoint: {file.path}: blocks must ascend in 0 .. {self.num_blocks - 1}")
        self.cells_per_block = files[0].regions["cells"].shape[1]

    def held_by(self, files: Iterable[int]) -> NDArray[np.int64]:
        """Numbers of the blocks that one of some files has, ascending."""
        return _union(self._numbers, files)

    def meeting(self, numbers: NDArray[np.int64], first_slice: int, end_slice: int) -> NDArray[np.int64]:
        """Those of some blocks that serve a slice in first_slice .. end_slice - 1."""
        slices = _NUM_SLICES // self.num_blocks
        found: NDArray[np.int64] = numbers[(numbers * slices < end_slice) & ((numbers + 1) * slices > first_slice)]
        return found

    @property
    def num_files(self) -> int:
        """Files, one a rank."""
        return len(self._files)

    def parts(self, numbers: NDArray[np.int64], at_once: int | None = None) -> Iterator[BlockPart]:
        """All blocks, `at_once` of `numbers` at a time (None: a few MB).

        `numbers` has all blocks that are held, and perhaps others of another checkpoint, ascending.
        """
        taken = [0] * len(self._files)
        step = at_once or max(_CELLS_AT_ONCE // (self.cells_per_block * len(self._files)), 1)
        for start in range(0, len(numbers), step):
            last = numbers[start : start + step][-1]
            untils = [int(np.searchsorted(blocks, last, "right")) for blocks in self._numbers]
            yield BlockPart(
                [blocks[a:b] for blocks, a, b in zip(self._numbers, taken, untils)],
                [file.read("cells", a, b - a) for file, a, b in zip(self._files, taken, untils)],
            )
            taken = untils


def _union(numbers: Sequence[NDArray[np.int64]], files: Iterable[int]) -> NDArray[np.int64]:
    some = [numbers[index] for index in files]
    found: NDArray[np.int64] = np.unique(np.concatenate(some)) if some else np.empty(0, np.int64)
    return found


def _num_blocks(table: TableRecord, files: Sequence[TensorFile]) -> int:
    """Blocks of the whole filter, from its bytes."""
    rule = (table.admission or {}).get("filter")
    cells = rule.get("cells") if isinstance(rule, dict) else None
    if not isinstance(cells, int) or cells < 1:
        raise CheckpointError(
            f"checkpoint: {files[0].path}: it has cells, but the admission of table {table.name!r} has no filter"
        )
    blocks = 1
    while blocks < _NUM_SLICES and blocks * 2 * _SMALLEST_BLOCK <= cells:
        blocks *= 2
    for file in files:
        if file.regions["cells"].shape[1:] != (cells // blocks,):
            raise CheckpointError(
                f"checkpoint: {file.path}: cells must be of {cells // blocks} bytes a block, got "
                f"{list(file.regions['cells'].shape)}"
            )
    return blocks
