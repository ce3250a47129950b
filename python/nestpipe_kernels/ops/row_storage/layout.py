"""How embeddings lie in buffer rows: words, elements, and what stochastic rounding depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...types import DataType, RowStore
from .. import _row_checks as checks

__all__ = ["RowStorage", "embedding_words", "put_elements", "storage_of", "stored_elements"]


@dataclass(frozen=True)
class RowStorage:
    """How embeddings lie in the rows of a call, and what stochastic rounding depends on beside element and step.

    Attributes:
        data_type: storage type of the embeddings.
        keys: int64 [U], the rows' keys, to round stochastically; None: to nearest, ties to even.
        tables: int32 [U], the rows' tables.
        table_hashes, table_seeds: int64 [T], of the store.
    """

    data_type: DataType = DataType.FP32
    keys: Tensor | None = None
    tables: Tensor | None = None
    table_hashes: Tensor | None = None
    table_seeds: Tensor | None = None

    def check(self, operation: str, num_rows: int) -> None:
        """Raises TypeError or ValueError unless everything that stochastic rounding needs is there and fits."""
        if self.keys is None:
            return
        if self.data_type is DataType.FP32:
            raise ValueError(f"{operation}: FP32 is what the arithmetic is done in: nothing is rounded stochastically")
        if self.tables is None or self.table_hashes is None or self.table_seeds is None:
            raise ValueError(f"{operation}: stochastic rounding needs keys, tables, table_hashes and table_seeds")
        checks.check_index(operation, "keys", self.keys, num_rows)
        checks.check_index(operation, "table_hashes", self.table_hashes)
        checks.check_index(operation, "table_seeds", self.table_seeds, self.table_hashes.numel())
        tables = self.tables
        if tables.dtype != torch.int32 or tables.shape != (num_rows,) or not tables.is_contiguous():
            raise ValueError(
                f"{operation}: tables must be contiguous int32 [{num_rows}], got {checks.describe(tables)}"
            )
        count = self.table_hashes.numel()
        if num_rows and not (int(tables.min()) >= 0 and int(tables.max()) < count):
            raise IndexError(f"{operation}: tables must lie in [0, {count})")


def storage_of(store: RowStore, keys: Tensor, tables: Tensor) -> RowStorage | None:
    """What `row_update` needs to know of rows of `store` with these keys int64 [U] and tables int32 [U]; FP32: None."""
    if store.data_type is DataType.FP32:
        return None
    if not store.stochastic_rounding:
        return RowStorage(store.data_type)
    return RowStorage(store.data_type, keys, tables, store.table_hashes, store.table_seeds)


def embedding_words(dim: int, data_type: DataType) -> int:
    """float32 words that hold `dim` elements."""
    return -(-dim * data_type.itemsize // 4)


def stored_elements(rows: Tensor, dim: int, data_type: DataType) -> Tensor:
    """The embeddings of rows float32 [n, >= words] as they are stored: `data_type.torch_dtype` [n, dim], a copy."""
    words = rows[:, : embedding_words(dim, data_type)].detach()
    # As integers: bits of halves may be those of a float32 NaN, which arithmetic need not keep.
    integers = words.view(torch.int32).contiguous().view(torch.int32 if data_type.itemsize == 4 else torch.int16)
    return integers[:, :dim].clone(memory_format=torch.contiguous_format).view(data_type.torch_dtype)


def put_elements(rows: Tensor, elements: Tensor) -> None:
    """Store elements [n, dim] (float32, float16 or bfloat16: the storage type of the rows) in rows [n, >= words]."""
    size, dim = elements.shape
    halves = elements.element_size() == 2
    integers = elements.contiguous().view(torch.int16 if halves else torch.int32)
    if halves:
        padded = torch.zeros(size, dim + dim % 2, dtype=torch.int16, device=elements.device)
        padded[:, :dim] = integers
        integers = padded.view(torch.int32)
    rows.view(torch.int32)[:, : integers.shape[1]] = integers
