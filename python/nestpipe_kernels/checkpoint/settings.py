"""What a store's settings look like in a manifest, and where the parts of its rows lie."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..types import RowStore, TableSpec
from .layout import DTYPES
from .manifest_parts import STORAGE_TYPES, OptimizerRecord, TableRecord

__all__ = ["RowParts", "described", "row_parts", "table_record"]


@dataclass(frozen=True)
class RowParts:
    """Where the parts of a buffer row float32 [row_floats] lie."""

    dim: int
    storage: torch.dtype
    embedding_words: int
    slots: tuple[tuple[str, int], ...]
    row_floats: int

    @property
    def state_floats(self) -> int:
        """float32 numbers of optimizer state."""
        return sum(width for _, width in self.slots)

    def embedding(self, rows: Tensor) -> Tensor:
        """[n, dim] of the storage type: a view of rows float32 [n, row_floats]."""
        return rows.view(self.storage)[:, : self.dim]

    def slot(self, rows: Tensor, name: str) -> Tensor:
        """float32 [n, width]: a view."""
        at = self.embedding_words
        for slot, width in self.slots:
            if slot == name:
                return rows[:, at : at + width]
            at += width
        raise CheckpointError(f"checkpoint: the optimizer has no slot {name!r}")

    def updates(self, rows: Tensor) -> Tensor:
        """int32 [n]: a view."""
        return rows.view(torch.int32)[:, self.embedding_words + self.state_floats]

    def columns(self) -> dict[str, tuple[int, torch.dtype, tuple[int, ...]]]:
        """Tensors of a row file that come out of rows: name -> (byte of the row, data type, shape of an entry)."""
        found: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {"embedding": (0, self.storage, (self.dim,))}
        at = self.embedding_words
        for name, width in self.slots:
            found[f"state.{name}"] = (4 * at, torch.float32, (width,))
            at += width
        found["updates"] = (4 * at, torch.int32, ())
        return found

    def bytes_per_row(self) -> int:
        """Bytes that a row takes in files, its key and metadata included."""
        return 8 + self.dim * self.storage.itemsize + 4 * self.state_floats + 4 + 16


def row_parts(store: RowStore) -> RowParts:
    """The parts of a store's rows."""
    storage = store.data_type.torch_dtype
    return RowParts(
        store.dim, storage, store.embedding_words, tuple(store.optimizer.slots(store.dim)), store.row_floats
    )


def table_record(store: RowStore, table: int, name: str) -> TableRecord:
    """A table's settings, without rows and files.

    Raises:
        CheckpointError: a hyper-parameter that is no finite number.
    """
    spec: TableSpec = store.tables[table]
    parts = row_parts(store)
    return TableRecord(
        name=name,
        hash_name=spec.name,
        dim=store.dim,
        data_type=next(key for key, value in STORAGE_TYPES.items() if DTYPES[value] is parts.storage),
        num_embeddings=spec.num_embeddings,
        seed=spec.seed,
        init=described(spec.init) or {},
        optimizer=OptimizerRecord(store.optimizer.name, _finite(name, store.optimizer.hyper()), parts.slots),
        rows=0,
        admission=described(spec.admission),
        eviction=described(spec.eviction),
    )


def described(settings: Any) -> dict[str, Any] | None:
    """A settings object as JSON: its class's name and its fields; functions by their names. None stays None."""
    if settings is None:
        return None
    fields = dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()
    return {"name": type(settings).__name__, **{one.name: _plain(getattr(settings, one.name)) for one in fields}}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if callable(value):
        return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return described(value) if dataclasses.is_dataclass(value) else type(value).__qualname__


def _finite(table: str, hyper: dict[str, float]) -> dict[str, float]:
    for name, value in hyper.items():
        if not math.isfinite(value):
            raise CheckpointError(f"checkpoint: {name} of the optimizer of table {table!r} is {value!r}; give a number")
    return {name: float(value) for name, value in hyper.items()}
