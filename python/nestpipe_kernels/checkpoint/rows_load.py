"""Loads rows that any number of ranks saved: each rank takes those of the virtual slices that it owns.

Order of work, each step agreed upon by all ranks before the next: settings are compared; keys are counted where a
capacity might not hold them; where tables hold rows already, all files are verified and the rows go; rows stream in.
Damage that shows midway empties the tables again, so that tables which were empty are as before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._native import core
from ..comm import Communicator
from ..errors import CheckpointError, StoreFullError
from ..ops.owners import NUM_SLICES, default_slice_owner, owners
from ..store import RowMetadata
from .admission_load import admission_chunks, load_counts
from .exchange import agree, gather_json
from .file_reader import open_tensor_file
from .manifest import Manifest
from .manifest_parts import TableFile
from .rows_check import TableTarget, check_rows, differences
from .rows_save import admission_parts, rows_per_chunk, slice_range
from .settings import RowParts, described, row_parts

__all__ = ["TableTarget", "all_targets", "load_tables"]

_DOING = "loading a checkpoint"


@dataclass(frozen=True)
class _Chunk:
    """Rows of a file that this rank owns."""

    keys: Tensor
    tensors: dict[str, Tensor]


def all_targets(stores: Sequence[Any], names: Sequence[Sequence[str]] | None = None) -> list[TableTarget]:
    """Every table of some stores, with the names they were saved by (None: their own)."""
    return [
        TableTarget(store, t, spec.name if names is None else names[s][t])
        for s, store in enumerate(stores)
        for t, spec in enumerate(store.tables)
    ]


def load_tables(
    directory: str | os.PathLike[str],
    manifest: Manifest,
    communicator: Communicator,
    targets: Sequence[TableTarget],
    *,
    optimizer_state: bool = True,
    strict: bool = True,
    slice_owner: Tensor | None = None,
    shard: int | None = None,
) -> dict[str, int]:
    """Replace the rows of tables by those of a checkpoint. Collective; the same targets in the same order on all ranks.

    Tables that are no target stay as they are. Embeddings of another storage type are rounded once. Extra memory: a few
    CHUNK_BYTES.

    Args:
        directory: of the checkpoint.
        manifest: its manifest, the same on all ranks.
        communicator: of the ranks that own the rows now.
        targets: which table goes where.
        optimizer_state: False takes embeddings and metadata alone; state and `updates` start anew, whatever the rule.
        strict: seeds, initial values and admission rules must be those of the checkpoint. Otherwise keys without a row
            may read other values, and another admission rule starts to count anew.
        slice_owner: int32 [65536], who owns which slice; None: the default of this world size.
        shard: who this rank is there; None: its rank.

    Returns:
        Rows that this rank loaded, by the table's name in the checkpoint.

    Raises:
        CheckpointError: a table is missing, dim, optimizer, slots, number of embeddings, seed, initial values or
            capacity do not fit (both values are named), or a file is damaged (file and tensor are named).
        StoreFullError: memory does not hold the rows.
        RemoteRankError: another rank failed.
        After an error tables that were empty are empty, and others have not changed, unless memory or the disk failed
        after everything had been verified: then they are empty, too.
    """
    job = _Load(Path(directory), manifest, communicator, list(targets), optimizer_state, slice_owner, shard)
    _together(communicator, lambda: job.compare(strict))
    _together(communicator, job.check_capacities)
    if any(_together(communicator, job.is_occupied, everyone=True)):
        _together(communicator, job.verify)
        _together(communicator, job.empty)
    try:
        loaded: dict[str, int] = _together(communicator, job.fill)
        return loaded
    except BaseException:
        job.empty()
        raise


def _together(communicator: Communicator, step: Callable[[], Any], everyone: bool = False) -> Any:
    """Run a local step; failures reach all ranks. What it returned, or (`everyone`) a list of what all ranks' did."""
    result, failure = None, None
    try:
        result = step()
    except Exception as error:
        failure = error
    if everyone:
        return gather_json(communicator, result, failure, _DOING, to=None)
    agree(communicator, failure, _DOING)
    return result


