"""Admission rules: settings only; the store applies them when a batch's keys are retrieved.

A rule is asked about keys that have no row, in the order of the batch's distinct keys. It decides from what retrieval
itself wrote (counts of earlier batches and of this one), never from row values, so every schedule decides alike. A key
that is not admitted reads the table's default row in that batch, and its gradient is skipped.

All keys of a batch are decided before any of them is counted. Keys that stay without a row, also those that are
admitted but find no room, are then counted in order. A new row's frequency starts with the key's occurrences so far,
those of its batch included; an exact count is forgotten then, so that an evicted key starts anew. A filter never
forgets: a key that comes back after eviction has at least the count it had before its last admission.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CountingFilter", "MinFrequency", "Probability"]


@dataclass(frozen=True)
class CountingFilter:
    """Approximate counts in fixed memory: a counting Bloom filter, four 8-bit cells a key, the smallest is the count.

    Counting a key raises those of its cells that are below its new count. Counts are never too small; a key that
    shares all its cells with others may be admitted early. Cells lie in blocks of at least 512, by virtual slice (bits
    48-63 of the key's hash); a process has those of its own slices.

    Attributes:
        cells: bytes of the whole table's filter, over all ranks; 8 times the number of rare keys expected makes early
            admissions rare (below 3 %). At least 4096.
    """

    cells: int

    def __post_init__(self) -> None:
        if isinstance(self.cells, bool) or not isinstance(self.cells, int) or not 4096 <= self.cells <= 1 << 40:
            raise ValueError(f"CountingFilter: cells must be an integer in [4096, 2^40], got {self.cells!r}")


@dataclass(frozen=True)
class MinFrequency:
    """A key gets a row in the batch in which its occurrences, all batches counted, reach `count`.

    Attributes:
        count: occurrences needed, >= 1; at most 255 with a filter.
        filter: where counts of keys without a row are kept; None: exactly, 12 bytes or more for each such key.
    """

    count: int
    filter: CountingFilter | None = None

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 1 <= self.count < 1 << 31:
            raise ValueError(f"MinFrequency: count must be an integer in [1, 2^31), got {self.count!r}")
        if self.filter is not None and not isinstance(self.filter, CountingFilter):
            raise TypeError(f"MinFrequency: filter must be a CountingFilter or None, got {self.filter!r}")
        if self.filter is not None and self.count > 255:
            raise ValueError(f"MinFrequency: a filter counts to 255 only, got count {self.count}; use exact counts")


@dataclass(frozen=True)
class Probability:
    """A key gets a row with this probability, decided once and for all by (seed, table, key).

    Attributes:
        probability: in [0, 1].
        seed: chooses another set of keys.
    """

    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        value = self.probability
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"Probability: probability must be a number in [0, 1], got {value!r}")
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"Probability: probability must be in [0, 1], got {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"Probability: seed must be an integer, got {self.seed!r}")
