"""The row files of one table of a checkpoint, opened together, as sources of a merge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe_kernels.checkpoint.files import TensorFile, open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.manifest_parts import TableRecord
from nestpipe_kernels.checkpoint.tools.merge import Part

__all__ = ["RowFile", "open_rows", "read_column", "rows_at_once"]

BUDGET = 12 << 20
"""Bytes that a merge and the column under way may take."""
KEY_BYTES = 96
"""Of a row of a merge: keys, hashes, shards and orders of windows and parts, with what sorting needs."""


class RowFile:
    """One file of a table. Whoever reads all rows of a tensor in order has compared its digest at the end."""

    def __init__(self, file: TensorFile) -> None:
        self.file = file
        self.name = str(file.path)
        self.rows: int = file.regions["keys"].shape[0]

    def read(self, column: str, first_row: int, rows: int) -> NDArray[Any]:
        """As merge.RowSource."""
        found: NDArray[Any] = self.file.read(column, first_row, rows).numpy()
        return found


@contextlib.contextmanager
def open_rows(directory: Path, manifest: Manifest, table: TableRecord) -> Iterator[list[RowFile]]:
    """All files of a table, in the manifest's order. Raises CheckpointError or OSError, naming the file."""
    with contextlib.ExitStack() as stack:
        yield [
            RowFile(stack.enter_context(open_tensor_file(directory / file.name, manifest.files[file.name])))
            for file in table.files
        ]


def rows_at_once(tables: Sequence[TableRecord], copies: int) -> int:
    """Rows of a part such that `copies` of the widest column stay within the budget."""
    widest = max(4 * max([t.dim, *(width for _, width in t.optimizer.slots)]) for t in tables)
    return max(BUDGET // (KEY_BYTES + copies * widest), 1)


def read_column(files: Sequence[RowFile], part: Part, column: str) -> Tensor:
    """[n, ...] the part's rows of a column, in the order of its takes (not sorted); the next are announced."""
    pieces = []
    for source, first, rows in part.takes:
        pieces.append(files[source].file.read(column, first, rows))
        ahead = first + rows
        files[source].file.announce(column, ahead, min(rows, files[source].rows - ahead))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