class _Load:
    """One rank's side of a load; every method is local."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        communicator: Communicator,
        targets: list[TableTarget],
        optimizer_state: bool,
        slice_owner: Tensor | None,
        shard: int | None,
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.rank = communicator.rank if shard is None else shard
        self.targets = targets
        self.optimizer_state = optimizer_state
        self.slice_owner = default_slice_owner(communicator.size) if slice_owner is None else slice_owner
        self.slices = slice_range(self.slice_owner, self.rank)

    # ------------------------------------------------------------------------------------------------------- steps

    def compare(self, strict: bool) -> None:
        """Raises CheckpointError with everything in which tables differ."""
        problems: list[str] = []
        for target in self.targets:
            saved = self.manifest.table(target.source)
            problems += differences(saved, target, self.optimizer_state, strict)
        if problems:
            raise CheckpointError(
                f"checkpoint: {self.directory} does not fit the model; nothing was loaded: {'; '.join(problems)}"
            )

    def check_capacities(self) -> None:
        """Raises CheckpointError if a table's capacity does not hold the rows that this rank would take."""
        for target in self.targets:
            capacity = target.spec.capacity
            saved = self.manifest.table(target.source)
            if capacity is None or sum(file.rows for file in self._files(target)) <= capacity:
                continue
            rows = sum(
                chunk.keys.numel() for file in self._files(target) for chunk in self._chunks(target, file, ["keys"])
            )
            if rows > capacity:
                raise CheckpointError(
                    f"checkpoint: table {target.source!r}: rank {self.rank} would take {rows} of its {saved.rows} "
                    f"rows, but its share of the capacity is {capacity}; nothing was loaded: raise the capacity, or "
                    "load with more ranks"
                )

    def is_occupied(self) -> bool:
        """Whether some target holds rows, counts or counters that must go."""
        return any(
            target.store.size(target.table)
            or any(target.store.counters(target.table).values())
            or any(one.numel() for part in admission_parts(target.store, target.table) for one in part.values())
            for target in self.targets
        )

    def verify(self) -> None:
        """Read everything that will be loaded, checking digests and keys."""
        for target in self.targets:
            for file in self._files(target):
                for _ in self._chunks(target, file, self._tensor_names(target)):
                    pass
            for _ in admission_chunks(self.directory, self.manifest, self.manifest.table(target.source), None):
                pass

    def empty(self) -> None:
        """Remove all rows of the targets."""
        for store in {id(target.store): target.store for target in self.targets}.values():
            tables = {target.table for target in self.targets if target.store is store}
            if len(tables) == len(store.tables):
                store.clear()
            else:
                for table in sorted(tables):
                    store.clear(table)

    def fill(self) -> dict[str, int]:
        """Rows of all targets, which are empty."""
        loaded: dict[str, int] = {}
        for target in self.targets:
            target.store.touched = None
            rows = 0
            self._reserve(target)
            for file in self._files(target):
                for chunk in self._chunks(target, file, self._tensor_names(target)):
                    self._insert(target, chunk)
                    rows += chunk.keys.numel()
            size = target.store.size(target.spec.name)
            if size != rows:
                raise CheckpointError(
                    f"checkpoint: the files of table {target.source!r} hold {rows} rows of rank {self.rank}, but only "
                    f"{size} distinct keys: {', '.join(file.name for file in self._files(target))[:500]}"
                )
            self._load_counts(target)
            loaded[target.source] = rows
        return loaded

    # ----------------------------------------------------------------------------------------------------- reading

    def _files(self, target: TableTarget) -> list[TableFile]:
        """The files that may hold rows of this rank. Another name of the table means other slices."""
        saved = self.manifest.table(target.source)
        first, end = self.slices
        if saved.hash_name != target.spec.name:
            first, end = 0, NUM_SLICES
        return [one for one in saved.files if one.rows and one.first_slice < end and first < one.end_slice]

    def _tensor_names(self, target: TableTarget) -> list[str]:
        names = ["keys", "embedding", "last_used", "frequency"]
        if self.optimizer_state:
            names += [f"state.{name}" for name, _ in row_parts(target.store).slots] + ["updates"]
        return names

    def _chunks(self, target: TableTarget, file: TableFile, names: list[str]) -> Iterator[_Chunk]:
        """Rows of a file that this rank owns, chunk by chunk."""
        saved = self.manifest.table(target.source)
        hashes, own_hashes = _hash_of(saved.hash_name), _hash_of(target.spec.name)
        identity = torch.from_numpy(np.arange(NUM_SLICES, dtype=np.int32))
        path = self.directory / file.name
        with open_tensor_file(path, self.manifest.files[file.name]) as source:
            for tensors in source.chunks(names, rows_per_chunk(row_parts(target.store))):
                keys = tensors["keys"]
                slices = owners(keys, None, hashes, identity)
                check_rows(path, saved, file, tensors, slices)
                mine = owners(keys, None, own_hashes, self.slice_owner) == self.rank
                if not bool(mine.all()):
                    tensors = {name: tensor[mine] for name, tensor in tensors.items()}
                yield _Chunk(tensors["keys"], tensors)

    # --------------------------------------------------------------------------------------------------- inserting

    def _reserve(self, target: TableTarget) -> None:
        """Let the index be as long as it will be: files' keys are spread evenly over their slices."""
        own = self.slice_owner.numpy() == self.rank
        expected = 0.0
        for file in self._files(target):
            slices = own[file.first_slice : file.end_slice]
            expected += file.rows * int(slices.sum()) / max(1, slices.size)
        with _memory_is_explained(target):
            target.store.reserve_keys(target.table, int(expected))

    def _insert(self, target: TableTarget, chunk: _Chunk) -> None:
        size = chunk.keys.numel()
        if size == 0:
            return
        parts = row_parts(target.store)
        metadata = RowMetadata(chunk.tensors["last_used"], chunk.tensors["frequency"])
        if self.optimizer_state and chunk.tensors["embedding"].dtype is parts.storage:
            columns = [(offset, chunk.tensors[name]) for name, (offset, _, _) in parts.columns().items()]
            with _memory_is_explained(target):
                target.store.load_columns(chunk.keys, target.table, columns, metadata)
            return
        tables = _table_numbers(chunk.keys, target.table)
        rows = torch.zeros((size, parts.row_floats), dtype=torch.float32)
        if self.optimizer_state:
            for name, _ in parts.slots:
                parts.slot(rows, name).copy_(chunk.tensors[f"state.{name}"])
            parts.updates(rows).copy_(chunk.tensors["updates"])
        else:
            target.store.gather(torch.full((size,), -1), chunk.keys, tables, rows, None)
        _copy_embeddings(target, parts, chunk, rows)
        with _memory_is_explained(target):
            target.store.load_rows(chunk.keys, tables, rows, metadata)

    def _load_counts(self, target: TableTarget) -> None:
        """Counts of keys without rows, and counters: those are sums over ranks, and rank 0 goes on with them."""
        saved = self.manifest.table(target.source)
        renamed = saved.hash_name != target.spec.name
        if saved.admission is not None and saved.admission == described(target.spec.admission):
            owned = self.slice_owner == self.rank
            load_counts(self.directory, self.manifest, saved, target.store, target.table, owned, renamed=renamed)
        if self.rank == 0 and saved.counters:
            try:
                target.store.load_counters(target.table, saved.counters)
            except ValueError as error:
                raise CheckpointError(f"checkpoint: table {target.source!r}: {error}") from None


