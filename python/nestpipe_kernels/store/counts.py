"""Counts of keys that admission has not given a row yet, as tensors: out of a table, and into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.owners import owners
from ..types import TableSpec
from .checks import check_tensor

__all__ = ["counts_of", "load_counts"]

NUM_SLICES = 65536
NUM_SHARDS = 256
COUNTS = ("keys", "counts")
FILTER = ("blocks", "cells")


def counts_of(native: Any, index: int, shards: tuple[int, int] | None) -> dict[str, Tensor]:
    """As `EmbeddingStore.admission_state`, of table number `index` of a native store."""
    keys, counts, cells = native.admission_state(index, *(shards or (0, NUM_SHARDS)))
    num_blocks, cells_per_block = native.filter_layout(index)
    if num_blocks:
        blocks = _int64(keys)
        flat = torch.frombuffer(cells, dtype=torch.uint8) if cells else torch.empty(0, dtype=torch.uint8)
        return {"blocks": blocks, "cells": flat.reshape(blocks.numel(), cells_per_block)}
    if shards is not None:
        return {"keys": _int64(keys), "counts": _int64(counts)}
    order = torch.argsort(_int64(keys))
    return {"keys": _int64(keys)[order], "counts": _int64(counts)[order]}


def load_counts(
    native: Any, index: int, spec: TableSpec, table_hash: Tensor, state: Mapping[str, Tensor], owned: Tensor | None
) -> None:
    """As `EmbeddingStore.load_admission_state`; `table_hash` is int64 [1]."""
    where = f"load_admission_state: table {spec.name!r}"
    num_blocks, cells_per_block = native.filter_layout(index)
    names = FILTER if num_blocks else COUNTS
    if set(state) != set(names):
        raise ValueError(f"{where} with admission {spec.admission!r} needs {sorted(names)}, got {sorted(state)}")
    if owned is not None:
        check_tensor(where, "owned", owned, torch.bool, (NUM_SLICES,))
    first, second = (state[name] for name in names)
    check_tensor(where, names[0], first, torch.int64, (None,))
    if num_blocks:
        check_tensor(where, "cells", second, torch.uint8, (first.numel(), cells_per_block))
        if first.numel() and not (int(first.min()) >= 0 and int(first.max()) < num_blocks):
            raise ValueError(
                f"{where}: blocks must be in [0, {num_blocks}), got {int(first.min())} to {int(first.max())}"
            )
        kept = None if owned is None else owned.reshape(num_blocks, -1).any(1)[first]
    else:
        check_tensor(where, "counts", second, torch.int64, (first.numel(),))
        if first.numel() and int(second.min()) < 1:
            raise ValueError(f"{where}: counts must be >= 1, got {int(second.min())}")
        kept = None if owned is None else _owned_keys(first, table_hash, owned)
    if kept is not None:
        first, second = first[kept], second[kept].contiguous()
    if num_blocks:
        native.load_admission_state(index, first.numel(), first.data_ptr(), 0, (second.data_ptr(), second.numel()))
    else:
        native.load_admission_state(index, first.numel(), first.data_ptr(), second.data_ptr(), (0, 0))


def _owned_keys(keys: Tensor, table_hash: Tensor, owned: Tensor) -> Tensor:
    """bool [n]: the keys whose virtual slice is owned."""
    tables = torch.zeros(keys.numel(), dtype=torch.int32)
    return owners(keys, tables, table_hash, owned.to(torch.int32)) == 1


def _int64(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)
