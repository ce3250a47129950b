"""Batches of a data set for one rank, in the data's order or shuffled from a seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from nestpipe_kernels.data.batch import Batch
from nestpipe_kernels.data.dataset import Dataset

__all__ = ["BatchLoader", "batches"]


class BatchLoader:
    """Made by `batches`; every `iter()` starts again at the first batch of the first epoch."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool,
        epochs: int | None,
        shuffle_seed: int | None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.epochs = epochs
        self.shuffle_seed = shuffle_seed

    @property
    def batches_per_epoch(self) -> int:
        """This rank's batches in an epoch; the ranks may differ by one."""
        return sum(1 for _ in self._ranges())

    def __len__(self) -> int:
        """This rank's batches in all epochs. Raises TypeError if the epochs have no end."""
        if self.epochs is None:
            raise TypeError("a BatchLoader with epochs=None has no length")
        return self.epochs * self.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        for epoch in itertools.count() if self.epochs is None else range(self.epochs):
            order = self._order(epoch)
            for start, end in self._ranges():
                yield self.dataset.batch(torch.arange(start, end) if order is None else order[start:end])

    def _order(self, epoch: int) -> torch.Tensor | None:
        if self.shuffle_seed is None:
            return None
        generator = torch.Generator().manual_seed((self.shuffle_seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(len(self.dataset), generator=generator)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """This rank's part of each step: step s covers the next batch_size * world_size samples, rank by rank."""
        total, per_step = len(self.dataset), self.batch_size * self.world_size
        for first in range(0, total, per_step):
            left = min(per_step, total - first)
            if left < per_step and self.drop_last:
                return
            share, extra = divmod(left, self.world_size)
            start = first + self.rank * share + min(self.rank, extra)
            end = start + share + (self.rank < extra)
            if end > start:
                yield start, end


def batches(
    dataset: Dataset,
    batch_size: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    *,
    drop_last: bool = False,
    epochs: int | None = 1,
    shuffle_seed: int | None = None,
) -> BatchLoader:
    """One rank's batches.

    Step s covers the next `batch_size * world_size` samples; rank r takes the r-th `batch_size` of them. What remains
    for the last step is dealt as evenly as it goes: sizes differ by one at most, and with fewer samples than ranks the
    last ranks have one batch less.

    Args:
        dataset: where samples come from.
        batch_size: samples of a rank in a step; None for the data set's default.
        rank, world_size: which part is taken.
        drop_last: leave out a last step that is not full.
        epochs: passes over the data; None repeats without end.
        shuffle_seed: shuffle the samples anew in each epoch, alike on all ranks; None keeps the data's order (time).

    Raises:
        ValueError: a size, rank or number of epochs that makes no sense, with its value.
    """
    size = dataset.default_batch_size if batch_size is None else batch_size
    if size < 1:
        raise ValueError(f"batches: batch_size must be >= 1, got {size}")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"batches: rank must be in 0 .. world_size - 1, got rank {rank} of world_size {world_size}")
    if epochs is not None and epochs < 0:
        raise ValueError(f"batches: epochs must be >= 0 or None, got {epochs}")
    loader = BatchLoader(dataset, size, rank, world_size, drop_last, epochs, shuffle_seed)
    if epochs is None and loader.batches_per_epoch == 0:
        raise ValueError(
            f"batches: {len(dataset)} samples give rank {rank} of {world_size} no batch of {size}, and epochs=None "
            "would search for one without end"
        )
    return loader
