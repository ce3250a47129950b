"""row_update through the extension (csrc/optim)."""

from __future__ import annotations

from torch import Tensor

from ..._native import core
from ...types import SparseOptimizer
from .._row_checks import pointer
from ..row_storage import RowStorage
from ..row_storage.native import rounding_tuple

__all__ = ["per_row_arguments", "row_update", "settings_arguments"]

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
    core().row_update(
        (pointer(rows), *rows.shape, grads.shape[1]),
        (pointer(grads), grads.stride(0)),
        per_row_arguments(lr, mask),
        settings_arguments(optimizer, step),
        (storage.data_type.code, rounding_tuple(storage, step)),
    )


def per_row_arguments(lr: float | Tensor, mask: Tensor | None) -> tuple[float, int, int]:
    """(rate of all rows, addresses of the rows' own rates and of the mask); the tensors must outlive the call."""
    if isinstance(lr, Tensor):
        return 0.0, pointer(lr), pointer(mask)
    return lr, 0, pointer(mask)


def settings_arguments(optimizer: SparseOptimizer, step: int) -> tuple[int, int, dict[str, float]]:
    """Rule, step and hyperparameters."""
    return RULE_CODES[optimizer.name], step, optimizer.hyper()
