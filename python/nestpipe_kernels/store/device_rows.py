"""Rows of a store on an accelerator by handle, and the keys of whole tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types import TableSpec
from .checks import check_tensor
from .device_memory import StoreState
from .row_transfer import RowMetadata

__all__ = ["DeviceRows", "call_words"]

INT64, INT32, UINT8, FLOAT32 = torch.int64, torch.int32, torch.uint8, torch.float32
MAX_KEYS = (1 << 31) - 1
ROW_ALIGNMENT = 16
READ_ROWS, READ_EMBEDDINGS, WRITE_ROWS, WRITE_EMBEDDINGS, READ_METADATA, WRITE_METADATA = range(6)


class DeviceRows:
    """The part of DeviceStore that names rows by their handles."""

    tables: Sequence[TableSpec]
    device: torch.device
    dim: int
    row_floats: int
    _last_batch: int

    def read_state(self) -> StoreState:
        """What the store counts on its device. Waits."""
        raise NotImplementedError

    def _table(self, table: str | int | None) -> int:
        raise NotImplementedError

    def _run(self, name: str, *lists: list[int]) -> None:
        raise NotImplementedError

    def _bytes(self, name: str, *lists: list[int]) -> int:
        raise NotImplementedError

    def gather(self, handles: Tensor, keys: Tensor, tables: Tensor, out: Tensor, index: Tensor | None) -> None:
        """Row index[j] (or j) of `out` float32 [m, row_floats] = the row of handles[j]; the default row for -1."""
        self._check_keys("gather", keys, tables)
        self._check("handles", "gather", handles, INT64, (keys.numel(),))
        self._check_rows("out", "gather", out)
        if index is not None:
            self._check("index", "gather", index, INT64, (keys.numel(),))
        where = 0 if index is None else index.data_ptr()
        self._rows(READ_ROWS, handles, [out.data_ptr(), where, out.shape[0]], call_words(keys, tables))

    def write_back(self, handles: Tensor, rows: Tensor) -> None:
        """Embedding, state and `updates` of rows float32 [n, row_floats], handles distinct; those of -1 are skipped."""
        self._check("handles", "write_back", handles, INT64, (None,))
        self._check_rows("rows", "write_back", rows, handles.numel())
        self._rows(WRITE_ROWS, handles, [rows.data_ptr(), 0])

    def read_embeddings(self, handles: Tensor, keys: Tensor, tables: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 [n, dim], a copy; the default row's, rounded as stored, where the handle is -1."""
        self._check_keys("read_embeddings", keys, tables)
        self._check("handles", "read_embeddings", handles, INT64, (keys.numel(),))
        if out is None:
            out = self._empty(FLOAT32, keys.numel(), self.dim)
        self._check("out", "read_embeddings", out, FLOAT32, (keys.numel(), self.dim))
        self._rows(READ_EMBEDDINGS, handles, [out.data_ptr(), 0], call_words(keys, tables))
        return out

    def write_embeddings(self, handles: Tensor, values: Tensor) -> None:
        """Embeddings alone, float32 [n, dim], rounded to the storage type; handles distinct, of -1 skipped."""
        self._check("handles", "write_embeddings", handles, INT64, (None,))
        self._check("values", "write_embeddings", values, FLOAT32, (handles.numel(), self.dim))
        self._rows(WRITE_EMBEDDINGS, handles, [values.data_ptr(), 0])

    def read_metadata(self, handles: Tensor) -> RowMetadata:
        """Metadata of handles int64 [n]; -1 and 0 where the handle is -1."""
        self._check("handles", "read_metadata", handles, INT64, (None,))
        metadata = RowMetadata(torch.empty_like(handles), torch.empty_like(handles))
        self._rows(READ_METADATA, handles, [metadata.last_used.data_ptr(), metadata.frequency.data_ptr()])
        return metadata

    def write_metadata(self, handles: Tensor, metadata: RowMetadata) -> None:
        """Replace the metadata of rows, handles distinct, those of -1 skipped. Waits for the largest last_used."""
        self._check("handles", "write_metadata", handles, INT64, (None,))
        self._check_metadata("write_metadata", metadata, handles.numel())
        self._rows(WRITE_METADATA, handles, [metadata.last_used.data_ptr(), metadata.frequency.data_ptr()])
        used = torch.where(handles >= 0, metadata.last_used, -1)
        self._last_batch = max(self._last_batch, int(used.max()) if used.numel() else -1)

    def export_table(self, table: str | int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and handles of a table, int64 [size] each, by ascending handle. Waits."""
        index, state = self._table(table), self.read_state()
        size = state.table(index, 0)
        keys, handles = self._empty(INT64, size), self._empty(INT64, size)
        work = self._empty(UINT8, self._bytes("store_list_work_bytes", [state.num_rows]))
        memory = [keys.data_ptr(), handles.data_ptr(), work.data_ptr()]
        self._run("store_list_table", [index, state.num_rows], memory)
        return keys, handles

    def export_rows(self, table: str | int | None = None) -> tuple[Tensor, Tensor, RowMetadata]:
        """Keys int64 [size], rows float32 [size, row_floats] and metadata of a table, by ascending handle. Waits."""
        keys, handles = self.export_table(table)
        tables = torch.full((keys.numel(),), self._table(table), dtype=INT32, device=self.device)
        rows = self._empty(FLOAT32, keys.numel(), self.row_floats)
        self.gather(handles, keys, tables, rows, None)
        return keys, rows, self.read_metadata(handles)

    def _rows(self, kind: int, handles: Tensor, data: list[int], keys: list[int] | None = None) -> None:
        self._run("store_rows", [kind, handles.data_ptr(), handles.numel()], keys or [0, 0, 0], data)

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _check(
        self, name: str, operation: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | None]
    ) -> None:
        check_tensor(operation, name, tensor, dtype, shape, self.device)

    def _check_rows(self, name: str, operation: str, rows: Tensor, size: int | None = None) -> None:
        """Whole rows, which are moved 16 bytes at a time."""
        self._check(name, operation, rows, FLOAT32, (size, self.row_floats))
        if rows.data_ptr() % ROW_ALIGNMENT:
            raise ValueError(
                f"{operation}: {name} must begin at a multiple of {ROW_ALIGNMENT} bytes, got a view that begins "
                f"{rows.data_ptr() % ROW_ALIGNMENT} bytes behind one: pass a clone()"
            )

    def _check_keys(self, operation: str, keys: Tensor, tables: Tensor) -> None:
        self._check("keys", operation, keys, INT64, (None,))
        self._check("tables", operation, tables, INT32, (keys.numel(),))
        if keys.numel() > MAX_KEYS:
            raise ValueError(f"{operation}: at most {MAX_KEYS} keys in a call, got {keys.numel()}: split it")

    def _check_metadata(self, operation: str, metadata: RowMetadata, size: int) -> None:
        self._check("last_used", operation, metadata.last_used, INT64, (size,))
        self._check("frequency", operation, metadata.frequency, INT64, (size,))


def call_words(keys: Tensor, tables: Tensor) -> list[int]:
    """Keys of a call as kernels take them."""
    return [keys.data_ptr(), tables.data_ptr(), keys.numel()]
