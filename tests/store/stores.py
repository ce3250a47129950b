"""Stores and settings that the tests of this folder share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe_kernels.store import EmbeddingStore

EXTREMES = [0, -1, -2, -5, -(2**63), -(2**63) + 1, 2**63 - 1, 2**52, 5, 5 + 2**52]


@dataclass
class StateOf:
    """A stand-in for an optimizer: `factor * dim` floats of state, all starting at 0.5."""

    factor: int = 1
    lr: float = 0.1
    name: str = "stand_in"

    def slots(self, dim: int) -> tuple[tuple[str, int], ...]:
        return (("state", self.factor * dim),)

    def state_floats(self, dim: int) -> int:
        return self.factor * dim

    def state_init(self) -> float:
        return 0.5

    def hyper(self) -> dict[str, float]:
        return {}


def keys_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def item_store(dim: int = 4, **settings) -> EmbeddingStore:
    return EmbeddingStore(name="item", dim=dim, optimizer=StateOf(), **settings)


def table_zero(keys: Tensor) -> Tensor:
    return torch.zeros(keys.numel(), dtype=torch.int32)


def whole_rows(store: EmbeddingStore, keys: Tensor) -> Tensor:
    """float32 [n, row_floats] of keys of the first table."""
    out = torch.full((keys.numel(), store.row_floats), float("nan"))
    store.gather(store.find_handles(keys, table_zero(keys)), keys, table_zero(keys), out, None)
    return out
