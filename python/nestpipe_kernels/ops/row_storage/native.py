"""Rounding to the storage type through the extension (csrc/store/row_storage.cpp)."""

from __future__ import annotations

from torch import Tensor

from ..._native import core
from ...types import DataType
from .._row_checks import pointer
from .layout import RowStorage

__all__ = ["pack_embeddings", "rounding_tuple"]


def rounding_tuple(storage: RowStorage | None, step: int) -> tuple[int, int, int, int, int]:
    """Addresses of keys, tables, hashes and seeds (0 for rounding to nearest), and the step."""
    if storage is None or storage.keys is None:
        return (0, 0, 0, 0, 0)
    return (
        pointer(storage.keys),
        pointer(storage.tables),
        pointer(storage.table_hashes),
        pointer(storage.table_seeds),
        step,
    )


def pack_embeddings(values: Tensor, rows: Tensor, data_type: DataType, rounding: RowStorage | None, step: int) -> None:
    """Arguments as checked by the package."""
    core().pack_embeddings(
        data_type.code,
        (pointer(values), values.shape[0], values.stride(0)),
        (pointer(rows), rows.shape[0], rows.stride(0)),
        values.shape[1],
        rounding_tuple(rounding, step),
    )
