"""Reads and writes the embeddings of one table by key, through the RowStore protocol, in bounded pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nestpipe_kernels.ops.row_storage import pack_embeddings, stored_elements, unpack_embeddings
from nestpipe_kernels.store import RowMetadata
from nestpipe_kernels.types import RowStore

__all__ = ["pieces", "read_embeddings", "write_embeddings"]

_PIECE = 65_536
"""Rows handled at a time: bounds the whole-row copies that reading and writing a large table makes."""


def pieces(num_rows: int) -> Iterator[tuple[int, int]]:
    """Bounds [start, stop) that cover `num_rows`."""
    for start in range(0, num_rows, _PIECE):
        yield start, min(start + _PIECE, num_rows)


def read_embeddings(store: RowStore, table: int, keys: Tensor) -> Tensor:
    """float32 [n, dim]: embeddings of `keys` int64 [n]; a key without a row gives the table's default."""
    out = torch.empty(keys.numel(), store.dim, dtype=torch.float32)
    for start, stop in pieces(keys.numel()):
        _, rows = _rows_of(store, table, keys[start:stop])
        out[start:stop] = unpack_embeddings(rows, store.dim, store.data_type)
    return out


def write_embeddings(store: RowStore, table: int, keys: Tensor, values: Tensor) -> None:
    """Make `values` float32 [n, dim], rounded to the storage type, the embeddings of distinct `keys` int64 [n].

    Optimizer states stay as they are. Keys without a row are inserted, whatever the table's admission rule, unless they
    read that value anyway. Nothing is evicted.

    Raises:
        StoreFullError: the table has no room for a key.
    """
    for start, stop in pieces(keys.numel()):
        _write_piece(store, table, keys[start:stop], values[start:stop])


def _write_piece(store: RowStore, table: int, keys: Tensor, values: Tensor) -> None:
    handles, rows = _rows_of(store, table, keys)
    before = stored_elements(rows, store.dim, store.data_type)
    pack_embeddings(values.contiguous(), rows, store.data_type)
    after = stored_elements(rows, store.dim, store.data_type)
    bits = torch.int32 if store.data_type.itemsize == 4 else torch.int16
    same = (before.view(bits) == after.view(bits)).all(1)
    absent = ((handles < 0) & ~same).nonzero().squeeze(1)
    if absent.numel():
        unused = RowMetadata(torch.full_like(absent, -1), torch.zeros_like(absent))
        tables = torch.full((absent.numel(),), table, dtype=torch.int32)
        store.load_rows(keys[absent].contiguous(), tables, rows[absent], unused)
    store.write_back(handles, rows)


def _rows_of(store: RowStore, table: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Handles int64 [n] and whole rows [n, row_floats] of keys; default rows where a key has none."""
    keys = keys.contiguous()
    tables = torch.full((keys.numel(),), table, dtype=torch.int32)
    handles = store.find_handles(keys, tables)
    rows = torch.empty(keys.numel(), store.row_floats, dtype=torch.float32)
    store.gather(handles, keys, tables, rows, None)
    return handles, rows
