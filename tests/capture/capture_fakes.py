"""Embedding modules without stores: they answer lookups through their context alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FakeEmbedding(nn.Module):
    """Takes a tensor of ids, an (ids, offsets) pair, a dict of tensors or a KeyedJaggedTensor; returns [B, dim]."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.dim = dim
        self.lookup_context: Any = None
        self.received: list[Any] = []

    def row_stores(self) -> list[Any]:
        return []

    def plan_call(self, features: Any) -> Any:
        raise NotImplementedError

    def zero_output(self, features: Any) -> Tensor:
        return torch.zeros(rows_of(features), self.dim, requires_grad=True)

    def forward(self, features: Any) -> Tensor:
        if self.lookup_context is not None:
            return self.lookup_context.lookup(self, features)  # type: ignore[no-any-return]
        self.received.append(features)
        return self.zero_output(features)


def rows_of(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.shape[0]
    if isinstance(features, tuple):
        return features[1].shape[0]
    if isinstance(features, dict):
        return rows_of(next(iter(features.values())))
    return int(features.stride()) if hasattr(features, "stride") else int(features.lengths().numel())
