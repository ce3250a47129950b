"""A store whose index and rows lie in an accelerator's memory; every call is a bulk call on the current stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .._native import core
from ..device import backend_for
from ..errors import StoreFullError
from ..ops._kernels import kernels_of, place_of
from ..types import UNBOUNDED, DataType, Retrieval, SparseOptimizer, TableSpec
from .checks import check_batch, check_storage, key_vector
from .device_memory import MAX_ROWS, NEGATIVE_COUNTS, OUT_OF_RANGE, DeviceMemory, Room, StoreState
from .device_rows import call_words
from .device_undo import DeviceJournal, DeviceUndo
from .policies import SEED_MASK, has_policy
from .row_transfer import RowMetadata
from .settings import with_default_init, words

__all__ = ["DeviceStore"]

INT64, INT32, UINT8, FLOAT32 = torch.int64, torch.int32, torch.uint8, torch.float32
MAX_DIM = 2048
COUNTERS = {"inserted": 2, "evicted": 3, "expired": 4, "refused": 5}
Allocated = TypeVar("Allocated")


class DeviceStore(DeviceUndo):
    """Rows of tables with the same dim, storage type and optimizer, in the memory of one device.

    Results are those of `EmbeddingStore` for the same calls: the same keys have rows, with the same bits and metadata,
    the same ones are evicted, every key gets the same status. No key value is reserved, and repeated keys in a call are
    fine. Two things differ. Unless `undoable`, nothing can be undone, and evicted rows are free at once, also for new
    keys of the same call. And rules that ask Python or count keys without a row (Score, admission, init.Custom) are
    refused.

    Calls run on the current stream of the device and return before it is done; those that say "waits" read a number
    from the device. Callers order calls on different streams; rows may be read and written by handle beside calls that
    insert other rows. Memory is torch's: tensors that grow between calls. Where it gives out the error is
    StoreFullError, raised before anything has changed.

    Handles that were never given out are skipped where rows are read or written by handle, and table numbers out of
    range make keys absent; the next call that waits raises IndexError for them.

    Args:
        tables: the tables, names distinct, without admission.
        dim: floats per embedding, 1 to 2048.
        optimizer: decides how many floats of state a row has.
        device: where all tensors lie, for example "cuda:0".
        data_type: storage type of the embeddings; what goes in and out is float32 whatever it is.
        stochastic_rounding: noted for those who update rows.
        load: keys for each slot of the index at most, in (0, 0.9]. The index takes 17 bytes a slot.
        undoable: retrievals can be taken back, which takes a copy of the metadata of each call's rows; rows that batch
            u evicts are free from the retrieval of batch u + 2 on, or after an erasing call, as in `EmbeddingStore`.
        rows_per_slab: rows that are allocated together, a power of two from 32 on; None: 32 MB of them.
        memory_limit: bytes of index and rows at most; None: as many as there are.

    Raises:
        TypeError, ValueError: settings that no store can have, or not this one; the message names table and field.
        RuntimeError: the device is not here, torch or its driver cannot use it, or there are no kernels for it; says
            why and what to do.
    """

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
        undoable: bool = False,
        rows_per_slab: int | None = None,
        memory_limit: int | None = None,
    ) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= MAX_DIM:
            raise ValueError(f"device store: dim must be an integer in [1, {MAX_DIM}], got {dim!r}")
        if not 0.0 < load <= 0.9:
            raise ValueError(f"device store: load must be in (0, 0.9], got {load!r}")
        if rows_per_slab is not None and (rows_per_slab < 32 or rows_per_slab & (rows_per_slab - 1)):
            raise ValueError(
                f"device store: rows_per_slab must be a power of two from 32 on, or None, got {rows_per_slab!r}"
            )
        check_storage(data_type, stochastic_rounding)
        self.tables: Sequence[TableSpec] = tuple(with_default_init(spec, dim) for spec in tables)
        self._table_index = {spec.name: t for t, spec in enumerate(self.tables)}
        if not self.tables or len(self._table_index) != len(self.tables):
            raise ValueError(f"device store: table names must be distinct, got {[spec.name for spec in self.tables]}")
        self.device = torch.empty(0, device=backend_for(device).device).device
        self._kernels = kernels_of(torch.empty(0, device=self.device))
        if self._kernels is None:
            raise RuntimeError(
                f"device store: no native kernels for tensors on {self.device}: install a wheel built with CUDA, or "
                "use a store in host memory (EmbeddingStore)"
            )
        self.dim, self.data_type, self.stochastic_rounding = dim, data_type, stochastic_rounding
        self.optimizer = optimizer
        self.state_floats = optimizer.state_floats(dim)
        state_init = getattr(optimizer, "state_init", None)
        self._memory = DeviceMemory(
            self.tables, dim, data_type, self.state_floats, 0.0 if state_init is None else float(state_init()),
            self.device, load, rows_per_slab, memory_limit,
        )  # fmt: skip
        self.row_floats, self.embedding_words = self._memory.row_floats, self._memory.words
        self.table_hashes = words([core().hash_name(spec.name) for spec in self.tables])
        self.table_seeds = words([spec.seed & SEED_MASK for spec in self.tables])
        self._undoable, self._limbo = undoable, []
        self._removals = 0
        self._last_batch = -1

    # ------------------------------------------------------------------------------------------------- keys and rows

    def retrieve(
        self, keys: Tensor, tables: Tensor, counts: Tensor | None, batch: int, embeddings: Tensor | None = None
    ) -> Retrieval:
        """Find or insert, by the tables' rules, as `EmbeddingStore.retrieve`.

        New rows get the lowest free handles, in the order in which their keys first come.

        Args:
            keys: int64 [n], any values, n < 2^31. tables: int32 [n]. On the store's device, as all tensors.
            counts: int64 [n], >= 0, added to the frequencies; None: 1 each.
            batch: -1 to 2^62, becomes the rows' last_used. With -1 it stays, and nothing is evicted.
            embeddings: float32 [n, dim], filled if given: what `read_embeddings` of the handles would give.

        Returns:
            handles, -1 where the status is REFUSED; the journal is for `undo`, None unless the store is `undoable`. It
            refers to `keys` and `tables`, which must not change before.

        Waits once: after the search, before anything changes, the host reads how many keys are new.

        Raises:
            StoreFullError: no memory on the device. IndexError: a table out of range. ValueError: a negative count.
                Nothing has changed.
        """
        self._check_keys("retrieve", keys, tables)
        check_batch(batch)
        if counts is not None:
            self._check("counts", "retrieve", counts, INT64, (keys.numel(),))
        if embeddings is not None:
            self._check("embeddings", "retrieve", embeddings, FLOAT32, (keys.numel(), self.dim))
        return self._retrieve("retrieve", keys, tables, counts, batch, embeddings)

    def find_or_insert(
        self, keys: Tensor, table: str | int | None = None, batch: int | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Embeddings of keys, after inserting those that have no row; as `EmbeddingStore.find_or_insert`.

        Args:
            keys: int64 [n] (int32 is widened), repetitions allowed. table: may be left out where there is one.
            batch: becomes the rows' last_used unless -1; None: the batch after the largest one so far if the table has
                an eviction rule, else -1.
            out: float32 [n, dim], filled and returned if given (and may hold anything where the call fails).

        Returns:
            float32 [n, dim] copies, uint8 [n] status: INSERTED at the first occurrence of a new key, else FOUND; in a
            table with an eviction rule also REFUSED.

        Waits once, as `retrieve`.

        Raises:
            StoreFullError: the device's memory, or the capacity of a table without a rule, does not hold the new keys.
                IndexError: a key outside a fixed table. Nothing has changed.
        """
        keys, tables, index = self._public_keys("find_or_insert", keys, table)
        spec = self.tables[index]
        if batch is None:
            batch = self._last_batch + 1 if has_policy(spec) else -1
        check_batch(batch)
        if out is None:
            out = self.allocate("find_or_insert", lambda: self._empty(FLOAT32, keys.numel(), self.dim))
        self._check("out", "find_or_insert", out, FLOAT32, (keys.numel(), self.dim))
        retrieval = self._retrieve("find_or_insert", keys, tables, None, batch, out, index)
        return out, retrieval.status

    def find(self, keys: Tensor, table: str | int | None = None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embeddings float32 [n, dim] of keys int64 [n], and uint8 [n] status FOUND or ABSENT; inserts nothing.

        An absent key reads the default row, as in `EmbeddingStore.find`; one outside a fixed table is absent, too.
        `out` is filled and returned if given.
        """
        keys, tables, _ = self._public_keys("find", keys, table)
        status = self._empty(UINT8, keys.numel())
        if out is None:
            out = self._empty(FLOAT32, keys.numel(), self.dim)
        self._check("out", "find", out, FLOAT32, (keys.numel(), self.dim))
        self._run("store_find", call_words(keys, tables), [0, status.data_ptr(), out.data_ptr()])
        return out, status

    def find_handles(self, keys: Tensor, tables: Tensor) -> Tensor:
        """int64 [n] handles, -1 where absent. Changes nothing; repetitions are fine."""
        self._check_keys("find_handles", keys, tables)
        handles = self._empty(INT64, keys.numel())
        self._run("store_find", call_words(keys, tables), [handles.data_ptr(), 0, 0])
        return handles

    def erase(self, keys: Tensor, table: str | int | None = None) -> Tensor:
        """Remove keys int64 [n] of a table; status as `erase_keys`."""
        keys, tables, _ = self._public_keys("erase", keys, table)
        return self.erase_keys(keys, tables)

    def erase_keys(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Remove keys; uint8 [n] status FOUND (now gone; the first time it comes) or ABSENT. Their rows are free."""
        self._check_keys("erase_keys", keys, tables)
        self._removals += 1
        self._settle(lambda limbo: True)
        return self._erase(keys, tables)

    def reserve(self, num_keys: int) -> None:
        """Memory for so many keys at once, all tables together, so that nothing grows on the way to them. Waits.

        Raises:
            StoreFullError: no memory on the device; nothing has changed.
        """
        state = self.read_state()
        rows = sum(state.table(t, 0) for t in range(len(self.tables)))
        if not 0 <= num_keys <= MAX_ROWS:
            raise ValueError(f"reserve: num_keys must be in [0, {MAX_ROWS}], got {num_keys}")
        num_rows = max(num_keys, state.num_rows)
        room = self.allocate("reserve", lambda: self._memory.room(max(num_keys, rows), num_rows), num_keys - rows)
        self._take(room)

    def clear(self, table: str | int | None = None) -> None:
        """Remove the keys of a table (waits) or of all, and their counters. Rows' memory is kept for later ones."""
        self._removals += 1
        if table is None:
            self._memory.clear()
            self._limbo.clear()
            self._last_batch = -1
            return
        self._settle(lambda limbo: True)
        index, state = self._table(table), self.read_state()
        self._run("store_clear_table", [index, state.num_rows])
        self._table_state()[index, 2:] = 0

    def load_rows(self, keys: Tensor, tables: Tensor, rows: Tensor, metadata: RowMetadata) -> None:
        """Insert keys with rows float32 [n, row_floats] and metadata as they are, no rules asked. Waits.

        Keys int64 [n], distinct for each table; those that are there get the new row and metadata.

        Raises:
            StoreFullError: the device's memory or a table's capacity does not hold them. ValueError: a new key comes
                twice. Nothing has changed.
        """
        self._check_keys("load_rows", keys, tables)
        self._check_rows("rows", "load_rows", rows, keys.numel())
        self._check_metadata("load_rows", metadata, keys.numel())
        counters = self._table_state().clone()
        retrieval = self._retrieve("load_rows", keys, tables, None, -1, None, loads=True)
        self._table_state()[:, 2:] = counters[:, 2:]
        self.write_back(retrieval.handles, rows)
        self.write_metadata(retrieval.handles, metadata)

    def load_counters(self, table: str | int | None, counters: Mapping[str, int]) -> None:
        """Replace a table's counters by those of COUNTERS, as loading a checkpoint does."""
        row = self._table_state()[self._table(table)]
        for name, word in COUNTERS.items():
            row[word] = counters[name]

    def read_state(self) -> StoreState:
        """What the store counts on its device. Waits.

        Raises:
            IndexError: calls before this one had handles that were never given out, or tables out of range.
        """
        state = self._memory.read_state()
        self._raise_faults("device store", state)
        return state

    def size(self, table: str | int | None = None) -> int:
        """Rows of a table. Waits."""
        return self.read_state().table(self._table(table), 0)

    def counters(self, table: str | int | None = None) -> dict[str, int]:
        """What became of a table's keys since it was made, or cleared: "inserted", "evicted" (to make room), "expired"
        (TTL), "refused" (no room); each key once per call. Waits."""
        index, state = self._table(table), self.read_state()
        return {name: state.table(index, word) for name, word in COUNTERS.items()}

    def metadata(self, keys: Tensor, table: str | int | None = None) -> RowMetadata:
        """Metadata of keys int64 [n]; -1 and 0 where absent."""
        keys, tables, _ = self._public_keys("metadata", keys, table)
        return self.read_metadata(self.find_handles(keys, tables))

    def memory(self) -> dict[str, int]:
        """Bytes allocated on the device: "index", "slabs" (rows with their metadata), "other"."""
        return self._memory.bytes()

    @property
    def removals(self) -> int:
        """How often keys were removed by `erase`, `erase_keys` or `clear`."""
        return self._removals

    @property
    def last_batch(self) -> int:
        """The largest batch index of retrievals and of loaded or written metadata; -1: none."""
        return self._last_batch

    def __len__(self) -> int:
        state = self.read_state()
        return sum(state.table(t, 0) for t in range(len(self.tables)))

    # --------------------------------------------------------------------------------------------------------- steps

    def _retrieve(
        self,
        operation: str,
        keys: Tensor,
        tables: Tensor,
        counts: Tensor | None,
        batch: int,
        embeddings: Tensor | None,
        only_table: int | None = None,
        loads: bool = False,
    ) -> Retrieval:
        """Both halves, with the host's part between them; a table without a rule that is full is an error if
        `only_table` or `loads`."""
        memory, size, call = self._memory, keys.numel(), call_words(keys, tables)

        def search_memory() -> tuple[Tensor, Tensor, Tensor, dict[int, Tensor]]:
            search = self._empty(UINT8, self._bytes("store_missing_work_bytes", [size]))
            return self._empty(INT64, size), self._empty(UINT8, size), search, self._faults(keys, counts, only_table)

        handles, status, search, faults = self.allocate(operation, search_memory)
        if batch >= 0:
            self._settle(lambda limbo: limbo.batch <= batch - 2)
        for word, number in faults.items():
            memory.state[word] = number
        self._run("store_search_missing", call, [handles.data_ptr(), search.data_ptr()])
        state = memory.read_state()  # The one wait of the call.
        self._raise_faults(operation, state)
        if loads and state.num_new != state.num_missing:
            raise ValueError(
                f"{operation}: {state.num_missing - state.num_new} of the new keys are repetitions; nothing was "
                "inserted: give each key once"
            )
        plan, sizes = self._plan(operation, state, batch, size, only_table is not None or loads)
        num_rows = self._rows_needed(state, sizes, plan[1])
        num_keys = sum(max(rows, state.table(t, 0)) for t, rows in enumerate(sizes))
        if num_rows > MAX_ROWS:
            raise StoreFullError(f"{operation}: a device store has up to {MAX_ROWS} rows: shard over more devices")

        def insert_memory() -> tuple[Room, Tensor, DeviceJournal | None]:
            limbo = self._limbo_for(state, batch, plan[1])
            plan[0].extend((0, 0) if limbo is None else limbo.words())
            work = self._empty(UINT8, self._bytes("store_insert_work_bytes", memory.view(), *plan))
            journal = None if loads else self._make_journal(handles, keys, tables, limbo)
            return memory.room(num_keys, num_rows), work, journal

        room, work, journal = self.allocate(operation, insert_memory, state.num_new)
        self._take(room)
        use = [0 if counts is None else counts.data_ptr(), batch]
        answer = [handles.data_ptr(), status.data_ptr(), 0 if embeddings is None else embeddings.data_ptr()]
        self._run("store_insert_missing", call, use, *plan, answer, [search.data_ptr(), work.data_ptr()])
        self._last_batch = max(self._last_batch, batch)
        self._sequence += 1
        self._newest = self._sequence
        if journal is not None and journal.limbo is not None:
            self._limbo.append(journal.limbo)
        return Retrieval(handles, status, journal)

    def _rows_needed(self, state: StoreState, sizes: list[int], evicts: list[int]) -> int:
        """Row numbers that a call may take: free ones come first, and those of rows that leave are not free yet if the
        call can be undone."""
        if not self._undoable:
            return max(state.num_rows, sum(sizes))
        new = (state.table(t, 1) if t in evicts else rows - state.table(t, 0) for t, rows in enumerate(sizes))
        return state.num_rows + max(0, sum(new) - state.num_free)

    def _take(self, room: Room) -> None:
        if room.tags is not None and room.entries is not None:
            self._run("store_rehash", self._memory.index(room.tags, room.entries))
        self._memory.take(room)

    def _plan(
        self, operation: str, state: StoreState, batch: int, size: int, full_is_an_error: bool
    ) -> tuple[tuple[list[int], list[int], list[int]], list[int]]:
        """(what the second half takes: numbers, tables that evict, tables that may refuse), most rows of each table."""
        evicts, refuses, sizes = [], [], []
        for t, spec in enumerate(self.tables):
            rows, new = state.table(t, 0), state.table(t, 1)
            over = spec.capacity is not None and rows + new > spec.capacity
            expires = getattr(spec.eviction, "interval", None)
            rule = spec.eviction if batch >= 0 else None
            if rule is not None and (over or (expires is not None and batch % expires == 0)):
                evicts.append(t)
            if over and full_is_an_error and (spec.eviction is None or operation == "load_rows"):
                raise StoreFullError(
                    f"{operation}: table {spec.name!r} is full: {new} new ones of {size} keys find no room beside its "
                    f"{rows} rows (capacity {spec.capacity}); nothing was inserted: raise capacity, erase keys, or "
                    "give the table an eviction rule"
                )
            if over:
                refuses.append(t)
            sizes.append(max(rows, spec.capacity) if over and spec.capacity is not None else rows + new)
        reuses = int(state.num_free > 0 or bool(evicts))
        return ([state.num_missing, state.num_new, state.num_rows, reuses], evicts, refuses), sizes

    def _faults(self, keys: Tensor, counts: Tensor | None, only_table: int | None) -> dict[int, Tensor]:
        """Numbers of wrong arguments, still on the device, by the word of the state that the host will read."""
        faults = {} if counts is None else {NEGATIVE_COUNTS: (counts < 0).sum()}
        limit = UNBOUNDED if only_table is None else self.tables[only_table].num_embeddings
        if limit != UNBOUNDED:
            faults[OUT_OF_RANGE] = ((keys < 0) | (keys >= limit)).sum()
        return faults

    def _raise_faults(self, operation: str, state: StoreState) -> None:
        bad_handles, bad_tables, lost, outside, negative = state.words[6:11]
        if not any((bad_handles, bad_tables, lost, outside, negative)):
            return
        self._memory.state[6:11] = 0
        if outside:
            raise IndexError(
                f"{operation}: {outside} keys are outside their fixed table; nothing was inserted: map ids into the "
                "range, or make the table open with num_embeddings=UNBOUNDED"
            )
        if negative:
            raise ValueError(f"{operation}: counts must be >= 0, got {negative} that are not; nothing was changed")
        if bad_tables:
            raise IndexError(
                f"{operation}: table indices must be in [0, {len(self.tables)}), got {bad_tables} that are not since "
                "the device was last asked"
            )
        if bad_handles:
            raise IndexError(
                f"{operation}: {bad_handles} row handles or places since the device was last asked do not exist "
                f"(handles are in [-1, {state.num_rows})); they were skipped"
            )
        raise RuntimeError(f"{operation}: {lost} keys found no slot in the index: a bug of the store, please report it")

    def allocate(self, operation: str, make: Callable[[], Allocated], num_new: int | None = None) -> Allocated:
        """What `make` allocates; StoreFullError where the device has no memory for it."""
        try:
            return make()
        except torch.OutOfMemoryError as error:
            keys = "the keys of the call" if num_new is None else f"{num_new} new keys"
            raise StoreFullError(
                f"{operation}: no memory on {self.device} for {keys} beside {self._memory.describe()}; nothing was "
                "inserted: erase keys, give tables a capacity and an eviction rule, or shard over more devices"
            ) from error

    def _run(self, name: str, *lists: list[int]) -> None:
        getattr(self._kernels, name)([self._memory.view(), *lists], self._place())

    def _bytes(self, name: str, *lists: list[int]) -> int:
        return int(getattr(self._kernels, name)(list(lists)))

    def _table_state(self) -> Tensor:
        """int64 [T, 8], a view."""
        return self._memory.state[16:].view(len(self.tables), 8)

    def _place(self) -> tuple[int, int]:
        return place_of(self._memory.state)

    def _table(self, table: str | int | None) -> int:
        if table is None and len(self.tables) == 1:
            return 0
        if isinstance(table, str) and table in self._table_index:
            return self._table_index[table]
        if isinstance(table, int) and 0 <= table < len(self.tables):
            return table
        raise ValueError(f"device store: no table {table!r}: name one of {', '.join(self._table_index)}")

    def _public_keys(self, operation: str, keys: Tensor, table: str | int | None) -> tuple[Tensor, Tensor, int]:
        index = self._table(table)
        keys = key_vector(operation, keys, self.device)
        tables = torch.full((keys.numel(),), index, dtype=INT32, device=self.device)
        self._check_keys(operation, keys, tables)
        return keys, tables, index
