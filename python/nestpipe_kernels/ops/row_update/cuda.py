"""row_update in csrc/optim/row_update.cu, for rows in device memory."""

from __future__ import annotations

from torch import Tensor

from ...types import SparseOptimizer
from .._kernels import kernels_of, place_of
from .._row_checks import pointer
from ..on_device import place
from ..row_storage import RowStorage
from ..row_storage.native import rounding_tuple
from .native import per_row_arguments, settings_arguments

__all__ = ["row_update"]


def row_update(
    rows: Tensor,
    grads: Tensor,
    optimizer: SparseOptimizer,
    step: int,
    lr: float | Tensor,
    mask: Tensor | None,
    storage: RowStorage,
) -> None:
    """As the package's, arguments as checked there; rows and grads on one device, the rest there or on the host."""
    lr = place(lr, rows) if isinstance(lr, Tensor) else lr
    mask = None if mask is None else place(mask, rows)
    storage = _placed(storage, rows)
    kernels_of(rows).row_update(
        (pointer(rows), *rows.shape, grads.shape[1]),
        (pointer(grads), grads.stride(0)),
        per_row_arguments(lr, mask),
        settings_arguments(optimizer, step),
        (storage.data_type.code, rounding_tuple(storage, step)),
        place_of(rows),
    )


def _placed(storage: RowStorage, rows: Tensor) -> RowStorage:
    """The same with its tensors where the rows are."""
    if storage.keys is None:
        return storage
    parts = (storage.keys, storage.tables, storage.table_hashes, storage.table_seeds)
    return RowStorage(storage.data_type, *(None if part is None else place(part, rows) for part in parts))
