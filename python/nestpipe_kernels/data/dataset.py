"""What a data set offers: samples by number, and which tables its features want."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

__all__ = ["DEFAULT_BATCH_SIZE", "Dataset", "TableSchema"]

DEFAULT_BATCH_SIZE = 512


@dataclass(frozen=True)
class TableSchema:
    """A table that a data set suggests: an open vocabulary, looked up by these features."""

    name: str
    feature_names: tuple[str, ...]


class Dataset(Protocol):
    """Samples 0 .. len - 1 in a fixed order (by time, where the data has one)."""

    @property
    def name(self) -> str: ...

    @property
    def num_dense(self) -> int:
        """Numbers per sample, n of Batch.dense."""
        ...

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Keys of Batch.sparse, in order."""
        ...

    @property
    def tables(self) -> tuple[TableSchema, ...]:
        """Tables that together cover every feature once."""
        ...

    @property
    def default_batch_size(self) -> int: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> Any:
        """The samples at `indices` (int64 [m], each 0 .. len - 1), in that order; the same for equal indices. A Batch,
        or a SequenceBatch where samples are sequences."""
        ...
