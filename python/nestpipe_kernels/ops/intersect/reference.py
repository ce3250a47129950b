"""Intersect with a dictionary: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["intersect"]


def intersect(
    keys_a: Tensor, tables_a: Tensor | None, keys_b: Tensor, tables_b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `nestpipe_kernels.ops.intersect.intersect`, for checked arguments."""
    place: dict[tuple[int, int], int] = {}
    for position, pair in enumerate(_pairs(keys_a, tables_a)):
        place.setdefault(pair, position)
    hits = [(place[pair], position) for position, pair in enumerate(_pairs(keys_b, tables_b)) if pair in place]
    both = torch.tensor(hits, dtype=torch.int64).reshape(-1, 2)
    return both[:, 0].contiguous(), both[:, 1].contiguous()


def _pairs(keys: Tensor, tables: Tensor | None) -> list[tuple[int, int]]:
    table_list = [0] * keys.numel() if tables is None else tables.tolist()
    return list(zip(table_list, keys.tolist()))
