"""Eviction rules: settings only; the store applies them on entry to the retrieval of a batch.

Rule, alike in every schedule. Batch t finds that a table would exceed its capacity: then the rows with the lowest
scores go, until the table with its new rows is at most `capacity * (1 - slack)`, as far as pins allow. Pinned rows
never go: rows of batch t itself, and rows last used by batch t-1. Equal scores go by the hash of the key, lowest first.
If pinned rows leave too little room, the last of the new keys are refused. Scores come from metadata that retrieval
alone writes (last_used, frequency), never from row values. Which rows go is a function of the table's keys and their
metadata: nothing else is remembered, so a run that continues from a checkpoint evicts the same rows. Evicted keys are
as if they had never had a row: their next one starts from initial values, without optimizer state, metadata or counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["LFU", "LRU", "TTL", "Score"]


@dataclass(frozen=True)
class LRU:
    """The rows that went unused for the most batches go first; among them those with the fewest occurrences.

    Attributes:
        slack: part of the capacity that is freed at once, in [0, 0.5]: choosing rows costs a pass over the table.
    """

    slack: float = 0.0625

    def __post_init__(self) -> None:
        _check_slack(type(self).__name__, self.slack)


@dataclass(frozen=True)
class LFU:
    """The rows with the fewest occurrences go first; among them those that went unused for longest.

    Attributes:
        slack: part of the capacity that is freed at once, in [0, 0.5].
    """

    slack: float = 0.0625

    def __post_init__(self) -> None:
        _check_slack(type(self).__name__, self.slack)


@dataclass(frozen=True)
class TTL:
    """Rows unused for `steps` batches go, capacity or not; a table that is full all the same evicts as LRU does.

    Expired rows are looked for at every batch whose index is a multiple of max(1, steps // 16): row last used at batch
    u goes at the first such batch t with t - u > steps, unless t uses it.

    Attributes:
        steps: batches, >= 1.
        slack: part of the capacity that is freed at once, in [0, 0.5].
    """

    steps: int
    slack: float = 0.0625

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or not 1 <= self.steps < 1 << 62:
            raise ValueError(f"TTL: steps must be an integer >= 1, got {self.steps!r}")
        _check_slack(type(self).__name__, self.slack)

    @property
    def interval(self) -> int:
        """Batches between two looks for expired rows."""
        return max(1, self.steps // 16)


@dataclass(frozen=True, repr=False)
class Score:
    """Rows with the lowest score go first.

    Attributes:
        function: (keys, last_used, frequency, batch) -> score: int64 [n] each and an int, to float64 [n] (other
            float types are widened), larger for rows to keep. A function of its arguments alone, alike on all ranks.
            It gets the rows that may go (not pinned), by the hash of their keys; it must not use the store. NaN is an
            error, and nothing changes then. It runs on the retrieval lane's thread.
        slack: part of the capacity that is freed at once, in [0, 0.5].
    """

    function: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    slack: float = 0.0625

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Score: function must be callable, got {type(self.function).__name__}")
        _check_slack(type(self).__name__, self.slack)

    def __repr__(self) -> str:
        """The function by its name: the same text on every rank and in every run."""
        named = self.function if hasattr(self.function, "__qualname__") else type(self.function)
        return f"Score(function={named.__module__}.{named.__qualname__}, slack={self.slack!r})"


def _check_slack(rule: str, slack: float) -> None:
    if isinstance(slack, bool) or not isinstance(slack, (int, float)) or not 0.0 <= slack <= 0.5:
        raise ValueError(f"{rule}: slack must be a number in [0, 0.5], got {slack!r}")
