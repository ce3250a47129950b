"""Writes the rows that this rank owns, one file for each table, in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..ops.owners import NUM_SLICES, default_slice_owner
from .file_writer import TensorFileWriter
from .generation import Generation
from .layout import DTYPES
from .manifest_parts import TableFile, TableRecord
from .names import admission_file, table_file
from .settings import RowParts, row_parts, table_record

__all__ = ["CHUNK_BYTES", "admission_parts", "rows_per_chunk", "save_tables", "slice_range"]

CHUNK_BYTES = 4 << 20
"""Bytes of rows that travel between store and file at once. A few chunks are under way: gathered, split, written."""
_MAX_ROWS = 32_000
"""Of a chunk: torch lets threads loose on longer vectors, and those spin for a while after each of them."""
_NUM_SHARDS = 256
_KEYS_AT_ONCE = 1 << 17


def save_tables(
    generation: Generation,
    stores: Sequence[Any],
    names: Sequence[Sequence[str]] | None = None,
    slice_owner: Tensor | None = None,
) -> list[TableRecord]:
    """Write all rows of some stores, with their optimizer state, metadata and admission counts.

    Local: nothing is exchanged. Rows go in the order of (index shard, key), so files do not depend on the order in
    which keys came. Stores must not change meanwhile. Extra memory: a few CHUNK_BYTES and the keys of a 256th of a
    table.

    Args:
        generation: of this rank.
        stores: the same on all ranks, in the same order.
        names: names[s][t] of each table in the checkpoint, unique; None: the tables' own.
        slice_owner: int32 [65536], who saves which slice; None: the default of this world size. A rank without slices
            saves no rows: another one has the same.

    Returns:
        The tables in order, for `RankPart.tables`. Their files have been added to the generation.

    Raises:
        OSError: as TensorFileWriter. CheckpointError: names that repeat, or settings that no manifest can hold.
    """
    if slice_owner is None:
        slice_owner = default_slice_owner(generation.world_size)
    first, end = slice_range(slice_owner, generation.rank)
    records: list[TableRecord] = []
    for s, store in enumerate(stores):
        for t, spec in enumerate(store.tables):
            record = table_record(store, t, spec.name if names is None else names[s][t])
            if any(other.name == record.name for other in records):
                raise CheckpointError(
                    f"checkpoint: two tables are named {record.name!r}; names within a checkpoint must be distinct"
                )
            file = table_file(generation.number, len(records), generation.rank)
            record.rows = _write_table(generation, file, store, t, record, saves=end > first)
            record.files.append(TableFile(file, generation.rank, record.rows, first, end))
            _write_admission(generation, store, t, record, len(records), saves=end > first)
            record.counters = {name: count * (end > first) for name, count in store.counters(t).items()}
            records.append(record)
    return records


def slice_range(slice_owner: Tensor, rank: int) -> tuple[int, int]:
    """The smallest range of slices (first, end) that holds all of a rank's; (0, 0) if it owns none."""
    own = (slice_owner.numpy() == rank).nonzero()[0]  # not by torch: see _MAX_ROWS
    if own.size == 0:
        return 0, 0
    first, last = int(own[0]), int(own[-1])
    assert last < NUM_SLICES
    return first, last + 1


def rows_per_chunk(parts: RowParts) -> int:
    """How many rows travel at once, at most."""
    return max(1, min(_MAX_ROWS, CHUNK_BYTES // max(parts.row_floats * 4, parts.bytes_per_row())))


def _write_table(generation: Generation, file: str, store: Any, table: int, record: TableRecord, saves: bool) -> int:
    parts = row_parts(store)
    sizes: list[int] = store.shard_sizes(table).tolist() if saves else [0] * _NUM_SHARDS
    total = sum(sizes)
    tensors = {name: (DTYPES[dtype], shape) for name, (dtype, shape) in record.tensors(total).items()}
    with generation.create(file, tensors) as writer:
        for keys, handles in _keys_in_order(store, table, sizes) if saves else ():
            for at in range(0, keys.numel(), rows_per_chunk(parts)):
                piece = slice(at, at + rows_per_chunk(parts))
                _write_rows(writer, store, parts, keys[piece], handles[piece])
        generation.add(file, writer.close())
    return total


def _keys_in_order(store: Any, table: int, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and handles of groups of index shards."""
    first = 0
    while first < _NUM_SHARDS:
        end, count = first + 1, sizes[first]
        while end < _NUM_SHARDS and count + sizes[end] <= _KEYS_AT_ONCE:
            count += sizes[end]
            end += 1
        keys, handles = store.export_shards(table, first, end, count)
        if keys.numel() != count:
            raise CheckpointError(
                f"checkpoint: table {store.tables[table].name!r} changed while it was saved: {count} keys became "
                f"{keys.numel()}; save between steps"
            )
        yield keys, handles
        first = end


def _write_rows(writer: TensorFileWriter, store: Any, parts: RowParts, keys: Tensor, handles: Tensor) -> None:
    columns = {
        name: (offset, torch.empty((keys.numel(), *shape), dtype=dtype))
        for name, (offset, dtype, shape) in parts.columns().items()
    }
    store.copy_columns(handles, list(columns.values()))
    metadata = store.read_metadata(handles)
    writer.write("keys", keys)
    for name, (_, column) in columns.items():
        writer.write(name, column)
    writer.write("last_used", metadata.last_used)
    writer.write("frequency", metadata.frequency)


def _write_admission(
    generation: Generation, store: Any, table: int, record: TableRecord, number: int, saves: bool
) -> None:
    if record.admission is None:
        return
    empty = store.admission_state(table, (0, 0))
    sizes = dict.fromkeys(empty, 0)
    for part in admission_parts(store, table) if saves else ():
        for name, tensor in part.items():
            sizes[name] += tensor.shape[0]
    if not sizes:
        return
    tensors = {name: (tensor.dtype, (sizes[name], *tensor.shape[1:])) for name, tensor in empty.items()}
    file = admission_file(generation.number, number, generation.rank)
    with generation.create(file, tensors) as writer:
        for part in admission_parts(store, table) if saves else ():
            for name, tensor in part.items():
                writer.write(name, tensor)
        generation.add(file, writer.close())
    record.admission_files.append(file)


def admission_parts(store: Any, table: int) -> Iterator[dict[str, Tensor]]:
    """The state of a table's admission counts, by 256ths."""
    for shard in range(_NUM_SHARDS):
        yield store.admission_state(table, (shard, shard + 1))
