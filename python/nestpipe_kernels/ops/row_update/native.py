"""row_update through the extension (csrc/optim)."""

from __future__ import annotations

from torch import Tensor

from ..._native import core
from ...types import SparseOptimizer
from .._row_checks import pointer
from ..row_storage import RowStorage
from ..row_storage.native import rounding_tuple

__all__ = ["row_update"]

RULE_CODES = {
    "sgd": 0,
    "adagrad": 1,
    "row_wise_adagrad": 2,
    "adam": 3,
    "adamw": 4,
    "row_wise_adam": 5,
    "ftrl": 6,
    "lamb": 7,
}


def row_update(
    rows: Tensor,
    grads: Tensor,
    optimizer: SparseOptimizer,
    step: int,
    lr: float | Tensor,
    mask: Tensor | None,
    storage: RowStorage,
) -> None:
    """Arguments as checked by the package."""
    row_lr = lr if isinstance(lr, Tensor) else None
    core().row_update(
        (pointer(rows), *rows.shape, grads.shape[1]),
        (pointer(grads), grads.stride(0)),
        (0.0 if isinstance(lr, Tensor) else lr, pointer(row_lr), pointer(mask)),
        (RULE_CODES[optimizer.name], step, optimizer.hyper()),
        (storage.data_type.code, rounding_tuple(storage, step)),
    )
