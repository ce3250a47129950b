"""One update of a table by itself: sum the gradients of each key, update its row, write it back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import NonFiniteGradientError
from ..ops.dedup import dedup
from ..ops.finite_rows import finite_rows
from ..ops.lookup_pool import pool_backward
from ..ops.row_storage import storage_of
from ..ops.row_update import row_update
from ..types import KeyStatus, PoolingType, RowStore, TableSpec

__all__ = ["apply_gradients", "sum_gradients"]

SHOWN_KEYS = 5
LARGEST_RATE = torch.finfo(torch.float32).max


def sum_gradients(inverse: Tensor, grads: Tensor, num_unique: int) -> Tensor:
    """float32 [num_unique, dim]: the gradients of each key's occurrences, summed in the order of exactness rule 3."""
    size = inverse.numel()
    sums = torch.zeros(num_unique, grads.shape[1], dtype=torch.float32)
    # Without pooling, a bag per occurrence.
    pool_backward(
        [grads],
        None,
        inverse,
        torch.arange(size + 1),
        (0, size),
        (PoolingType.NONE.code,),
        weights=None,
        accumulator=sums,
    )
    return sums


def apply_gradients(
    store: RowStore, spec: TableSpec, keys: Tensor, tables: Tensor, grads: Tensor, step: int, lr: float | None
) -> Tensor:
    """As `EmbeddingStore.apply_gradients`, for checked keys and gradients of the table `spec`."""
    rate = _checked_rate(store.optimizer.lr if lr is None else lr, spec)
    distinct = dedup(keys)
    unique_keys, unique_tables = keys[distinct.unique_index], tables[distinct.unique_index]
    sums = sum_gradients(distinct.inverse, grads, unique_keys.numel())
    _check_finite(spec, unique_keys, sums)
    handles = store.find_handles(unique_keys, unique_tables)
    present = (handles >= 0).nonzero().squeeze(1)
    rows = torch.empty(present.numel(), store.row_floats, dtype=torch.float32)
    store.gather(handles[present], unique_keys[present], unique_tables[present], rows, None)
    storage = storage_of(store, unique_keys[present], unique_tables[present])
    row_update(rows, sums[present], store.optimizer, step, rate, None, storage)
    store.write_back(handles[present], rows)
    status = torch.where(handles >= 0, KeyStatus.FOUND.value, KeyStatus.ABSENT.value).to(torch.uint8)
    return status[distinct.inverse.to(torch.int64)]


def _checked_rate(lr: float, spec: TableSpec) -> float:
    """`lr` times the table's scale."""
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise TypeError(f"apply_gradients: lr must be a number or None, got {type(lr).__name__}")
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"apply_gradients: lr must be finite and >= 0, got {lr!r}")
    rate = lr * spec.lr_scale
    if rate > LARGEST_RATE:
        raise ValueError(
            f"apply_gradients: lr times lr_scale must be finite in float32, got {lr!r} * {spec.lr_scale!r} for table "
            f"{spec.name!r}"
        )
    return rate


def _check_finite(spec: TableSpec, keys: Tensor, sums: Tensor) -> None:
    bad = keys[~finite_rows(sums)]
    if bad.numel():
        shown = ", ".join(str(key) for key in bad[:SHOWN_KEYS].tolist()) + (", ..." if bad.numel() > SHOWN_KEYS else "")
        raise NonFiniteGradientError(
            f"apply_gradients: the summed gradient of {bad.numel()} keys of table {spec.name!r} is NaN or infinite "
            f"(keys {shown}); nothing was updated"
        )
