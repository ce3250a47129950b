"""Admission counts of one table in two checkpoints, at whatever numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nestpipe_kernels.checkpoint.files import TensorFile
from nestpipe_kernels.checkpoint.tools.admission_files import EXACT, Blocks, kind_of, open_admission
from nestpipe_kernels.checkpoint.tools.compare_rows import Side, compare_files
from nestpipe_kernels.checkpoint.tools.row_files import RowFile
from nestpipe_kernels.checkpoint.tools.text import count

__all__ = ["compare_admission"]

_ROWS_AT_ONCE = 1 << 18
_CELLS_AT_ONCE = 4 << 20


def compare_admission(first: Side, second: Side) -> str | None:
    """What differs, in words; None if nothing does.

    Raises:
        CheckpointError: a file is damaged, or not what the format demands. OSError: it could not be read.
    """
    counting = [bool(side.table.admission_files) for side in (first, second)]
    if not all(counting):
        return None if counting[0] == counting[1] else f"admission counts are only in {'A' if counting[0] else 'B'}"
    with (
        open_admission(first.directory, first.manifest, first.table) as ours,
        open_admission(second.directory, second.manifest, second.table) as theirs,
    ):
        kinds = kind_of(ours), kind_of(theirs)
        if kinds[0] != kinds[1]:
            return f"admission counts are of another kind: {kinds[0]} / {kinds[1]}"
        if kinds[0] == EXACT:
            return _exact(first.table.hash_name, ours, theirs)
        blocks = Blocks(ours, first.table), Blocks(theirs, second.table)
        return _filters(*blocks)


def _exact(hash_name: str, ours: Sequence[TensorFile], theirs: Sequence[TensorFile]) -> str | None:
    sides = [RowFile(file) for file in ours], [RowFile(file) for file in theirs]
    found = compare_files(hash_name, sides, ["counts"], _ROWS_AT_ONCE, 0)
    if found.equal:
        return None
    return (
        f"admission counts differ for {count(found.columns['counts'].rows, 'key')}; {found.only_first.number:,} more "
        f"are counted in A alone, {found.only_second.number:,} in B alone"
    )


def _filters(ours: Blocks, theirs: Blocks) -> str | None:
    if (ours.num_blocks, ours.cells_per_block) != (theirs.num_blocks, theirs.cells_per_block):
        sizes = [f"{one.num_blocks} blocks of {one.cells_per_block} cells" for one in (ours, theirs)]
        return f"admission filters have {' / '.join(sizes)}"
    at_once = max(_CELLS_AT_ONCE // (ours.cells_per_block * max(ours.num_files, theirs.num_files)), 1)
    everyone = range(ours.num_files), range(theirs.num_files)
    held = np.union1d(ours.held_by(everyone[0]), theirs.held_by(everyone[1]))
    different = 0
    for a, b in zip(ours.parts(held, at_once), theirs.parts(held, at_once), strict=True):
        some = np.union1d(a.held_by(everyone[0]), b.held_by(everyone[1]))
        different += int(torch.ne(a.cells(some, everyone[0]), b.cells(some, everyone[1])).sum())
    total = len(held) * ours.cells_per_block
    return f"admission filters differ in {different:,} of {total:,} cells" if different else None
