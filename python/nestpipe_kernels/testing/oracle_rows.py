"""The oracle's rows: which keys have one on which rank (by the written rules), their values, and what others read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.row_storage import RowStorage, embedding_words, pack_embeddings, unpack_embeddings
from ..ops.wire_rows.reference import round_rows
from ..types import DataType
from .policy_model import TableModel, hash_key, hash_name

__all__ = ["OracleRows", "OracleTable", "RankPart", "Wires", "storage_of_key"]

RankPart = tuple[dict[tuple[str, int], Tensor], float, float]
"""What a rank gives to an update: row gradients, loss, divisor."""


@dataclass(frozen=True)
class Wires:
    """What rows and gradients are rounded to as they travel; gradients once per batch, or in every micro-batch."""

    rows: str = "fp32"
    gradients: str = "fp32"
    once: bool = True

    def sent(self, gradient: Tensor) -> Tensor:
        """A row's gradient [dim] as its owner gets it."""
        return round_rows(gradient.view(1, -1), self.gradients)[0]


@dataclass(frozen=True)
class OracleTable:
    """One table: which features read it, how they pool, how its rows start and change, and which keys have some.

    `capacity`: rows over all ranks; the other rules are those of nk.policy; `default`: what a key without a row reads.
    """

    name: str
    dim: int
    features: tuple[str, ...]
    mode: int
    init: Any
    optimizer: Any
    seed: int = 0
    trainable: bool = True
    capacity: int | None = None
    admission: Any = None
    eviction: Any = None
    default: Any = None
    data_type: DataType = DataType.FP32
    stochastic_rounding: bool = False


class OracleRows:
    """Rows of all ranks: values in one dictionary, keys and metadata in a `TableModel` for each rank and table."""

    def __init__(self, tables: Sequence[OracleTable], world_size: int, wires: Wires) -> None:
        self.wires = wires
        self.tables = {table.name: table for table in tables}
        self.world_size = world_size
        self.values: dict[tuple[str, int], Tensor] = {}
        self.evicted: list[list[tuple[str, int]]] = []
        """Per batch: rows that went, any order."""
        self.models = [
            {t.name: TableModel(t.name, _share(t.capacity, rank, world_size), t.admission, t.eviction) for t in tables}
            for rank in range(world_size)
        ]

    def retrieve(self, uses: Iterable[tuple[str, int]], batch: int) -> None:
        """Find or insert the occurrences of a batch, in the order of ranks, micro-batches, features and samples."""
        counts: dict[str, list[dict[int, int]]] = {name: [{} for _ in self.models] for name in self.tables}
        for name, key in uses:
            # The virtual slice (the hash's upper 16 bits) decides the owner.
            owner = (hash_key(self.models[0][name].table_hash, key) >> 48) * self.world_size >> 16
            mine = counts[name][owner]
            mine[key] = mine.get(key, 0) + 1
        gone: list[tuple[str, int]] = []
        for name, table in self.tables.items():
            for models, found in zip(self.models, counts[name]):
                _, evicted = models[name].retrieve(list(found), list(found.values()), batch)
                gone += [(name, key) for key in evicted]
                for key in evicted:
                    del self.values[name, key]
                for key in found:
                    if key in models[name].rows and (name, key) not in self.values:
                        self.values[name, key] = _fresh_row(table, key)
        self.evicted.append(gone)

    def read(self, name: str, key: int) -> Tensor:
        """float32 [dim]: the embedding that a lookup of the key gets."""
        table = self.tables[name]
        if (name, key) in self.values:
            stored = self.values[name, key]
        else:
            stored = _embedding(table, table.init if table.default is None else table.default, key)
        return round_rows(unpack_embeddings(stored.view(1, -1), table.dim, table.data_type), self.wires.rows)[0]

    def metadata(self, rank: int) -> dict[tuple[str, int], tuple[int, int]]:
        """(last_used, frequency) of the rows of a rank."""
        return {(name, key): facts for name, model in self.models[rank].items() for key, facts in model.rows.items()}

    def policies(self, rank: int) -> dict[str, Any]:
        """What `explorer.read_policies` must say of a rank."""
        found: dict[str, Any] = {}
        for name, model in self.models[rank].items():
            if (model.capacity, model.admission, model.eviction) != (None, None, None):
                counts: dict[int, Any] = dict(model.ghosts)
                if model.filter is not None:
                    counts = {block: tuple(cells) for block, cells in model.filter.blocks.items() if any(cells)}
                found[name] = {"size": len(model.rows), "counters": model.counters, "counts": counts}
        return found


def _share(capacity: int | None, rank: int, world_size: int) -> int | None:
    return None if capacity is None else capacity // world_size + (rank < capacity % world_size)


def storage_of_key(table: OracleTable, key: int) -> RowStorage:
    """How the row of a key lies in memory, for the reference of row updates."""
    if not table.stochastic_rounding:
        return RowStorage(table.data_type)
    hashes, seeds = (torch.tensor([_signed(word)]) for word in (hash_name(table.name), table.seed % (1 << 64)))
    return RowStorage(table.data_type, torch.tensor([key]), torch.zeros(1, dtype=torch.int32), hashes, seeds)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _embedding(table: OracleTable, values: Any, key: int) -> Tensor:
    """float32 [words]: what a row starts with, as it is stored."""
    start = torch.as_tensor(values.reference(table.seed, table.name, [key], table.dim)).view(1, -1)
    words = torch.zeros(1, embedding_words(table.dim, table.data_type))
    pack_embeddings(start, words, table.data_type, implementation="reference")
    return words[0]


def _fresh_row(table: OracleTable, key: int) -> Tensor:
    embedding = _embedding(table, table.init, key)
    state = torch.full((table.optimizer.state_floats(table.dim),), table.optimizer.state_init())
    # Joined as integers: the bits of two halves may be those of a NaN.
    return torch.cat([part.view(torch.int32) for part in (embedding, state, torch.zeros(1))]).view(torch.float32)
