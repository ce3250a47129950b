"""Admission and eviction of one table as a dictionary: the written rules of nk.policy, played as plainly as can be.

Tests compare stores with it. It knows keys and their metadata, no rows, handles or threads; undo takes a kept copy.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

import torch

from ..policy import LFU, LRU, TTL, MinFrequency, Probability, Score
from ..types import KeyStatus

__all__ = ["TableModel", "hash_key", "hash_name"]

MASK = (1 << 64) - 1
LARGEST_COUNT = (1 << 32) - 2
LARGEST_CELL = 255
PROBES = 4
KEPT = 8
"""Retrievals that can be taken back."""

Admission = MinFrequency | Probability | None
Eviction = LRU | LFU | TTL | Score | None


def _mix(x: int) -> int:
    x ^= x >> 32
    x = x * 0x9FB21C651E98DF25 & MASK
    x ^= x >> 29
    x = x * 0xD6E8FEB86659FD93 & MASK
    return x ^ x >> 32


def hash_name(name: str) -> int:
    """The hash of a table's name (64 bits)."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 & MASK
    return _mix(h)


def hash_key(table_hash: int, key: int) -> int:
    """The hash of a key of a table (64 bits): distinct keys have distinct ones."""
    return _mix((key & MASK) ^ table_hash)


class _Filter:
    """A counting filter: blocks of cells by virtual slice, four of its cells for each key, the smallest one counts."""

    def __init__(self, cells: int) -> None:
        self.num_blocks = 1
        while self.num_blocks < 65536 and self.num_blocks * 2 * 512 <= cells:
            self.num_blocks *= 2
        self.cells_per_block = cells // self.num_blocks
        self.blocks: dict[int, list[int]] = {}

    def _cells(self, key_hash: int) -> tuple[int, list[int]]:
        word = _mix(key_hash ^ 0x9E3779B97F4A7C15)
        low, step = word & 0xFFFFFFFF, word >> 32 | 1
        places = [((low + i * step) % (1 << 32)) * self.cells_per_block >> 32 for i in range(PROBES)]
        return (key_hash >> 48) * self.num_blocks >> 16, places

    def count(self, key_hash: int) -> int:
        block, places = self._cells(key_hash)
        return min(self.blocks[block][i] for i in places) if block in self.blocks else 0

    def raise_to(self, key_hash: int, total: int) -> None:
        block, places = self._cells(key_hash)
        cells = self.blocks.setdefault(block, [0] * self.cells_per_block)
        for i in places:
            cells[i] = max(cells[i], min(total, LARGEST_CELL))


