"""Interactions of users in the order of time, as samples for sequence models: what comes next, at every place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.data.dataset import TableSchema
from nestpipe_kernels.jagged import JaggedTensor, KeyedJaggedTensor

__all__ = ["Interactions", "NextItemRanking", "SequenceBatch", "SequenceDataset"]

_FEATURES = ("sequence", "target", "candidates")


@dataclass
class Interactions:
    """What users did, in any order; equal times keep the order given."""

    users: Tensor
    """int64 [n]"""
    items: Tensor
    """int64 [n]"""
    times: Tensor
    """float64 [n], seconds; whole seconds are what models see, all of it counts for the order."""


@dataclass
class SequenceBatch:
    """B pieces of users' histories.

    Attributes:
        sparse: keys of `sequence` (items in order), `target` (for the last places of the sequence, as many as there are
            targets: the item that came next) and `candidates` (items that the target is told from), stride B.
        times: int64, seconds, one for each item of `sequence`.
    """

    sparse: KeyedJaggedTensor
    times: JaggedTensor

    def __len__(self) -> int:
        """Number of samples."""
        return self.sparse.stride()

    def tokens(self) -> Tensor:
        """int64 [B]: the items of each sequence; for PipelineConfig(balance=SequenceBatch.tokens)."""
        return self.times.lengths().to(torch.int64)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequenceBatch:
        """A copy on `device`; asynchronous from pinned memory with `non_blocking`."""
        return SequenceBatch(self.sparse.to(device, non_blocking), self.times.to(device, non_blocking))

    def pin_memory(self) -> SequenceBatch:
        """A copy in pinned memory; on a machine without an accelerator, where there is none, the object itself."""
        if not torch.accelerator.is_available():
            return self
        return SequenceBatch(self.sparse.pin_memory(), self.times.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of every tensor until work queued on `stream` is done."""
        self.sparse.record_stream(stream)
        self.times.record_stream(stream)


