"""Loads what admission has counted: of every rank that saved, the part of the slices that this rank owns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from .file_reader import open_tensor_file
from .manifest import Manifest
from .manifest_parts import TableRecord
from .rows_save import CHUNK_BYTES

__all__ = ["admission_chunks", "load_counts"]

_LAYOUTS = ({"keys", "counts"}, {"blocks", "cells"})


def load_counts(
    directory: Path, manifest: Manifest, saved: TableRecord, store: Any, table: int, owned: Tensor, *, renamed: bool
) -> None:
    """Add the counts of the owned slices to a table that has none.

    Args:
        store: of the table; `table` is its index there.
        owned: bool [65536], the slices of this rank.
        renamed: the table's name is another one than when it was saved: blocks of filters mean nothing then.

    Raises:
        CheckpointError: a file is damaged, or its counts do not fit the table's rule.
    """
    for path, chunk in admission_chunks(directory, manifest, saved, None if renamed else owned):
        if renamed and "blocks" in chunk:
            continue
        try:
            store.load_admission_state(table, chunk, owned)
        except (TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"checkpoint: {path}: {error}") from None


def admission_chunks(
    directory: Path, manifest: Manifest, saved: TableRecord, owned: Tensor | None
) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """Pieces of the files that may hold counts of owned slices (None: of all), with their digests checked at the end.

    Raises:
        CheckpointError: a file is damaged or holds something else.
    """
    for rank, name in enumerate(saved.admission_files):
        ranges = [(one.first_slice, one.end_slice) for one in saved.files if one.rank == rank]
        if owned is not None and not any(bool(owned[first:end].any()) for first, end in ranges):
            continue
        path = directory / name
        with open_tensor_file(path, manifest.files[name]) as file:
            names = sorted(file.regions)
            if set(names) not in _LAYOUTS or not all(region.shape for region in file.regions.values()):
                raise CheckpointError(f"checkpoint: {path} must hold keys and counts, or blocks and cells, got {names}")
            row_bytes = sum(region.row_bytes for region in file.regions.values())
            for chunk in file.chunks(names, max(1, CHUNK_BYTES // max(1, row_bytes))):
                yield path, chunk
