"""Rows of whole tables on their way in and out, as checkpoints need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import StoreFullError
from ..types import TableSpec
from .checks import check_keys, check_tensor
from .settings import int64_tensor

__all__ = ["RowMetadata", "RowTransfer"]

INT64 = torch.int64
FLOAT32 = torch.float32


@dataclass
class RowMetadata:
    """What a store knows about rows beside their values."""

    last_used: Tensor
    """int64 [n], index of the last batch that retrieved the key; -1: none, or no row."""
    frequency: Tensor
    """int64 [n], occurrences retrieved so far; 0 without a row."""


class RowTransfer:
    """The part of EmbeddingStore that loads and exports rows; rows are named by key, or by handle."""

    tables: Sequence[TableSpec]
    row_floats: int
    _native: Any

    def _table(self, table: str | int | None) -> int:
        raise NotImplementedError

    def size(self, table: str | int | None = None) -> int:
        """Rows of a table."""
        return int(self._native.size(self._table(table)))

    def load_rows(self, keys: Tensor, tables: Tensor, rows: Tensor, metadata: RowMetadata) -> None:
        """Insert keys with rows and metadata as they are, without asking the tables' rules: for checkpoints.

        Keys that are there get the new row and metadata. Earlier retrievals can no longer be undone.

        Args:
            keys: int64 [n], distinct for each table. tables: int32 [n]. rows: float32 [n, row_floats].

        Raises:
            StoreFullError: a table's capacity does not hold them. MemoryError: memory gave out. Nothing has changed.
        """
        check_keys("load_rows", keys, tables)
        size = keys.numel()
        check_tensor("load_rows", "rows", rows, FLOAT32, (size, self.row_floats))
        check_tensor("load_rows", "last_used", metadata.last_used, INT64, (size,))
        check_tensor("load_rows", "frequency", metadata.frequency, INT64, (size,))
        refused = self._native.load_rows(
            keys.data_ptr(),
            tables.data_ptr(),
            size,
            rows.data_ptr(),
            metadata.last_used.data_ptr(),
            metadata.frequency.data_ptr(),
        )
        if refused >= 0:
            self._refuse("load_rows", self.tables[int(tables[refused])], int(keys[refused]), refused)

    def load_columns(
        self, keys: Tensor, table: str | int | None, columns: Sequence[tuple[int, Tensor]], metadata: RowMetadata
    ) -> None:
        """`load_rows` for keys of one table, with rows given by columns, which saves a copy of them.

        Args:
            keys: int64 [n], distinct.
            columns: (offset, part): part [n, ...] goes to the bytes of the rows from `offset` on. What no column
                holds is zero.

        Raises:
            As `load_rows`. IndexError: bytes outside of a row. Nothing has changed.
        """
        check_tensor("load_columns", "keys", keys, INT64, (None,))
        size = keys.numel()
        check_tensor("load_columns", "last_used", metadata.last_used, INT64, (size,))
        check_tensor("load_columns", "frequency", metadata.frequency, INT64, (size,))
        index, parts = self._table(table), _column_addresses("load_columns", columns, size)
        if size == 0:
            return
        refused = self._native.load_columns(
            index, keys.data_ptr(), size, parts, metadata.last_used.data_ptr(), metadata.frequency.data_ptr()
        )
        if refused >= 0:
            self._refuse("load_columns", self.tables[index], int(keys[refused]), refused)

    def reserve_keys(self, table: str | int | None, count: int) -> None:
        """Make a table's index long enough for about `count` keys at once. Raises MemoryError; nothing has changed."""
        self._native.reserve_keys(self._table(table), count)

    def _refuse(self, operation: str, spec: TableSpec, key: int, position: int) -> NoReturn:
        raise StoreFullError(
            f"{operation}: table {spec.name!r} has {self.size(spec.name)} rows and room for {spec.capacity}: key "
            f"{key} at position {position} does not fit; nothing was inserted: raise its capacity"
        )

    def export_table(self, table: str | int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and handles of a table, int64 [size] each, by ascending handle."""
        keys, handles = self._native.export_table(self._table(table))
        return int64_tensor(keys), int64_tensor(handles)

    def shard_sizes(self, table: str | int | None = None) -> Tensor:
        """int64 [256]: keys of a table in each shard of its index."""
        sizes = torch.empty(256, dtype=INT64)
        self._native.shard_sizes(self._table(table), sizes.data_ptr())
        return sizes

    def export_shards(self, table: str | int | None, first: int, end: int, size: int) -> tuple[Tensor, Tensor]:
        """Keys and handles of index shards first .. end - 1, int64 [n] each, by (shard, key).

        The order depends on the keys alone, not on how they came into the table.

        Args:
            size: how many there are at most, from `shard_sizes`.

        Raises:
            ValueError: there are more. IndexError: no such shards.
        """
        keys, handles = torch.empty(size, dtype=INT64), torch.empty(size, dtype=INT64)
        out = (keys.data_ptr(), handles.data_ptr())
        count = self._native.export_shards(self._table(table), first, end, size, out)
        return keys[:count], handles[:count]

    def copy_columns(self, handles: Tensor, columns: Sequence[tuple[int, Tensor]]) -> None:
        """Parts of rows, each into a tensor of its own.

        Args:
            handles: int64 [n], none of them -1.
            columns: (offset, out): the bytes of a row from `offset` on go to out [n, ...], as many as an entry has.

        Raises:
            IndexError: a handle without a row, or bytes outside of a row.
        """
        check_tensor("copy_columns", "handles", handles, INT64, (None,))
        size = handles.numel()
        parts = _column_addresses("copy_columns", columns, size)
        if size:
            self._native.copy_columns(handles.data_ptr(), size, parts)


def _column_addresses(operation: str, columns: Sequence[tuple[int, Tensor]], size: int) -> list[tuple[int, int, int]]:
    """(offset in the row, bytes, address) of parts [size, ...] of rows."""
    parts = []
    for offset, part in columns:
        check_tensor(
            operation,
            "out" if operation == "copy_columns" else "column",
            part,
            part.dtype,
            (size, *[None] * (part.dim() - 1)),
        )
        parts.append((offset, part.nbytes // max(1, size), part.data_ptr()))
    return parts