class _ByUser:
    """Interactions side by side by user, in the order of time."""

    def __init__(self, interactions: Interactions) -> None:
        users, times = interactions.users.numpy(), interactions.times.numpy()
        order = np.lexsort((times, users))
        self.items = interactions.items[torch.from_numpy(order)]
        self.times = interactions.times[torch.from_numpy(order)].floor().to(torch.int64)
        starts = np.flatnonzero(np.diff(users[order], prepend=users[order[0]] + 1))
        self.starts = torch.from_numpy(starts)
        self.lengths = torch.diff(self.starts, append=torch.tensor([len(users)]))

    def take(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """int64: places `starts[i]` to `starts[i] + lengths[i]`, one after another."""
        ends = torch.cumsum(lengths, 0)
        shift = torch.repeat_interleave(starts - (ends - lengths), lengths)
        return torch.arange(shift.numel()) + shift


class SequenceDataset:
    """Histories in pieces of at most `max_length` items, each with the items that came next; the last item of every
    user is left to `ranking()`. Samples follow the time of their last item.

    Args:
        name: of the data set.
        interactions: at least one user has three or more; times within 2^53 seconds of 0.
        max_length: most items of a sample.
        num_candidates: items that every target of a sample is told from (sampled softmax), drawn evenly from all items;
            the same for a sample each time.
        seed: of the candidates.

    Raises:
        ValueError: a size that is no integer >= 1, a time that is no number of seconds, or no user with three
            interactions.
    """

    num_dense = 0
    feature_names = _FEATURES
    tables = (TableSchema("item", _FEATURES),)
    default_batch_size = 64

    def __init__(
        self, name: str, interactions: Interactions, max_length: int = 64, num_candidates: int = 128, seed: int = 0
    ) -> None:
        for what, size in (("max_length", max_length), ("num_candidates", num_candidates)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"SequenceDataset: {what} must be an integer >= 1, got {size!r}")
        if bool((~(interactions.times.abs() <= 2.0**53)).any()):
            raise ValueError(f"{name}: times must be seconds within 2^53 of 0")
        self.name, self.max_length = name, max_length
        self.catalogue = torch.unique(interactions.items)
        self._num_candidates, self._seed = num_candidates, seed
        if not len(interactions.users):
            raise ValueError(f"{name}: no user has three interactions, so there is nothing to learn and to rank")
        self._data = _ByUser(interactions)
        pairs = self._data.lengths - 2  # the first item has nothing before it, the last one is held out
        users = torch.nonzero(pairs > 0).squeeze(1)
        if not len(users):
            raise ValueError(f"{name}: no user has three interactions, so there is nothing to learn and to rank")
        self._users = users
        pieces = (pairs[users] + max_length - 1) // max_length
        number = self._data.take(torch.zeros_like(pieces), pieces)  # 0, 1, ... for each user
        starts = torch.repeat_interleave(self._data.starts[users], pieces) + number * max_length
        lengths = (torch.repeat_interleave(pairs[users], pieces) - number * max_length).clamp(max=max_length)
        order = torch.argsort(self._data.times[starts + lengths], stable=True)
        self._starts, self._lengths = starts[order], lengths[order]

    def __len__(self) -> int:
        return self._starts.numel()

    def batch(self, indices: Tensor) -> SequenceBatch:
        """The samples at `indices` (int64 [m])."""
        starts, lengths = self._starts[indices], self._lengths[indices]
        places = self._data.take(starts, lengths)
        drawn = [places.new_empty(0), *(self._candidates(index) for index in indices.tolist())]
        counts = torch.full((len(indices),), self._num_candidates, dtype=torch.int64)
        return _batch(self._data, places, lengths, self._data.items[places + 1], lengths, torch.cat(drawn), counts)

    def _candidates(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + index) % 2**63)
        chosen = torch.randint(len(self.catalogue), (self._num_candidates,), generator=generator, dtype=torch.int64)
        drawn: Tensor = self.catalogue[chosen]
        return drawn

    def ranking(self) -> NextItemRanking:
        """One sample for each user: the last item, to be ranked among all items."""
        ends = self._data.starts[self._users] + self._data.lengths[self._users] - 1
        lengths = (self._data.lengths[self._users] - 1).clamp(max=self.max_length)
        return NextItemRanking(self.name, self._data, ends, lengths, self.catalogue)


class NextItemRanking:
    """Made by `SequenceDataset.ranking()`: histories, the item that came next, and all items as candidates."""

    num_dense = 0
    feature_names = _FEATURES
    tables = SequenceDataset.tables
    default_batch_size = 64

    def __init__(self, name: str, data: _ByUser, ends: Tensor, lengths: Tensor, catalogue: Tensor) -> None:
        self.name = name
        self._data, self._ends, self._lengths, self._catalogue = data, ends, lengths, catalogue

    def __len__(self) -> int:
        return self._ends.numel()

    def batch(self, indices: Tensor) -> SequenceBatch:
        """The users at `indices` (int64 [m])."""
        ends, lengths = self._ends[indices], self._lengths[indices]
        places = self._data.take(ends - lengths, lengths)
        ones = torch.ones_like(lengths)
        every = self._catalogue.repeat(len(indices))
        return _batch(self._data, places, lengths, self._data.items[ends], ones, every, ones * len(self._catalogue))


def _batch(
    data: _ByUser, places: Tensor, lengths: Tensor, targets: Tensor, ahead: Tensor, candidates: Tensor, counts: Tensor
) -> SequenceBatch:
    sparse = KeyedJaggedTensor(
        list(_FEATURES),
        torch.cat([data.items[places], targets, candidates]),
        lengths=torch.cat([lengths, ahead, counts]),
        stride=len(lengths),
    )
    return SequenceBatch(sparse, JaggedTensor(data.times[places], lengths=lengths))
