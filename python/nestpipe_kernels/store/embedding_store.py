"""The store of a group of tables: the protocol that stages use (keys, handles, rows), and calls of a single table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._native import core
from ..errors import StoreFullError
from ..init import Initializer
from ..ops._arrays import as_tensor
from ..ops.row_storage import embedding_words, pack_embeddings, unpack_embeddings
from ..types import UNBOUNDED, DataType, KeyStatus, Retrieval, SparseOptimizer, TableSpec, TouchedRows
from .checks import check_batch, check_bounds, check_counts, check_keys, check_storage, check_tensor, key_vector
from .counts import counts_of, load_counts
from .file_tier import FileTier, warn_if_in_memory
from .given_values import GivenValues
from .gradients import apply_gradients
from .journal import Journal
from .policies import has_policy, rows_in_bytes, score_caller
from .pooled_rows import PooledRows
from .row_transfer import RowMetadata, RowTransfer
from .settings import SEED_MASK, int32_tensor, int64_tensor, native_table, with_default_init, words

__all__ = ["EmbeddingStore", "RowMetadata"]

INT64 = torch.int64
INT32 = torch.int32
FLOAT32 = torch.float32
COUNTERS = ("inserted", "evicted", "expired", "refused", "not_admitted")
MAX_DIM = 1 << 28
"""A row's bytes, state included, stay far from overflow."""
MAX_KEPT_TABLES = 1 << 20
"""Of a call of a single table: 4 bytes a key that the next call need not write."""
KEY_BYTES = 12
"""Of the index: a key and its row number."""