@contextmanager
def _memory_is_explained(target: TableTarget) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise StoreFullError(
            f"checkpoint: no memory for the rows of table {target.source!r}; load with more ranks"
        ) from error


def _copy_embeddings(target: TableTarget, parts: RowParts, chunk: _Chunk, rows: Tensor) -> None:
    """Round to the storage type once. A finite value that becomes infinite is refused."""
    saved = chunk.tensors["embedding"]
    view = parts.embedding(rows)
    view.copy_(saved)
    if parts.storage is torch.float16 and saved.dtype is not torch.float16:
        overflown = (torch.isinf(view) & torch.isfinite(saved)).any(dim=1).nonzero()
        if overflown.numel():
            at = int(overflown[0])
            raise CheckpointError(
                f"checkpoint: table {target.source!r}: the row of key {int(chunk.keys[at])} has elements up to "
                f"{float(saved[at].abs().max()):g}, FP16 ends at 65504: keep {saved.dtype} or use BF16"
            )


def _hash_of(name: str) -> Tensor:
    """int64 [1]: what hashes of a table's keys start from."""
    word: int = core().hash_name(name)
    return torch.tensor([word - (1 << 64) if word >> 63 else word], dtype=torch.int64)


def _table_numbers(keys: Tensor, table: int) -> Tensor:
    return torch.full((keys.numel(),), table, dtype=torch.int32)
