"""Rows of whole tables between a store on an accelerator and the host, as checkpoints need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..ops.owners.reference import hash_keys
from ..types import TableSpec
from .checks import check_keys, check_tensor
from .device_store import DeviceStore
from .row_transfer import RowMetadata

__all__ = ["DeviceTransfer"]

INT64, INT32, FLOAT32, UINT8 = torch.int64, torch.int32, torch.float32, torch.uint8
NUM_SHARDS = 256
SHARD_BITS = 40
"""The lowest bit of a hash that tells the shard."""


class DeviceTransfer:
    """The part of DeviceTierStore that loads and exports rows; the calls are those of `RowTransfer`."""

    tables: Sequence[TableSpec]
    row_floats: int
    table_hashes: Tensor
    rows: DeviceStore
    _lock: AbstractContextManager[Any]
    _in_order: tuple[int, Any, Tensor, Tensor, Tensor] | None = None
    """What `shard_sizes` has sorted for `export_shards`: table, the state it was read from, keys, handles, sizes."""

    def load_rows(self, keys: Tensor, tables: Tensor, rows: Tensor, metadata: RowMetadata) -> None:
        """As `EmbeddingStore.load_rows`; all tensors on the CPU.

        Raises:
            StoreFullError: the device's memory or a table's capacity does not hold them. Nothing has changed.
        """
        check_keys("load_rows", keys, tables)
        check_tensor("load_rows", "rows", rows, FLOAT32, (keys.numel(), self.row_floats))
        for name, values in (("last_used", metadata.last_used), ("frequency", metadata.frequency)):
            check_tensor("load_rows", name, values, INT64, (keys.numel(),))
        with self._changes():
            there = self.rows.allocate(
                "load_rows",
                lambda: [self._put(one) for one in (keys, tables, rows, metadata.last_used, metadata.frequency)],
            )
            self.rows.load_rows(there[0], there[1], there[2], RowMetadata(there[3], there[4]))
            self._finish()

    def load_columns(
        self, keys: Tensor, table: str | int | None, columns: Sequence[tuple[int, Tensor]], metadata: RowMetadata
    ) -> None:
        """`load_rows` for keys of one table, with rows given by (offset in bytes, part [n, ...]); the rest is zero."""
        rows = torch.zeros((keys.numel(), self.row_floats), dtype=FLOAT32)
        for part, column in _byte_columns("load_columns", rows, columns):
            part.copy_(column)
        self.load_rows(keys, self._numbers(keys, self._table(table)), rows, metadata)

    def reserve_keys(self, table: str | int | None, count: int) -> None:
        """Memory for `count` keys of a table, beside those of others. Raises StoreFullError; nothing has changed."""
        index, state = self._table(table), self._read_state()
        sizes = [state.table(t, 0) for t in range(len(self.tables))]
        sizes[index] = max(sizes[index], count)
        with self._changes():
            self.rows.reserve(sum(sizes))
            self._finish()

    def export_table(self, table: str | int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and handles of a table, int64 [size] each, by ascending handle."""
        with self._lock:
            keys, handles = self.rows.export_table(table)
            return keys.cpu(), handles.cpu()

    def shard_sizes(self, table: str | int | None = None) -> Tensor:
        """int64 [256]: keys of a table in each shard of the index that a store in host memory would have."""
        return self._sorted(self._table(table))[2]

    def export_shards(self, table: str | int | None, first: int, end: int, size: int) -> tuple[Tensor, Tensor]:
        """As `EmbeddingStore.export_shards`: keys and handles of shards first .. end - 1 by (shard, key).

        All keys of the table are sorted on the host at the first call after a change, and kept until the last shard.
        """
        if not 0 <= first <= end <= NUM_SHARDS:
            raise IndexError(f"export_shards: shards must be in [0, {NUM_SHARDS}], got {first} to {end}")
        keys, handles, sizes = self._sorted(self._table(table))
        begin, count = int(sizes[:first].sum()), int(sizes[first:end].sum())
        if count > size:
            raise ValueError(f"store: {count} keys do not fit into {size}")
        if end == NUM_SHARDS:
            self._in_order = None
        return keys[begin : begin + count].clone(), handles[begin : begin + count].clone()

    def copy_columns(self, handles: Tensor, columns: Sequence[tuple[int, Tensor]]) -> None:
        """Parts of rows, each into a tensor of its own, as `EmbeddingStore.copy_columns`."""
        check_tensor("copy_columns", "handles", handles, INT64, (None,))
        if bool((handles < 0).any()):
            raise IndexError("copy_columns: there is no row to copy from for handle -1")
        keys = torch.zeros_like(handles)
        rows = torch.empty((handles.numel(), self.row_floats), dtype=FLOAT32)
        self.gather(handles, keys, keys.to(INT32), rows, None)
        for part, column in _byte_columns("copy_columns", rows, columns):
            column.copy_(part)

    def admission_state(
        self, table: str | int | None = None, shards: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Nothing: no table counts keys without a row."""
        self._table(table)
        return {}

    def load_admission_state(
        self, table: str | int | None, state: Mapping[str, Tensor], owned: Tensor | None = None
    ) -> None:
        """Raises ValueError where there are counts: no table has a rule for them."""
        if state:
            name = self.tables[self._table(table)].name
            raise ValueError(f"load_admission_state: table {name!r} has no admission rule that counts")

    def gather(self, handles: Tensor, keys: Tensor, tables: Tensor, out: Tensor, index: Tensor | None) -> None:
        """Rows by handle."""
        raise NotImplementedError

    def _sorted(self, table: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and handles by (shard, key), and how many there are in each shard."""
        state = self._read_state()
        kept = self._in_order
        if kept is None or kept[0] != table or kept[1] is not state:
            keys, handles = self.rows.export_table(table)
            keys, handles = keys.cpu(), handles.cpu()
            shards = (hash_keys(self.table_hashes[table : table + 1], keys) >> SHARD_BITS) & (NUM_SHARDS - 1)
            order = torch.argsort(keys)
            order = order[torch.argsort(shards[order], stable=True)]
            sizes = torch.bincount(shards, minlength=NUM_SHARDS)
            kept = self._in_order = (table, state, keys[order], handles[order], sizes)
        return kept[2], kept[3], kept[4]

    def _numbers(self, keys: Tensor, table: int) -> Tensor:
        return torch.full((keys.numel(),), table, dtype=INT32)

    def _read_state(self) -> Any:
        raise NotImplementedError

    def _changes(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def _put(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    def _table(self, table: str | int | None) -> int:
        raise NotImplementedError


def _byte_columns(operation: str, rows: Tensor, columns: Sequence[tuple[int, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """(bytes of the rows, bytes of the column), uint8 [n, bytes of an entry] each.

    Raises:
        IndexError: bytes outside of a row.
    """
    size, pairs = len(rows), []
    if size == 0:
        return []
    row_bytes = rows.view(UINT8)
    for offset, column in columns:
        check_tensor(operation, "column", column, column.dtype, (size, *[None] * (column.dim() - 1)))
        part = column.view(size, -1)
        width = part.shape[1] * part.element_size()
        if not 0 <= offset <= offset + width <= row_bytes.shape[1]:
            raise IndexError(f"{operation}: bytes {offset} to {offset + width} are outside a row")
        if width:
            pairs.append((row_bytes[:, offset : offset + width], part.view(UINT8)))
    return pairs
