"""Retrievals of a store on an accelerator taken back; rows that they evicted wait in limbo until that is settled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import KeyStatus, Retrieval
from .device_memory import StoreState
from .device_rows import INT32, INT64, UINT8, WRITE_METADATA, DeviceRows, call_words
from .policies import native_eviction
from .row_transfer import RowMetadata

__all__ = ["DeviceJournal", "DeviceUndo"]


@dataclass(eq=False)
class Limbo:
    """Rows that one retrieval evicted."""

    batch: int
    rows: Tensor
    """int32 [1 + most]: how many, then their numbers."""

    def words(self) -> list[int]:
        """As kernels take it."""
        return [self.rows.data_ptr(), self.rows.numel() - 1]


@dataclass
class DeviceJournal:
    """What undo needs beside handles and status."""

    sequence: int
    newest_before: int
    removals: int
    keys: Tensor
    tables: Tensor
    metadata: RowMetadata
    """Before the retrieval, of the keys that had rows."""
    counters: Tensor
    last_batch_before: int
    limbo: Limbo | None


class DeviceUndo(DeviceRows):
    """The part of DeviceStore that takes retrievals back."""

    _undoable: bool
    _removals: int
    _limbo: list[Limbo]
    _newest = -1
    _sequence = 0

    def _table_state(self) -> Tensor:
        raise NotImplementedError

    def undo(self, retrieval: Retrieval) -> None:
        """Take back a retrieval of this store, newest first, as `EmbeddingStore.undo`. Waits.

        Raises:
            ValueError: the store was not made with `undoable`, the retrieval has been undone before, a newer one has
                not, rows that it evicted are free (a batch two or more after it has been retrieved), or keys were
                erased since.
        """
        journal = self._journal_of("undo", retrieval)
        if journal.removals != self._removals:
            raise ValueError("undo: keys were erased since this retrieval, so its rows may belong to other keys now")
        if journal.sequence < 0:
            raise ValueError("undo: this retrieval has been undone already")
        if journal.sequence != self._newest:
            raise ValueError("undo: this is not the newest retrieval of the store: undo newer ones first")
        if self._has_gone(journal.limbo):
            raise ValueError(
                "undo: rows that this retrieval evicted are free since the retrieval of a batch two or more after it"
            )
        before = journal.metadata
        self._rows(WRITE_METADATA, retrieval.handles, [before.last_used.data_ptr(), before.frequency.data_ptr()])
        inserted = retrieval.status == KeyStatus.INSERTED.value
        self._erase(journal.keys[inserted], journal.tables[inserted])
        if journal.limbo is not None and journal.limbo in self._limbo:
            self._run("store_bring_back", journal.limbo.words())
            self._limbo.remove(journal.limbo)
        self._table_state()[:, 2:6] = journal.counters[:, 2:6]
        self._last_batch, self._newest = journal.last_batch_before, journal.newest_before
        journal.sequence = -1

    def evicted(self, retrieval: Retrieval) -> tuple[Tensor, Tensor]:
        """Keys int64 [m] and tables int32 [m] that a retrieval evicted or let expire, by table and key, ascending.

        Waits.

        Raises:
            ValueError: the store was not made with `undoable`; or their rows are free, and they are forgotten.
        """
        limbo = self._journal_of("evicted", retrieval).limbo
        if self._has_gone(limbo):
            raise ValueError(
                "evicted: rows that this retrieval evicted are free, their keys forgotten; ask before the retrieval of "
                "a batch two or more after it"
            )
        if limbo is None:
            return self._empty(INT64, 0), self._empty(INT32, 0)
        count = int(limbo.rows[0])
        keys, tables = self._empty(INT64, limbo.rows.numel() - 1), self._empty(INT64, limbo.rows.numel() - 1)
        self._run("store_limbo_keys", limbo.words(), [keys.data_ptr(), tables.data_ptr()])
        keys, order = keys[:count].sort()
        tables, by_table = tables[:count][order].sort(stable=True)
        return keys[by_table], tables.to(INT32)

    def _journal_of(self, operation: str, retrieval: Retrieval) -> DeviceJournal:
        if not isinstance(retrieval.journal, DeviceJournal):
            raise ValueError(f"{operation}: this store forgets what it does: make it with undoable=True")
        return retrieval.journal

    def _has_gone(self, limbo: Limbo | None) -> bool:
        return limbo is not None and limbo not in self._limbo and int(limbo.rows[0]) > 0

    def _erase(self, keys: Tensor, tables: Tensor) -> Tensor:
        status, work = self._empty(UINT8, keys.numel()), self._empty(INT32, keys.numel())
        self._run("store_erase", call_words(keys, tables), [status.data_ptr(), work.data_ptr()])
        return status

    def _settle(self, settled: Callable[[Limbo], bool]) -> None:
        """Free the rows in limbo of which this is true."""
        for limbo in filter(settled, self._limbo):
            self._run("store_free_limbo", limbo.words())
        self._limbo = [limbo for limbo in self._limbo if not settled(limbo)]

    def _limbo_for(self, state: StoreState, batch: int, evicts: list[int]) -> Limbo | None:
        """Memory for the rows that tables may evict in a call; None where rows that leave are free at once."""
        if not self._undoable or not evicts:
            return None
        most = 0
        for t in evicts:
            kind, keep, _, _ = native_eviction(self.tables[t])
            rows, new = state.table(t, 0), state.table(t, 1)
            most += rows if kind == 3 else max(0, min(rows, rows + new - keep))
        return Limbo(batch, torch.zeros(1 + most, dtype=INT32, device=self.device))

    def _make_journal(self, handles: Tensor, keys: Tensor, tables: Tensor, limbo: Limbo | None) -> DeviceJournal | None:
        """Of a retrieval whose second half comes next."""
        if not self._undoable:
            return None
        counters = self._table_state().clone()
        metadata = self.read_metadata(handles)
        return DeviceJournal(
            self._sequence + 1, self._newest, self._removals, keys, tables, metadata, counters, self._last_batch, limbo
        )