class TableModel:
    """The keys of one table, what retrieval knows about them, and what becomes of them.

    Args:
        name, capacity, admission, eviction: as in `types.TableSpec`.
    """

    def __init__(
        self, name: str, capacity: int | None = None, admission: Admission = None, eviction: Eviction = None
    ) -> None:
        self.name, self.capacity, self.admission, self.eviction = name, capacity, admission, eviction
        self.table_hash = hash_name(name)
        self.rows: dict[int, tuple[int, int]] = {}
        """key -> (last_used, frequency)"""
        self.ghosts: dict[int, int] = {}
        """key without a row -> occurrences so far, where the rule counts exactly"""
        self.filter: _Filter | None = None
        if isinstance(admission, MinFrequency) and admission.filter is not None:
            self.filter = _Filter(admission.filter.cells)
        self.counters = dict.fromkeys(("inserted", "evicted", "expired", "refused", "not_admitted"), 0)
        self.largest_batch = -1
        self._before: deque[tuple[object, ...]] = deque(maxlen=KEPT)

    def retrieve(
        self, keys: Sequence[int], counts: Sequence[int] | None = None, batch: int = -1
    ) -> tuple[list[KeyStatus], list[int]]:
        """What `EmbeddingStore.retrieve` says about each key, and the keys that it evicts or lets expire, ascending."""
        self._before.append(copy.deepcopy(self._state()))
        occurrences: dict[int, int] = {}
        for j, key in enumerate(keys):
            occurrences[key] = occurrences.get(key, 0) + (1 if counts is None else counts[j])
        found = {key for key in occurrences if key in self.rows}
        new = {}
        for key in occurrences:
            if key not in found:
                before = self._count(key)
                if self._admitted(key, before + occurrences[key]):
                    new[key] = before + occurrences[key]
        evicted = self._evict(found, len(new), batch) if batch >= 0 else []
        for key in evicted:
            del self.rows[key]
        room = len(new) if self.capacity is None else max(0, self.capacity - len(self.rows))
        status = self._enter(occurrences, found, new, room, batch)
        self.largest_batch = max(self.largest_batch, batch)
        return [_of_occurrence(status, key, keys[:j]) for j, key in enumerate(keys)], sorted(evicted)

    def undo(self) -> None:
        """Take back the newest retrieval that has not been taken back; up to KEPT of them."""
        state = self._before.pop()
        self.rows, self.ghosts, self.filter, self.counters, self.largest_batch = state  # type: ignore[assignment]

    def _state(self) -> tuple[object, ...]:
        return (self.rows, self.ghosts, self.filter, self.counters, self.largest_batch)

    def _count(self, key: int) -> int:
        if self.filter is not None:
            return self.filter.count(hash_key(self.table_hash, key))
        return self.ghosts.get(key, 0)

    def _admitted(self, key: int, total: int) -> bool:
        if isinstance(self.admission, MinFrequency):
            return total >= self.admission.count
        if isinstance(self.admission, Probability):
            word = _mix(hash_key(self.table_hash, key) ^ _mix((self.admission.seed & MASK) ^ 0xD1B54A32D192ED03))
            return (word >> 11) * 2.0**-53 < self.admission.probability
        return True

    def _evict(self, found: set[int], num_new: int, batch: int) -> list[int]:
        """The keys that go, with their reason counted."""
        rule = self.eviction
        if rule is None:
            return []
        expired: list[int] = []
        if isinstance(rule, TTL) and batch % rule.interval == 0:
            expired = [k for k, (used, _) in self.rows.items() if k not in found and batch - used > rule.steps]
        self.counters["expired"] += len(expired)
        remaining = len(self.rows) - len(expired)
        if self.capacity is None or remaining + num_new <= self.capacity:
            return expired
        gone = set(expired)
        loose = [k for k, (used, _) in self.rows.items() if k not in found and k not in gone and used < batch - 1]
        loose.sort(key=lambda key: hash_key(self.table_hash, key))
        scores = self._scores(loose, batch)
        order = sorted(range(len(loose)), key=lambda i: scores[i])  # stable: equal scores stay in order of hash
        excess = remaining + num_new - int(self.capacity * (1.0 - rule.slack))
        victims = [loose[i] for i in order[:excess]]
        self.counters["evicted"] += len(victims)
        return expired + victims

    def _scores(self, keys: list[int], batch: int) -> list[tuple[float, ...]]:
        metadata = [self.rows[key] for key in keys]
        if isinstance(self.eviction, LFU):
            return [(frequency, used) for used, frequency in metadata]
        if isinstance(self.eviction, Score):
            if not keys:
                return []
            used, frequency = (torch.tensor([m[i] for m in metadata], dtype=torch.int64) for i in (0, 1))
            scores = self.eviction.function(torch.tensor(keys, dtype=torch.int64), used, frequency, batch)
            return [(score,) for score in scores.to(torch.float64).tolist()]
        return [(used, frequency) for used, frequency in metadata]

    def _enter(
        self, occurrences: dict[int, int], found: set[int], new: dict[int, int], room: int, batch: int
    ) -> dict[int, KeyStatus]:
        """Metadata of found keys, rows of new ones while there is room, counts of the others."""
        status = {}
        for key, count in occurrences.items():
            if key in found:
                used, frequency = self.rows[key]
                self.rows[key] = (batch if batch >= 0 else used, frequency + count)
                status[key] = KeyStatus.FOUND
            elif key in new and room > 0:
                room -= 1
                self.rows[key] = (batch, new[key])
                self.ghosts.pop(key, None)
                self.counters["inserted"] += 1
                status[key] = KeyStatus.INSERTED
            else:
                self._count_on(key, self._count(key) + count)
                refused = key in new
                self.counters["refused" if refused else "not_admitted"] += 1
                status[key] = KeyStatus.REFUSED if refused else KeyStatus.NOT_ADMITTED
        return status

    def _count_on(self, key: int, total: int) -> None:
        if self.filter is not None:
            self.filter.raise_to(hash_key(self.table_hash, key), total)
        elif isinstance(self.admission, MinFrequency):
            self.ghosts[key] = min(total, LARGEST_COUNT)


def _of_occurrence(status: dict[int, KeyStatus], key: int, earlier: Sequence[int]) -> KeyStatus:
    """A new key is INSERTED where it comes first and FOUND after that."""
    if status[key] == KeyStatus.INSERTED and key in earlier:
        return KeyStatus.FOUND
    return status[key]
