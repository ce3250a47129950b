"""One rank's samples of a step: dense numbers, keys of every feature, labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.jagged import KeyedJaggedTensor

__all__ = ["Batch"]


@dataclass
class Batch:
    """B samples.

    Attributes:
        dense: float32 [B, n]; n may be 0.
        sparse: keys of each feature, stride B.
        labels: float32 [B].

    Raises:
        ValueError: the three disagree on B.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.labels.dim() != 1 or self.dense.dim() != 2:
            raise ValueError(
                f"Batch: expected dense [B, n] and labels [B], got {list(self.dense.shape)} and "
                f"{list(self.labels.shape)}"
            )
        sizes = {"dense": self.dense.shape[0], "sparse": self.sparse.stride(), "labels": self.labels.shape[0]}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"Batch: numbers of samples differ: {sizes}")

    def __len__(self) -> int:
        """Number of samples."""
        return self.labels.shape[0]

    def select(self, indices: Tensor) -> Batch:
        """The samples at `indices` (int64 [m]), in that order. Raises IndexError where there is no such sample."""
        sparse = self.sparse.select(indices)
        return Batch(self.dense.index_select(0, indices), sparse, self.labels.index_select(0, indices))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """A copy on `device`; asynchronous from pinned memory with `non_blocking`."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """A copy in pinned memory; on a machine without an accelerator, where there is none, the object itself."""
        if not torch.accelerator.is_available():
            return self
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of every tensor until work queued on `stream` is done."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)