class EmbeddingStore(RowTransfer, PooledRows):
    """Rows of tables with the same dim, storage type and optimizer, in native memory; satisfies `types.RowStore`.

    Rows never move and results do not depend on the number of threads. Calls that insert, erase or change metadata
    exclude each other; rows may be read and written by handle beside them. Calls are synchronous and release the GIL.

    Evicted rows keep their memory for a while ("limbo"), so that `undo` can put them back: those of batch u are free
    for other keys from the retrieval of batch u + 2 on, or after an erasing call. So a table at capacity also needs
    room for the rows that two batches evict; `memory()` includes it.

    Args:
        tables: the tables, names distinct; or None, and one table is described by the remaining arguments.
        dim: floats per embedding, 1 to 2^28.
        optimizer: settings of the row update; they decide how many floats of state a row has.
        name, num_embeddings, init, seed, capacity: of the only table. `init` None: uniform, +-1/sqrt(dim) for an open
            table, +-sqrt(1/num_embeddings) for a fixed one. `capacity`: rows of the table in this store at most.
        admission, eviction, default: of the only table, as in `types.TableSpec`.
        capacity_bytes: instead of capacity; as many rows as fit with their share of records, index and limbo.
        memory_limit: bytes the store may allocate, None for as many as there are.
        data_type: storage type of the embeddings; what goes in and out is float32 whatever it is.
        stochastic_rounding: updates round to `data_type` stochastically instead of to nearest; not with FP32.
        tier: rows lie in a file there, with a part of them in memory; None: all in memory. Then whatever inserts rows
            also raises OSError where the file cannot grow (the disk is full): nothing has changed.

    Raises:
        TypeError, ValueError: settings that no store can have; the message names table and field.
        OSError: the tier's directory is not there, or no file can be made in it.
    """

    device = torch.device("cpu")
    """Where rows lie."""

    def __init__(
        self,
        tables: Sequence[TableSpec] | None = None,
        *,
        dim: int,
        optimizer: SparseOptimizer,
        name: str | None = None,
        num_embeddings: int = UNBOUNDED,
        init: Initializer | None = None,
        seed: int = 0,
        capacity: int | None = None,
        admission: Any = None,
        eviction: Any = None,
        default: Initializer | None = None,
        capacity_bytes: int | None = None,
        memory_limit: int | None = None,
        data_type: DataType = DataType.FP32,
        stochastic_rounding: bool = False,
        tier: FileTier | None = None,
    ) -> None:
        if (tables is None) == (name is None):
            raise ValueError("store: give either tables, or name (num_embeddings, init, seed, capacity) of one table")
        if capacity is not None and capacity_bytes is not None:
            raise ValueError(
                f"store: capacity {capacity} and capacity_bytes {capacity_bytes} of table {name!r} contradict each "
                "other: give one of them"
            )
        if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= MAX_DIM:
            raise ValueError(f"store: dim must be an integer in [1, {MAX_DIM}], got {dim!r}")
        check_storage(data_type, stochastic_rounding)
        if not isinstance(tier, FileTier | None):
            raise TypeError(f"store: tier must be a FileTier or None, got {tier!r}")
        if tables is None:
            assert name is not None
            if capacity_bytes is not None:
                row_bytes = 4 * core().row_floats(embedding_words(dim, data_type), optimizer.state_floats(dim))
                capacity = rows_in_bytes(capacity_bytes, row_bytes, getattr(eviction, "slack", 0.0))
            tables = [
                TableSpec(
                    name, num_embeddings, init, seed, capacity, admission=admission, eviction=eviction, default=default
                )
            ]
        self.tables: Sequence[TableSpec] = tuple(with_default_init(spec, dim) for spec in tables)
        self._table_index = {spec.name: t for t, spec in enumerate(self.tables)}
        if not self.tables or len(self._table_index) != len(self.tables):
            raise ValueError(f"store: table names must be distinct, got {[spec.name for spec in self.tables]}")
        self.dim = dim
        self.data_type = data_type
        self.stochastic_rounding = stochastic_rounding
        self.optimizer = optimizer
        self.state_floats = optimizer.state_floats(dim)
        state_init = getattr(optimizer, "state_init", None)
        self._native = core().EmbeddingStore(
            dim=dim,
            data_type=data_type.code,
            state_floats=self.state_floats,
            state_init=float(state_init()) if state_init is not None else 0.0,
            limit_bytes=SEED_MASK if memory_limit is None else memory_limit,
            tables=[native_table(spec) for spec in self.tables],
            file=None if tier is None else (tier.directory, tier.memory_bytes),
        )
        self.tier = tier
        if tier is not None:
            warn_if_in_memory(tier)
        self.row_floats: int = self._native.row_floats
        self.embedding_words: int = self._native.embedding_words
        self._given = GivenValues(self.tables, dim)
        self._removals = 0
        self._same_table = torch.zeros(1, dtype=INT32)
        """What the last calls of a single table had as tables, for the next one; never written again."""
        self.touched: TouchedRows | None = None
        self._score = score_caller(self.tables)
        self.table_hashes = words([core().hash_name(spec.name) for spec in self.tables])
        self.table_seeds = words([spec.seed & SEED_MASK for spec in self.tables])

    # ------------------------------------------------------------------------------------------- protocol RowStore

    @property
    def removals(self) -> int:
        """How often keys were removed by `erase`, `erase_keys` or `clear`."""
        return self._removals

    def retrieve(self, keys: Tensor, tables: Tensor, counts: Tensor | None, batch: int) -> Retrieval:
        """Find or insert, by the tables' rules of admission and eviction (nestpipe_kernels.policy).

        First rows in limbo of batches up to `batch` - 2 become free. Then the admission rule decides which keys without
        a row may have one, occurrences of this call included; a table that would exceed its capacity, or whose rows
        expire, gives up rows by its eviction rule; new keys beyond the room there is are refused, the last ones in the
        order given. All of it depends on keys, counts and metadata alone.

        Args:
            keys: int64 [n]. tables: int32 [n]. Repetitions are inserted once, and found afterwards.
            counts: int64 [n], >= 0, occurrences: added to the rows' frequency, and to the count of keys without a row;
                None: 1 each. A new row's frequency starts with the key's count so far. Frequencies stop at 2^63 - 1.
            batch: -1 to 2^62, becomes the rows' last_used. With -1 last_used stays as it is and nothing is evicted.

        Returns:
            handles, -1 where the key has no row: status REFUSED or NOT_ADMITTED.

        Raises:
            MemoryError: the system or `memory_limit` gave out; no key, row, count or metadata has changed.
            TypeError, ValueError: counts or batch out of range, or the result of a score function or of an init.Custom
                function; nothing has changed. What these functions raise is passed on.
        """
        return self._retrieve(keys, tables, counts, batch)

    def _retrieve(
        self,
        keys: Tensor,
        tables: Tensor,
        counts: Tensor | None,
        batch: int,
        embeddings: Tensor | None = None,
        undone: bool = True,
    ) -> Retrieval:
        """As `retrieve`; embeddings float32 [n, dim], if not None, become those of the keys. Not `undone`: it never
        will be, and unless a user's function gives values there are no handles.
        """
        check_keys("retrieve", keys, tables)
        check_batch(batch)
        size = keys.numel()
        if counts is not None:
            check_counts(counts, size)
        given = self._given_starts(keys, tables)
        handles = torch.empty(size if undone or self._given.any else 0, dtype=INT64)
        status = torch.empty(size, dtype=torch.uint8)
        journal = Journal(core().RetrievalJournal(), self._removals) if undone else None
        self._native.retrieve(
            keys.data_ptr(),
            tables.data_ptr(),
            size,
            0 if counts is None else counts.data_ptr(),
            batch,
            self._score,
            (handles.data_ptr() if len(handles) else 0, status.data_ptr()),
            0 if embeddings is None else embeddings.data_ptr(),
            None if journal is None else journal.native,
        )
        if given is not None:
            inserted = status[given[0]] == KeyStatus.INSERTED.value
            self.write_embeddings(handles[given[0][inserted]], given[1][inserted])
        return Retrieval(handles, status, journal)

    def undo(self, retrieval: Retrieval) -> None:
        """Take back a retrieval of this store, newest first: inserted keys go, evicted ones return with their rows and
        handles; metadata, admission counts and counters are as before.

        Raises:
            ValueError: it has been undone before, a newer one has not, rows that it evicted are free (a batch two or
                more after it has been retrieved), or keys were erased since.
        """
        journal: Journal = retrieval.journal
        if journal.removals != self._removals:
            raise ValueError("undo: keys were erased since this retrieval, so its rows may belong to other keys now")
        size = retrieval.handles.numel()
        check_tensor("undo", "handles", retrieval.handles, INT64, (size,))
        check_tensor("undo", "status", retrieval.status, torch.uint8, (size,))
        self._native.undo(size, (retrieval.handles.data_ptr(), retrieval.status.data_ptr()), journal.native)

    def evicted(self, retrieval: Retrieval) -> tuple[Tensor, Tensor]:
        """Keys int64 [m] and tables int32 [m] that a retrieval evicted or let expire, by table and key, ascending.

        Raises:
            ValueError: their rows are free, and they are forgotten.
        """
        keys, tables = self._native.evicted(retrieval.journal.native)
        gone = sorted(zip(int32_tensor(tables).tolist(), int64_tensor(keys).tolist()))
        return torch.tensor([key for _, key in gone], dtype=INT64), torch.tensor([t for t, _ in gone], dtype=INT32)

    def find_handles(self, keys: Tensor, tables: Tensor) -> Tensor:
        """int64 [n] handles, -1 where absent. Changes nothing; repetitions are fine."""
        check_keys("find_handles", keys, tables)
        handles = torch.empty(keys.numel(), dtype=INT64)
        self._native.find(keys.data_ptr(), tables.data_ptr(), keys.numel(), handles.data_ptr())
        return handles

    def warm(self, keys: Tensor, tables: Tensor) -> None:
        """Ask the disk for the rows that keys int64 [n] (tables int32 [n]) have, without waiting or copying.

        Rows in memory become the last ones to leave it. Without a tier it does nothing. Changes no key, row or
        metadata; may run beside any other call.
        """
        if self.tier is None:
            return
        check_keys("warm", keys, tables)
        self._native.warm(keys.data_ptr(), tables.data_ptr(), keys.numel())

    def gather(self, handles: Tensor, keys: Tensor, tables: Tensor, out: Tensor, index: Tensor | None) -> None:
        """Row index[j] (or j) of `out` float32 [m, row_floats] = the row of handles[j].

        A handle of -1 gives the table's default row: embedding by `default`, or as the key's row would start; state as
        in a new row.

        Raises:
            IndexError: a handle that was never given out, or an index outside `out`.
        """
        check_keys("gather", keys, tables)
        check_tensor("gather", "handles", handles, INT64, (keys.numel(),))
        check_tensor("gather", "out", out, FLOAT32, (None, self.row_floats))
        if index is not None:
            check_tensor("gather", "index", index, INT64, (keys.numel(),))
        given = self._given.absent(keys, tables, handles)
        self._native.gather(
            handles.data_ptr(),
            keys.data_ptr(),
            tables.data_ptr(),
            keys.numel(),
            0 if index is None else index.data_ptr(),
            (out.data_ptr(), out.shape[0]),
        )
        if given is not None:
            target = given[0] if index is None else index[given[0]]
            words = torch.zeros(target.numel(), self.embedding_words, dtype=torch.float32)
            pack_embeddings(given[1], words, self.data_type)
            out.view(INT32)[target, : self.embedding_words] = words.view(INT32)

    def write_back(self, handles: Tensor, rows: Tensor) -> None:
        """Embedding, state and `updates` of rows float32 [n, row_floats]; handles of -1 are skipped."""
        check_tensor("write_back", "handles", handles, INT64, (None,))
        check_tensor("write_back", "rows", rows, FLOAT32, (handles.numel(), self.row_floats))
        self._native.write_back(handles.data_ptr(), handles.numel(), rows.data_ptr())

    # -------------------------------------------------------------------------------------- rows by handle, further

    def read_embeddings(self, handles: Tensor, keys: Tensor, tables: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 [n, dim], a copy; the default row's (see `gather`), rounded as stored, where the handle is -1.

        With `out`, float32 [n, dim], contiguous, this is what is filled and returned.
        """
        check_keys("read_embeddings", keys, tables)
        check_tensor("read_embeddings", "handles", handles, INT64, (keys.numel(),))
        given = self._given.absent(keys, tables, handles)
        if out is None:
            out = torch.empty((keys.numel(), self.dim), dtype=FLOAT32)
        check_tensor("read_embeddings", "out", out, FLOAT32, (keys.numel(), self.dim))
        self._native.read_embeddings(
            handles.data_ptr(), keys.data_ptr(), tables.data_ptr(), keys.numel(), out.data_ptr()
        )
        if given is not None:
            words = torch.zeros(given[0].numel(), self.embedding_words, dtype=torch.float32)
            pack_embeddings(given[1], words, self.data_type)
            out[given[0]] = unpack_embeddings(words, self.dim, self.data_type)
        return out

    def write_embeddings(self, handles: Tensor, values: Tensor) -> None:
        """Embeddings alone, float32 [n, dim], rounded to the storage type; handles of -1 are skipped."""
        check_tensor("write_embeddings", "handles", handles, INT64, (None,))
        check_tensor("write_embeddings", "values", values, FLOAT32, (handles.numel(), self.dim))
        self._native.write_embeddings(handles.data_ptr(), handles.numel(), values.data_ptr())

    def read_metadata(self, handles: Tensor) -> RowMetadata:
        """Metadata of handles int64 [n]; -1 and 0 where the handle is -1."""
        check_tensor("read_metadata", "handles", handles, INT64, (None,))
        metadata = RowMetadata(torch.empty_like(handles), torch.empty_like(handles))
        self._native.read_metadata(
            handles.data_ptr(), handles.numel(), metadata.last_used.data_ptr(), metadata.frequency.data_ptr()
        )
        return metadata

    def write_metadata(self, handles: Tensor, metadata: RowMetadata) -> None:
        """Replace the metadata of rows, as loading a checkpoint does; handles of -1 are skipped."""
        check_tensor("write_metadata", "handles", handles, INT64, (None,))
        check_tensor("write_metadata", "last_used", metadata.last_used, INT64, (handles.numel(),))
        check_tensor("write_metadata", "frequency", metadata.frequency, INT64, (handles.numel(),))
        self._native.write_metadata(
            handles.data_ptr(), handles.numel(), metadata.last_used.data_ptr(), metadata.frequency.data_ptr()
        )

    def erase_keys(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Remove keys; uint8 [n] status FOUND (now gone) or ABSENT. Handles of erased rows become invalid.

        Rows in limbo become free: earlier retrievals can no longer be undone.
        """
        check_keys("erase_keys", keys, tables)
        self._removals += 1
        status = torch.empty(keys.numel(), dtype=torch.uint8)
        self._native.erase(keys.data_ptr(), tables.data_ptr(), keys.numel(), status.data_ptr())
        return status

    def clear(self, table: str | int | None = None) -> None:
        """Remove the keys of a table (None: of all), its counts and counters. Rows' memory is kept for later ones."""
        self._removals += 1
        if table is None:
            self._native.clear()
        else:
            self._native.clear_table(self._table(table))

    # ------------------------------------------------------------------------------------------- a table by itself

    def find(self, keys: Tensor, table: str | int | None = None) -> tuple[Tensor, Tensor]:
        """Embeddings of keys, without inserting any.

        Args:
            keys: int64 [n] (int32 is widened), repetitions allowed.
            table: its name or index; may be left out where the store has one table.

        Returns:
            float32 [n, dim] copies (an absent key reads the default row: `gather`), uint8 [n] status FOUND or ABSENT.

        Raises:
            TypeError, ValueError: dtype or shape of keys, or the table's name.
            IndexError: a key outside a fixed table; names table, position and value.
        """
        keys, tables = self._public_keys("find", keys, table)
        handles = self.find_handles(keys, tables)
        status = torch.where(handles >= 0, KeyStatus.FOUND.value, KeyStatus.ABSENT.value).to(torch.uint8)
        return self.read_embeddings(handles, keys, tables), status

    def find_or_insert(
        self,
        keys: Tensor,
        table: str | int | None = None,
        batch: int | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Embeddings of keys, after inserting those that have no row, by the table's rules (see `retrieve`).

        Each occurrence counts in the row's frequency; `batch`, unless -1, becomes its last_used. None: the batch after
        the largest one seen so far if the table has an admission or eviction rule, else -1. `out`, a contiguous float32
        [n, dim], is filled and returned if given (and may hold anything where the call fails).

        Returns:
            float32 [n, dim] copies, uint8 [n] status: INSERTED at the first occurrence of a new key, else FOUND. In a
            table with a rule also NOT_ADMITTED and REFUSED: the key has no row and reads the default row.

        Raises:
            StoreFullError: the memory, or the capacity of a table without rules, does not hold the new keys; nothing
                has changed.
            TypeError, ValueError, IndexError: as `find`; a score function's as `retrieve`.
        """
        keys, tables = self._public_keys("find_or_insert", keys, table)
        spec = self.tables[self._table(table)]
        if out is None:
            out = torch.empty((keys.numel(), self.dim), dtype=FLOAT32)
        check_tensor("find_or_insert", "out", out, FLOAT32, (keys.numel(), self.dim))
        if batch is None:
            batch = self.last_batch + 1 if has_policy(spec) else -1
        may_be_full = spec.capacity is not None and not has_policy(spec)
        try:
            retrieval = self._retrieve(keys, tables, None, batch, None if self._given.any else out, may_be_full)
        except MemoryError as error:
            raise StoreFullError(
                f"find_or_insert: no memory for the new ones of {keys.numel()} keys of table {spec.name!r}, which has "
                f"{self.size(spec.name)} rows: erase keys, or shard over more processes"
            ) from error
        refused = int((retrieval.status == KeyStatus.REFUSED.value).sum()) if may_be_full else 0
        if refused:
            self.undo(retrieval)
            raise StoreFullError(
                f"find_or_insert: table {spec.name!r} is full: {refused} of {keys.numel()} keys found no room beside "
                f"its {self.size(spec.name)} rows (capacity {spec.capacity}); nothing was inserted: raise capacity, "
                "erase keys, give the table an eviction rule, or use retrieve, which reports a status per key"
            )
        if self._given.any:
            self.read_embeddings(retrieval.handles, keys, tables, out)
        return out, retrieval.status

    def apply_gradients(
        self, keys: Tensor, grads: Tensor, *, step: int, table: str | int | None = None, lr: float | None = None
    ) -> Tensor:
        """Update the rows of keys once, with the optimizer; gradients of repeated keys are summed first.

        The order of the sum is docs/architecture.md, rule 3; the arithmetic is that of ops.row_update.

        Args:
            keys: int64 [n]. grads: float32 [n, dim], one for each occurrence.
            step: 1 for the first update of the training; it decides Adam's bias correction.
            lr: learning rate of this call, finite and >= 0; None for the optimizer's own. The table's `lr_scale`
                multiplies either.

        Returns:
            uint8 [n] status: FOUND (updated) or ABSENT (the key has no row, and none is made).

        Raises:
            NonFiniteGradientError: a key's sum is NaN or infinite; nothing has changed.
            ValueError: the table is frozen, `step` < 1, or a bad `lr`. TypeError, ValueError, IndexError: as `find`.
        """
        keys, tables = self._public_keys("apply_gradients", keys, table)
        spec = self.tables[self._table(table)]
        if not spec.trainable:
            raise ValueError(f"apply_gradients: table {spec.name!r} is frozen (trainable=False)")
        grads = as_tensor(grads).detach().contiguous()
        check_tensor("apply_gradients", "grads", grads, FLOAT32, (keys.numel(), self.dim))
        return apply_gradients(self, spec, keys, tables, grads, step, lr)

    def erase(self, keys: Tensor, table: str | int | None = None) -> Tensor:
        """Remove keys; uint8 [n] status FOUND (now gone) or ABSENT. Raises as `find`."""
        return self.erase_keys(*self._public_keys("erase", keys, table))

    def metadata(self, keys: Tensor, table: str | int | None = None) -> RowMetadata:
        """Metadata of keys int64 [n]. Raises as `find`."""
        return self.read_metadata(self.find_handles(*self._public_keys("metadata", keys, table)))

    def keys(self, table: str | int | None = None) -> Tensor:
        """int64 [size]: the keys that have rows, by ascending handle."""
        return self.export_table(table)[0]

    def __len__(self) -> int:
        return sum(self.size(spec.name) for spec in self.tables)

    @property
    def last_batch(self) -> int:
        """The largest batch index of retrievals and of loaded or written metadata; -1: none."""
        return int(self._native.last_batch())

    def counters(self, table: str | int | None = None) -> dict[str, int]:
        """What became of a table's keys since it was made, or cleared: each key once per call; `undo` takes back.

        "inserted"; "evicted" (to make room), "expired" (TTL); "refused" (no room), "not_admitted".
        """
        return dict(zip(COUNTERS, self._native.counters(self._table(table))))

    def load_counters(self, table: str | int | None, counters: Mapping[str, int]) -> None:
        """Replace a table's counters, as loading a checkpoint does. Raises ValueError for other names."""
        if set(counters) != set(COUNTERS):
            raise ValueError(f"load_counters: need {list(COUNTERS)}, got {sorted(counters)}")
        self._native.set_counters(self._table(table), tuple(int(counters[name]) for name in COUNTERS))

    def admission_state(
        self, table: str | int | None = None, shards: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Counts of a table's keys that have no row.

        Args:
            table: its name or index; may be left out where the store has one table.
            shards: (first, end) of 256 parts, to be asked for one after another where all would take too much memory;
                exact counts then come by (index shard, key). None: all.

        Returns:
            exact: "keys" int64 [k], ascending, "counts" int64 [k]; with a filter: "blocks" int64 [k], ascending,
            "cells" uint8 [k, cells of a block], blocks that are not all zero. Empty where the rule counts nothing.
        """
        return counts_of(self._native, self._table(table), shards)

    def load_admission_state(
        self, table: str | int | None, state: Mapping[str, Tensor], owned: Tensor | None = None
    ) -> None:
        """Add to the counts: an exact count replaces that of its key, each cell of a filter keeps the larger value.

        Args:
            state: from `admission_state` of a table with the same admission rule and name, of any process.
            owned: bool [65536], the virtual slices that belong to this process; counts of other keys are left out.
                None: all belong to it. Blocks of small filters serve several slices: one that several processes share
                is exact again only for a process that loads what it saved, and never too small otherwise.

        Raises:
            ValueError, TypeError: the state does not fit the table's rule; nothing has changed.
        """
        index = self._table(table)
        load_counts(self._native, index, self.tables[index], self.table_hashes[index : index + 1], state, owned)

    def memory(self) -> dict[str, int]:
        """Bytes, by what they are for.

        Allocated: "index", "slabs" (rows, those in limbo and room for more), "metadata" (of each row, also where it
        lies between rows), "admission". With a tier
        "file" bytes of the disk hold the rows, and "slabs" is what of them is in memory.

        In use: "keys" (12 bytes of the index for each), "rows" (of keys, wherever they lie). "waste" is what index
        and slabs have beyond that: room to grow, and rows that were given up. "untouched", a part of slabs and
        metadata, lies behind all rows there ever were: the system has not yet had to find memory for it, so that the
        process grows by index + slabs + metadata + admission - untouched.
        """
        index, slabs, metadata, admission, file, num_keys, untouched, row_bytes = self._native.memory()
        keys, rows = num_keys * KEY_BYTES, num_keys * row_bytes
        return {
            "index": index,
            "slabs": slabs,
            "metadata": metadata,
            "admission": admission,
            "file": file,
            "keys": keys,
            "rows": rows,
            "waste": max(index - keys, 0) + max(slabs - rows, 0),
            "untouched": untouched,
        }

    def tier_counters(self) -> dict[str, int]:
        """Pages of a tier's file, all 0 without one: "resident" in memory now, and the "limit" they are kept to; since
        the store was made "read" (asked for), "written" and "dropped" to make room. "page_bytes" is the size of one.
        """
        _, resident, limit, page_bytes, read, written, dropped = self._native.file_counters()
        pages = {"resident": resident, "limit": limit, "read": read, "written": written, "dropped": dropped}
        return {**pages, "page_bytes": page_bytes}

    # ------------------------------------------------------------------------------------------------------ helpers

    def _table(self, table: str | int | None) -> int:
        if table is None and len(self.tables) == 1:
            return 0
        if isinstance(table, str) and table in self._table_index:
            return self._table_index[table]
        if isinstance(table, int) and 0 <= table < len(self.tables):
            return table
        raise ValueError(f"store: no table {table!r}: name one of {', '.join(self._table_index)}")

    def _public_keys(self, operation: str, keys: Tensor, table: str | int | None) -> tuple[Tensor, Tensor]:
        index = self._table(table)
        keys = key_vector(operation, keys)
        check_bounds(operation, keys, self.tables[index])
        if len(self._same_table) < keys.numel() or int(self._same_table[0]) != index:
            made = torch.full((max(keys.numel(), 1),), index, dtype=INT32)  # never empty: its first is asked for
            if keys.numel() > MAX_KEPT_TABLES:
                return keys, made
            self._same_table = made
        return keys, self._same_table[: keys.numel()]

    def _given_starts(self, keys: Tensor, tables: Tensor) -> tuple[Tensor, Tensor] | None:
        """Positions and values of keys whose rows, if they get one now, start from a user's function."""
        if not self._given.has_start:
            return None
        return self._given.start(keys, tables, self.find_handles(keys, tables) < 0)
