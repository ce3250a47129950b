"""Embeddings of keys whose initial values a user's function gives (init.Custom): the store fills them in from here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..init import Custom
from ..types import TableSpec

__all__ = ["GivenValues"]


class GivenValues:
    """The functions of a store's tables: `start` for rows that a key gets, `absent` for keys without a row."""

    def __init__(self, tables: Sequence[TableSpec], dim: int) -> None:
        self._tables = tables
        self._dim = dim
        self._start = _chosen({t: spec.init for t, spec in enumerate(tables)})
        self._absent = _chosen(
            {t: spec.init if spec.default is None else spec.default for t, spec in enumerate(tables)}
        )

    def start(self, keys: Tensor, tables: Tensor, where: Tensor) -> tuple[Tensor, Tensor] | None:
        """Positions int64 [m] and values float32 [m, dim] that rows of the keys with `where` bool [n] start from.

        None: no function concerns them. Repeated keys are fine.

        Raises:
            TypeError, ValueError: what a function returned; names the table.
        """
        return self._values(self._start, keys, tables, where)

    def absent(self, keys: Tensor, tables: Tensor, handles: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `start`, of what keys without a row (handle -1) read."""
        return self._values(self._absent, keys, tables, handles < 0) if self._absent else None

    @property
    def has_start(self) -> bool:
        """Whether rows of some table start from a function's values."""
        return bool(self._start)

    @property
    def any(self) -> bool:
        """Whether there is a function at all."""
        return bool(self._start or self._absent)

    def _values(
        self, functions: dict[int, Custom], keys: Tensor, tables: Tensor, where: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        positions, values = [], []
        for table, function in functions.items():
            found = ((tables == table) & where).nonzero().squeeze(1)
            if found.numel():
                spec = self._tables[table]
                positions.append(found)
                values.append(function.values(spec.seed, spec.name, keys[found], self._dim))
        return (torch.cat(positions), torch.cat(values)) if positions else None


def _chosen(inits: dict[int, object]) -> dict[int, Custom]:
    return {table: init for table, init in inits.items() if isinstance(init, Custom)}
