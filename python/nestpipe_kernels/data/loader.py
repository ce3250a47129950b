"""Batches of a data set for one rank, in the data's order or shuffled from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nestpipe_kernels.data.batch import Batch
from nestpipe_kernels.data.dataset import Dataset

__all__ = ["BatchLoader", "batches"]


class BatchLoader:
    """Made by `batches`; every `iter()` starts again at the first batch of the first epoch.

    `state_dict()` is the position of the iterator made last, behind the batch it gave last: epoch and sample number
    over all ranks, so a loader of another world size or batch size may go on from it. After `load_state_dict` the next
    `iter()` (alone) starts there.
    """

    state_for_any_world_size = True

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
        self._start: tuple[int, int] | None = None
        self._last: _Batches | None = None

    @property
    def batches_per_epoch(self) -> int:
        """This rank's batches in an epoch; the ranks may differ by one."""
        return sum(1 for _ in self._ranges())

    def __len__(self) -> int:
        """This rank's batches in all epochs. Raises TypeError if the epochs have no end."""
        if self.epochs is None:
            raise TypeError("a BatchLoader with epochs=None has no length")
        return self.epochs * self.batches_per_epoch

    def __iter__(self) -> _Batches:
        start, self._start = self._start or (0, 0), None
        self._last = _Batches(self, *start)
        return self._last

    def state_dict(self) -> dict[str, Any]:
        """The position, in plain numbers: {"epoch", "sample", "samples", "shuffle_seed"}."""
        if self._start is not None:
            return self._state(*self._start)
        return self._state(0, 0) if self._last is None else self._last.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter()` start at a position.

        Raises:
            ValueError: a state of another data set or order, with both values; or none at all.
        """
        self._start = self._position(state)

    def _state(self, epoch: int, sample: int) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "sample": sample,
            "samples": len(self.dataset),
            "shuffle_seed": self.shuffle_seed,
        }

    def _position(self, state: Mapping[str, Any]) -> tuple[int, int]:
        wanted = self._state(0, 0)
        if not isinstance(state, Mapping) or set(state) != set(wanted):
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"BatchLoader: expected a state with {sorted(wanted)}, got {got}")
        for name, what in (("samples", "number of samples"), ("shuffle_seed", "shuffle_seed")):
            if state[name] != wanted[name]:
                raise ValueError(
                    f"BatchLoader: the state is of data with {what} {state[name]}, this loader's is {wanted[name]}; "
                    "use the same data and seed, or start from the beginning"
                )
        epoch, sample = state["epoch"], state["sample"]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in (epoch, sample)):
            raise ValueError(f"BatchLoader: epoch and sample must be integers >= 0, got {epoch!r} and {sample!r}")
        if sample > len(self.dataset):
            raise ValueError(f"BatchLoader: the state's sample {sample} is beyond the {len(self.dataset)} samples")
        return epoch, sample

    def _order(self, epoch: int) -> torch.Tensor | None:
        if self.shuffle_seed is None:
            return None
        generator = torch.Generator().manual_seed((self.shuffle_seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(len(self.dataset), generator=generator)

    def _ranges(self, sample: int = 0) -> Iterator[tuple[int, int, int]]:
        """This rank's part of each step from `sample` on, and the sample behind the step: a step covers the next
        batch_size * world_size samples, rank by rank."""
        total, per_step = len(self.dataset), self.batch_size * self.world_size
        for first in range(sample, total, per_step):
            left = min(per_step, total - first)
            if left < per_step and self.drop_last:
                return
            share, extra = divmod(left, self.world_size)
            start = first + self.rank * share + min(self.rank, extra)
            end = start + share + (self.rank < extra)
            if end > start:
                yield start, end, first + left


class _Batches:
    """One pass of a BatchLoader over its epochs; knows where it is."""

    state_for_any_world_size = True

    def __init__(self, loader: BatchLoader, epoch: int, sample: int) -> None:
        self._loader = loader
        self._epoch, self._sample = epoch, sample
        self._batches = self._run()

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """As BatchLoader's, of this iterator."""
        return self._loader._state(self._epoch, self._sample)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position. Raises ValueError as BatchLoader's."""
        self._epoch, self._sample = self._loader._position(state)
        self._batches = self._run()

    def _run(self) -> Iterator[Batch]:
        loader = self._loader
        while loader.epochs is None or self._epoch < loader.epochs:
            order = loader._order(self._epoch)
            for start, end, behind in loader._ranges(self._sample):
                batch = loader.dataset.batch(torch.arange(start, end) if order is None else order[start:end])
                self._sample = behind
                yield batch
            self._epoch, self._sample = self._epoch + 1, 0


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
