"""Stores with rows, metadata and optimizer state to save, and what tests compare after loading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nestpipe_kernels.checkpoint.generation import Generation, RankPart, save_generation
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.names import rank_file
from nestpipe_kernels.checkpoint.rows import all_targets, load_tables, save_tables
from nestpipe_kernels.checkpoint.settings import row_parts
from nestpipe_kernels.comm import LocalCommunicator
from nestpipe_kernels.init import Uniform
from nestpipe_kernels.ops.owners import default_slice_owner, owners
from nestpipe_kernels.optim import Adam
from nestpipe_kernels.store import EmbeddingStore, RowMetadata
from nestpipe_kernels.testing.threads import run_ranks_as_threads
from nestpipe_kernels.types import UNBOUNDED, TableSpec

Row = tuple[bytes, int, int]
"""(embedding, state and updates as bytes, last_used, frequency)."""


def specs(capacity: int | None = None) -> list[TableSpec]:
    """An open table, a fixed one, and one that no feature ever uses."""
    init = Uniform(-0.5, 0.5)
    return [
        TableSpec("user", UNBOUNDED, init, 3, capacity),
        TableSpec("item", 500, init, 4),
        TableSpec("never used", UNBOUNDED, init, 5),
    ]


def make_store(dim: int = 4, tables: Sequence[TableSpec] | None = None, optimizer: Any = None) -> EmbeddingStore:
    return EmbeddingStore(tables or specs(), dim=dim, optimizer=optimizer or Adam())


def all_keys() -> list[torch.Tensor]:
    """Keys of each table of `specs`."""
    extremes = torch.tensor([-(2**63), 2**63 - 1, -1, 0, 1, 2**52])
    generator = torch.Generator().manual_seed(11)
    users = torch.randint(-(2**62), 2**62, (700,), generator=generator)
    return [torch.cat([extremes, users]).unique(), torch.arange(0, 500, 2), torch.empty(0, dtype=torch.int64)]


def fill(store: EmbeddingStore, rank: int, world: int, salt: int = 0, keys: list[torch.Tensor] | None = None) -> None:
    """Rows that this rank owns; values are functions of (table, key, salt)."""
    for table, known in enumerate(keys or all_keys()):
        numbers = torch.full((known.numel(),), table, dtype=torch.int32)
        own = owners(known, numbers, store.table_hashes, default_slice_owner(world)) == rank
        mine = known[own]
        numbers = numbers[own]
        if mine.numel() == 0:
            continue
        found = store.retrieve(mine, numbers, torch.zeros_like(mine), -1)
        parts = row_parts(store)
        rows = torch.empty(mine.numel(), store.row_floats)
        store.gather(found.handles, mine, numbers, rows, None)
        base = ((mine % 1000) + 7 * table + 13 * salt).to(torch.float32).unsqueeze(1)
        parts.embedding(rows).copy_(base + torch.arange(store.dim) / 8)
        for k, (name, width) in enumerate(parts.slots):
            parts.slot(rows, name).copy_(base * (k + 2) + torch.arange(width))
        parts.updates(rows).copy_((mine % 17).to(torch.int32) + salt)
        store.write_back(found.handles, rows)
        store.write_metadata(found.handles, RowMetadata(mine % 31 + salt, mine % 5 + 1))


def contents(stores: Sequence[EmbeddingStore]) -> dict[tuple[str, int], Row]:
    """All rows of all ranks; a key that two ranks hold is an error."""
    rows: dict[tuple[str, int], Row] = {}
    for store in stores:
        for table, spec in enumerate(store.tables):
            keys, handles = store.export_table(table)
            out = torch.empty(keys.numel(), store.row_floats)
            store.gather(handles, keys, torch.full((keys.numel(),), table, dtype=torch.int32), out, None)
            notes = store.read_metadata(handles)
            for j, key in enumerate(keys.tolist()):
                assert (spec.name, key) not in rows
                rows[spec.name, key] = (out[j].numpy().tobytes(), int(notes.last_used[j]), int(notes.frequency[j]))
    return rows


def save_stores(directory: Path, stores: Sequence[EmbeddingStore], salt: int = 0) -> None:
    """One store per rank, ranks as threads; each rank has a small file of its own, too."""

    def body(rank: int, communicator: Any) -> None:
        save_one(directory, stores[rank], communicator, salt)

    run_ranks_as_threads(len(stores), body)


def save_one(directory: Path, store: EmbeddingStore, communicator: Any = None, salt: int = 0) -> Manifest | None:
    """One rank's side of a save."""

    def write(generation: Generation) -> RankPart:
        tables = save_tables(generation, [store])
        own = {"random": torch.arange(5 + salt, dtype=torch.uint8), "wide": torch.full((3, 2), float(salt))}
        generation.write_tensors(rank_file(generation.number, generation.rank), own)
        return RankPart(tables, {"salt": salt}, {"step_count": salt})

    return save_generation(directory, communicator or LocalCommunicator(), write)


def load_stores(directory: Path, stores: Sequence[EmbeddingStore], **settings: Any) -> list[dict[str, int]]:
    """Load all tables; one store per rank, ranks as threads."""
    manifest = Manifest.load(directory)

    def body(rank: int, communicator: Any) -> dict[str, int]:
        return load_tables(directory, manifest, communicator, all_targets([stores[rank]]), **settings)

    return run_ranks_as_threads(len(stores), body)
