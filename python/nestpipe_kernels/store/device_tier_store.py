"""A store on an accelerator for pipelines and collections: keys and row numbers on the host, rows on the device."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..device import put_on
from ..types import DataType, Retrieval, SparseOptimizer, TableSpec, TouchedRows
from .checks import check_bounds, check_counts, check_keys, check_tensor, key_vector
from .device_memory import StoreState
from .device_store import COUNTERS, DeviceStore
from .device_tier import check_device_rules
from .device_transfer import DeviceTransfer
from .gradients import apply_gradients
from .row_transfer import RowMetadata

__all__ = ["DeviceTierStore"]

INT64, INT32, FLOAT32 = torch.int64, torch.int32, torch.float32


class DeviceTierStore(DeviceTransfer):
    """`DeviceStore` behind the calls of `EmbeddingStore`; satisfies `types.RowStore`.

    Tensors of keys, tables, handles, status and metadata are on the CPU. Rows may be on the CPU or on the device: there
    `gather` and `write_back` run on the current stream and return before it is done; every other call waits until it
    is. Calls that insert or remove keys exclude each other. Results are those of `EmbeddingStore`, bit for bit.

    Args:
        tables, dim, optimizer, device, data_type, stochastic_rounding, load, rows_per_slab, memory_limit: as
            `DeviceStore`; no table may have an admission rule.

    Raises:
        As DeviceStore. ValueError: rules that it has not; the message names the table.
    """

    tier = None
    """Rows are never on a disk: nothing to warm."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        *,
        dim: int,
        optimizer: SparseOptimizer,
        device: torch.device | str,
        data_type: DataType = DataType.FP32,
        stochastic_rounding: bool = False,
        load: float = 0.75,
        rows_per_slab: int | None = None,
        memory_limit: int | None = None,
    ) -> None:
        for spec in tables:
            where = f"table {spec.name!r}"
            check_device_rules(where, dim, spec.admission, spec.eviction, spec.init, spec.default)
        self.rows = DeviceStore(
            tables, dim=dim, optimizer=optimizer, device=device, data_type=data_type,
            stochastic_rounding=stochastic_rounding, load=load, undoable=True, rows_per_slab=rows_per_slab,
            memory_limit=memory_limit,
        )  # fmt: skip
        self.tables, self.device, self.dim, self.data_type = self.rows.tables, self.rows.device, dim, data_type
        self.stochastic_rounding, self.optimizer = stochastic_rounding, optimizer
        self.row_floats, self.embedding_words = self.rows.row_floats, self.rows.embedding_words
        self.table_hashes, self.table_seeds = self.rows.table_hashes, self.rows.table_seeds
        self._evicts = any(spec.eviction is not None for spec in self.tables)
        self.touched: TouchedRows | None = None
        self._lock = threading.RLock()
        self._state: StoreState | None = None
        """What the device counts, since it was last read; None: something has changed."""
        self._finish()

    # ------------------------------------------------------------------------------------------- protocol RowStore

    @property
    def removals(self) -> int:
        """How often keys were removed by `erase`, `erase_keys` or `clear`."""
        return self.rows.removals

    @property
    def last_batch(self) -> int:
        """The largest batch index of retrievals and of loaded or written metadata; -1: none."""
        return self.rows.last_batch

    def retrieve(self, keys: Tensor, tables: Tensor, counts: Tensor | None, batch: int) -> Retrieval:
        """Find or insert, as `EmbeddingStore.retrieve`.

        Args:
            keys: int64 [n]. tables: int32 [n]. counts: int64 [n], >= 0, or None: 1 each. batch: -1 to 2^62.

        Raises:
            StoreFullError: no memory on the device, or below the limit; nothing has changed. TypeError, ValueError: as
                `EmbeddingStore.retrieve`. IndexError: a table out of range.
        """
        check_keys("retrieve", keys, tables)
        if counts is not None:
            check_counts(counts, keys.numel())
        with self._changes():
            device_keys, device_tables = self._put_keys("retrieve", keys, tables)
            device_counts = None if counts is None else self._put(counts)
            found = self.rows.retrieve(device_keys, device_tables, device_counts, batch)
            return Retrieval(found.handles.cpu(), found.status.cpu(), found)

    def undo(self, retrieval: Retrieval) -> None:
        """Take back a retrieval of this store, newest first, as `EmbeddingStore.undo`.

        Raises:
            ValueError: as there.
        """
        with self._changes():
            self.rows.undo(retrieval.journal)
            self._finish()

    def evicted(self, retrieval: Retrieval) -> tuple[Tensor, Tensor]:
        """Keys int64 [m] and tables int32 [m] that a retrieval evicted or let expire, by table and key, ascending.

        Raises:
            ValueError: their rows are free, and they are forgotten.
        """
        if not self._evicts:
            return torch.empty(0, dtype=INT64), torch.empty(0, dtype=INT32)
        with self._lock:
            keys, tables = self.rows.evicted(retrieval.journal)
            return keys.cpu(), tables.cpu()

    def warm(self, keys: Tensor, tables: Tensor) -> None:
        """Nothing: all rows are in memory."""

    def find_handles(self, keys: Tensor, tables: Tensor) -> Tensor:
        """int64 [n] handles, -1 where absent. Changes nothing; repetitions are fine."""
        check_keys("find_handles", keys, tables)
        with self._lock:
            return self.rows.find_handles(self._put(keys), self._put(tables)).cpu()

    def gather(self, handles: Tensor, keys: Tensor, tables: Tensor, out: Tensor, index: Tensor | None) -> None:
        """Row index[j] (or j) of `out` float32 [m, row_floats], on the device or the CPU, = the row of handles[j]; the
        default row for -1. Handles that were never given out, and rows outside `out` on the device, are skipped and
        reported by a later call that waits."""
        check_keys("gather", keys, tables)
        check_tensor("gather", "handles", handles, INT64, (keys.numel(),))
        if index is not None:
            check_tensor("gather", "index", index, INT64, (keys.numel(),))
        there = self._put(handles), self._put(keys), self._put(tables)
        if out.device == self.device:
            self.rows.gather(*there, out, None if index is None else self._put(index))
            return
        check_tensor("gather", "out", out, FLOAT32, (None, self.row_floats))
        rows = torch.empty((keys.numel(), self.row_floats), dtype=FLOAT32, device=self.device)
        self.rows.gather(*there, rows, None)
        if index is None:
            out[: keys.numel()].copy_(rows)
        else:
            out[index] = rows.cpu()

    def write_back(self, handles: Tensor, rows: Tensor) -> None:
        """Embedding, state and `updates` of rows float32 [n, row_floats], on the device or the CPU; handles of -1 are
        skipped."""
        check_tensor("write_back", "handles", handles, INT64, (None,))
        if rows.device == self.device:
            self.rows.write_back(self._put(handles), rows)
            return
        check_tensor("write_back", "rows", rows, FLOAT32, (handles.numel(), self.row_floats))
        self.rows.write_back(self._put(handles), self._put(rows))
        self._finish()

    # ----------------------------------------------------------------------------------------- further calls by handle

    def read_embeddings(self, handles: Tensor, keys: Tensor, tables: Tensor) -> Tensor:
        """float32 [n, dim], a copy on the CPU; the default row's where the handle is -1."""
        check_keys("read_embeddings", keys, tables)
        return self.rows.read_embeddings(self._put(handles), self._put(keys), self._put(tables)).cpu()

    def write_embeddings(self, handles: Tensor, values: Tensor) -> None:
        """Embeddings alone, float32 [n, dim], rounded to the storage type; handles distinct, of -1 skipped."""
        self.rows.write_embeddings(self._put(handles), self._put(values))
        self._finish()

    def read_metadata(self, handles: Tensor) -> RowMetadata:
        """Metadata of handles int64 [n]; -1 and 0 where the handle is -1."""
        found = self.rows.read_metadata(self._put(handles))
        return RowMetadata(found.last_used.cpu(), found.frequency.cpu())

    def write_metadata(self, handles: Tensor, metadata: RowMetadata) -> None:
        """Replace the metadata of rows, handles distinct, those of -1 skipped."""
        moved = RowMetadata(self._put(metadata.last_used), self._put(metadata.frequency))
        self.rows.write_metadata(self._put(handles), moved)
        self._finish()

    def erase_keys(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Remove keys; uint8 [n] status FOUND (now gone) or ABSENT. Earlier retrievals can no longer be undone."""
        check_keys("erase_keys", keys, tables)
        with self._changes():
            return self.rows.erase_keys(self._put(keys), self._put(tables)).cpu()

    def clear(self, table: str | int | None = None) -> None:
        """Remove the keys of a table (None: of all) and its counters. Rows' memory is kept for later ones."""
        with self._changes():
            self.rows.clear(table)
            self._finish()

    # ------------------------------------------------------------------------------------------- a table by itself

    def find(self, keys: Tensor, table: str | int | None = None) -> tuple[Tensor, Tensor]:
        """As `EmbeddingStore.find`: float32 [n, dim] and uint8 [n] on the CPU."""
        keys, index = self._public_keys("find", keys, table)
        with self._lock:
            embeddings, status = self.rows.find(self._put(keys), index)
            return embeddings.cpu(), status.cpu()

    def find_or_insert(
        self, keys: Tensor, table: str | int | None = None, batch: int | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `EmbeddingStore.find_or_insert`: float32 [n, dim], `out` if given, and uint8 [n] on the CPU.

        Raises:
            StoreFullError: the device's memory, or the table's capacity, does not hold the new keys; nothing has
                changed. TypeError, ValueError, IndexError: as there.
        """
        keys, index = self._public_keys("find_or_insert", keys, table)
        if out is not None:
            check_tensor("find_or_insert", "out", out, FLOAT32, (keys.numel(), self.dim))
        with self._changes():
            embeddings, status = self.rows.find_or_insert(self._put(keys), index, batch)
            found = embeddings.cpu() if out is None else out.copy_(embeddings)
            return found, status.cpu()

    def apply_gradients(
        self, keys: Tensor, grads: Tensor, *, step: int, table: str | int | None = None, lr: float | None = None
    ) -> Tensor:
        """As `EmbeddingStore.apply_gradients`; the update itself runs on the CPU."""
        keys, index = self._public_keys("apply_gradients", keys, table)
        spec = self.tables[index]
        if not spec.trainable:
            raise ValueError(f"apply_gradients: table {spec.name!r} is frozen (trainable=False)")
        grads = grads.detach().contiguous()
        check_tensor("apply_gradients", "grads", grads, FLOAT32, (keys.numel(), self.dim))
        return apply_gradients(self, spec, keys, self._numbers(keys, index), grads, step, lr)

    def erase(self, keys: Tensor, table: str | int | None = None) -> Tensor:
        """Remove keys; uint8 [n] status FOUND (now gone) or ABSENT. Raises as `find`."""
        keys, index = self._public_keys("erase", keys, table)
        return self.erase_keys(keys, self._numbers(keys, index))

    def metadata(self, keys: Tensor, table: str | int | None = None) -> RowMetadata:
        """Metadata of keys int64 [n]. Raises as `find`."""
        keys, index = self._public_keys("metadata", keys, table)
        return self.read_metadata(self.find_handles(keys, self._numbers(keys, index)))

    def keys(self, table: str | int | None = None) -> Tensor:
        """int64 [size]: the keys that have rows, by ascending handle."""
        return self.export_table(table)[0]

    def size(self, table: str | int | None = None) -> int:
        """Rows of a table."""
        return self._read_state().table(self._table(table), 0)

    def __len__(self) -> int:
        return sum(self.size(t) for t in range(len(self.tables)))

    def counters(self, table: str | int | None = None) -> dict[str, int]:
        """As `EmbeddingStore.counters`; "not_admitted" is always 0."""
        index, state = self._table(table), self._read_state()
        return {name: state.table(index, word) for name, word in COUNTERS.items()} | {"not_admitted": 0}

    def load_counters(self, table: str | int | None, counters: Mapping[str, int]) -> None:
        """Replace a table's counters, as loading a checkpoint does. Raises ValueError for other names."""
        names = [*COUNTERS, "not_admitted"]
        if set(counters) != set(names):
            raise ValueError(f"load_counters: need {names}, got {sorted(counters)}")
        with self._changes():
            self.rows.load_counters(table, counters)
            self._finish()

    def memory(self) -> dict[str, int]:
        """Bytes allocated on the device: "index", "slabs" (rows with their metadata), "other"."""
        return self.rows.memory()

    # ------------------------------------------------------------------------------------------------------ helpers

    def _read_state(self) -> StoreState:
        with self._lock:
            state = self._state
            if state is None:
                state = self._state = self.rows.read_state()
            return state

    def _changes(self) -> Any:
        """For a `with`: nobody else inserts or removes; what was read of the state no longer holds."""
        self._state = None
        return self._lock

    def _put(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        return tensor if self.device.type == "cpu" or tensor.device == self.device else put_on(tensor, self.device)

    def _put_keys(self, operation: str, keys: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows.allocate(operation, lambda: (self._put(keys), self._put(tables)))

    def _finish(self) -> None:
        """Wait for what has been issued."""
        if self.device.type != "cpu":
            stream: Any = torch.get_device_module(self.device).current_stream(self.device)
            stream.synchronize()

    def _table(self, table: str | int | None) -> int:
        return self.rows._table(table)

    def _public_keys(self, operation: str, keys: Tensor, table: str | int | None) -> tuple[Tensor, int]:
        index = self._table(table)
        keys = key_vector(operation, keys)
        check_bounds(operation, keys, self.tables[index])
        return keys, index
