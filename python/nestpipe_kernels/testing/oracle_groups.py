"""The oracle of sparse groups that average: a dictionary of rows for each copy of the tables, by the rule as written.

All copies hold the same rows, by the keys of all ranks. A copy learns from its own group's ranks, divided by their
number. Every `average_every` updates the rows that any rank looked up since the last time, and that are still there,
become the mean over the copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.row_storage import embedding_words, pack_embeddings, unpack_embeddings
from .oracle import Oracle
from .oracle_rows import OracleRows, RankPart

__all__ = ["AveragingOracle"]


@dataclass
class AveragingOracle(Oracle):
    """All ranks of a run whose copies of the tables are averaged.

    Attributes (beyond Oracle's):
        groups: copies; consecutive ranks share one, over `shards` ranks each.
        average_every: updates between two averagings.
    """

    groups: int = 2
    average_every: int = 1

    def __post_init__(self) -> None:
        self.copies = [OracleRows(self.tables, self.shards, self.wires) for _ in range(self.groups)]
        self._touched: set[tuple[str, int]] = set()
        super().__post_init__()

    def update_rows(self, per_rank: list[RankPart], rows: OracleRows) -> None:
        """Each copy by its own group, then all by each other."""
        for number, copy in enumerate(self.copies):
            super().update_rows(per_rank[number * self.shards : (number + 1) * self.shards], copy)
        trainable = {table.name for table in self.tables if table.trainable}
        used = {row for gradients, _, _ in per_rank for row in gradients if row[0] in trainable}
        self._touched = (self._touched - set(rows.evicted[-1])) | (used & rows.values.keys())
        if self.step % self.average_every == 0:
            for name, key in self._touched:
                mean = self._mean(name, [copy.values[name, key] for copy in self.copies])
                for copy in self.copies:
                    copy.values[name, key] = mean.clone()
            self._touched.clear()

    def _mean(self, name: str, copies: list[Tensor]) -> Tensor:
        table = next(t for t in self.tables if t.name == name)
        words = embedding_words(table.dim, table.data_type)
        embedding, state = torch.zeros(table.dim), torch.zeros(len(copies[0]) - words - 1)
        for one in copies:
            embedding = embedding + unpack_embeddings(one.view(1, -1), table.dim, table.data_type)[0]
            state = state + one[words:-1]
        updates = max(int(one[-1:].view(torch.int32)) for one in copies)
        start = torch.zeros(1, words)
        pack_embeddings((embedding / len(copies)).view(1, -1), start, table.data_type, implementation="reference")
        counted = torch.tensor([updates], dtype=torch.int32).view(torch.float32)
        parts = (start[0], state / len(copies), counted)
        return torch.cat([part.view(torch.int32) for part in parts]).view(torch.float32)
