"""A synthetic click log: Zipf popularity, topics, histories of varying length, keys all over int64.

Sample i is a function of (seed, i) alone (a counter-based generator), so ranks, batch sizes and orders see the same
samples, and a rank makes only its own. How a sample comes about:

  user     popularity rank by Zipf: P(rank r) proportional to 1 / (r + 1)^zipf_exponent, r < num_users. A user has a
           home topic, a hash of the rank.
  history  length geometric with mean `mean_history`, at most `max_history`; each film is, with probability
           `topic_affinity`, of the user's topic (Zipf among the topic's items), else Zipf among all items.
  item     chosen like one film of the history. Item rank r belongs to topic r % num_topics.
  dense    standard normal numbers.
  label    1 with probability sigmoid(2 * [item is of the user's topic] - 1 + taste(item) + dense[0] / 2), where
           taste(item) is a fixed hash of the item in -1 .. 1: there is something to learn from every input.

A key is a bijective 64-bit mix of the rank, another one for each table: any int64 may occur and ranks never collide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestpipe_kernels.data.batch import Batch
from nestpipe_kernels.data.dataset import DEFAULT_BATCH_SIZE, TableSchema
from nestpipe_kernels.jagged import KeyedJaggedTensor

__all__ = ["SyntheticConfig", "SyntheticDataset", "zipf_cdf"]

_Words = npt.NDArray[np.uint64]
_MASK = 2**64 - 1
# Numbers of independent streams of random words.
_USER, _LENGTH, _ITEM, _HISTORY, _DENSE, _LABEL, _TOPIC, _TASTE, _USER_KEY, _ITEM_KEY = range(10)


@dataclass(frozen=True)
class SyntheticConfig:
    """Settings of the generator.

    Attributes:
        num_samples: length of the data set.
        seed: another seed, another log.
        num_users, num_items: sizes of the two vocabularies.
        num_topics: topics, at most num_items.
        zipf_exponent: skew of popularity, >= 0; 0 is uniform.
        topic_affinity: probability that a film is of the user's topic, 0 .. 1.
        mean_history, max_history: mean (before the cut) and greatest length of a history.
        num_dense: numbers per sample.
    """

    num_samples: int = 65536
    seed: int = 0
    num_users: int = 100_000
    num_items: int = 100_000
    num_topics: int = 64
    zipf_exponent: float = 1.05
    topic_affinity: float = 0.7
    mean_history: float = 20.0
    max_history: int = 50
    num_dense: int = 4

    def __post_init__(self) -> None:
        for name, least in (("num_users", 1), ("num_items", 1), ("num_topics", 1), ("num_samples", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"SyntheticConfig: {name} must be >= {least}, got {getattr(self, name)}")
        for name in ("zipf_exponent", "mean_history", "max_history", "num_dense"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"SyntheticConfig: {name} must be >= 0, got {getattr(self, name)}")
        if not 0 <= self.topic_affinity <= 1:
            raise ValueError(f"SyntheticConfig: topic_affinity must be in 0 .. 1, got {self.topic_affinity}")
        if self.num_topics > self.num_items:
            raise ValueError(
                f"SyntheticConfig: num_topics must be <= num_items ({self.num_items}), got {self.num_topics}"
            )


class SyntheticDataset:
    """The log that a SyntheticConfig describes. Features `user`, `item`, `history`; tables `user` and `item`."""

    name = "synthetic"
    feature_names = ("user", "item", "history")
    tables = (TableSchema("user", ("user",)), TableSchema("item", ("item", "history")))
    default_batch_size = DEFAULT_BATCH_SIZE

    def __init__(self, config: SyntheticConfig | None = None) -> None:
        self.config = config = SyntheticConfig() if config is None else config
        self.num_dense = config.num_dense
        self._user_cdf = zipf_cdf(config.num_users, config.zipf_exponent)
        self._item_cdf = zipf_cdf(config.num_items, config.zipf_exponent)
        # Every topic has this many items; the few that remain are reached through the popularity of all items.
        self._topic_cdf = zipf_cdf(config.num_items // config.num_topics, config.zipf_exponent)

    def __len__(self) -> int:
        return self.config.num_samples

    def batch(self, indices: Tensor) -> Batch:
        """The samples at `indices` (int64 [m])."""
        config = self.config
        samples = indices.numpy().astype(np.uint64)
        users = np.searchsorted(self._user_cdf, self._uniform(_USER, samples), side="right")
        topics = (_words(config.seed, _TOPIC, users.astype(np.uint64)) % np.uint64(config.num_topics)).astype(np.int64)
        items = self._films(_ITEM, samples, np.zeros_like(samples), topics)

        lengths = self._lengths(samples)
        owner = np.repeat(np.arange(len(samples)), lengths)
        position = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        history = self._films(_HISTORY, samples[owner], position.astype(np.uint64), topics[owner])

        dense = self._normal(samples)
        keys = [self._keys(_USER_KEY, users), self._keys(_ITEM_KEY, items), self._keys(_ITEM_KEY, history)]
        all_lengths = np.concatenate([np.ones(2 * len(samples), dtype=np.int64), lengths])
        sparse = KeyedJaggedTensor(
            self.feature_names,
            torch.from_numpy(np.concatenate(keys)),
            lengths=torch.from_numpy(all_lengths),
            stride=len(samples),
        )
        labels = self._labels(samples, items, topics, dense)
        return Batch(torch.from_numpy(dense.astype(np.float32)), sparse, torch.from_numpy(labels))

    def _uniform(self, stream: int, samples: _Words, position: _Words | None = None) -> npt.NDArray[np.float64]:
        """Doubles in [0, 1), one per (sample, position)."""
        words = _words(self.config.seed, stream, samples, position)
        return np.asarray((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def _films(
        self, stream: int, samples: _Words, position: _Words, topics: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Popularity ranks of films: by topic with probability topic_affinity, else among all."""
        two = np.uint64(2)
        by_topic = self._uniform(stream, samples, position * two) < self.config.topic_affinity
        u = self._uniform(stream, samples, position * two + np.uint64(1))
        within = np.searchsorted(self._topic_cdf, u, side="right") * self.config.num_topics + topics
        return np.asarray(np.where(by_topic, within, np.searchsorted(self._item_cdf, u, side="right")))

    def _lengths(self, samples: _Words) -> npt.NDArray[np.int64]:
        mean = self.config.mean_history
        if mean == 0:
            return np.zeros(len(samples), dtype=np.int64)
        # Geometric on 0, 1, ... with P(length >= l) = (mean / (1 + mean))^l.
        lengths = np.log1p(-self._uniform(_LENGTH, samples)) / math.log(mean / (1.0 + mean))
        return np.minimum(np.floor(lengths), self.config.max_history).astype(np.int64)

    def _normal(self, samples: _Words) -> npt.NDArray[np.float64]:
        """[m, num_dense] standard normal numbers (Box-Muller)."""
        columns = np.arange(self.config.num_dense, dtype=np.uint64) * np.uint64(2)
        radius = np.sqrt(-2.0 * np.log1p(-self._uniform(_DENSE, samples[:, None], columns)))
        angle = self._uniform(_DENSE, samples[:, None], columns + np.uint64(1))
        return np.asarray(radius * np.cos(2.0 * np.pi * angle))

    def _labels(
        self,
        samples: _Words,
        items: npt.NDArray[np.int64],
        topics: npt.NDArray[np.int64],
        dense: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float32]:
        logit = 2.0 * (items % self.config.num_topics == topics) - 1.0
        logit += 2.0 * self._uniform(_TASTE, items.astype(np.uint64)) - 1.0
        if self.config.num_dense:
            logit += dense[:, 0] / 2.0
        clicked = self._uniform(_LABEL, samples) < 1.0 / (1.0 + np.exp(-logit))
        return np.asarray(clicked, dtype=np.float32)

    def _keys(self, stream: int, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return _words(self.config.seed, stream, ranks.astype(np.uint64)).view(np.int64)


def zipf_cdf(size: int, exponent: float) -> npt.NDArray[np.float64]:
    """float64 [size - 1]: P(rank <= r) for r < size - 1, where P(rank r) is proportional to 1 / (r + 1)^exponent.

    searchsorted(..., side="right") of a uniform number in [0, 1) gives a rank < size.
    """
    cdf = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
    return np.asarray(cdf[:-1] / cdf[-1])


def _mix(words: _Words) -> _Words:
    """A bijection of 64-bit words (the finalizer of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)))


def _words(seed: int, stream: int, counter: _Words, position: _Words | None = None) -> _Words:
    """Random words, one per (counter, position); a bijection of the counter where there is no position."""
    start = _mix(np.array([(seed * 0x9E3779B97F4A7C15 + stream + 1) & _MASK], dtype=np.uint64))
    words = _mix(counter * np.uint64(0xD1342543DE82EF95) + start)
    return words if position is None else _mix(words + position * np.uint64(0x9E3779B97F4A7C15))
