"""row_storage: embeddings between float32 and the words of buffer rows that hold them in the storage type.

Reading is plain PyTorch here; native code reads rows in `gather_rows` and `row_update`, with the same bits.
"""

from __future__ import annotations

from torch import Tensor

from ...types import DataType
from .. import _row_checks as checks
from . import native, reference
from .layout import RowStorage, embedding_words, put_elements, storage_of, stored_elements

__all__ = [
    "RowStorage",
    "embedding_words",
    "pack_embeddings",
    "put_elements",
    "storage_of",
    "stored_elements",
    "unpack_embeddings",
]

OPERATION = "row_storage"


def unpack_embeddings(rows: Tensor, dim: int, data_type: DataType) -> Tensor:
    """float32 [n, dim], a copy: the embeddings of rows float32 [n, >= words], widened exactly."""
    return reference.widen(stored_elements(rows, dim, data_type))


def pack_embeddings(
    values: Tensor,
    rows: Tensor,
    data_type: DataType,
    rounding: RowStorage | None = None,
    step: int = 0,
    *,
    implementation: str = "native",
) -> None:
    """Round values float32 [n, dim] to the storage type and write them into rows float32 [n, >= words] in place.

    Args:
        values: float32 [n, dim], rows contiguous.
        rows: float32 [n, >= embedding_words(dim, data_type)], rows contiguous; the other words stay.
        data_type: storage type.
        rounding: with keys: round stochastically; else to nearest, ties to even.
        step: the update's number, for stochastic rounding.
        implementation: "native" or "reference"; the same bits.

    Raises:
        TypeError, ValueError: dtypes, shapes, strides.
    """
    checks.check_implementation(OPERATION, implementation)
    if rows.is_cpu:
        checks.check_matrix(OPERATION, "values", values)
        checks.check_matrix(OPERATION, "rows", rows)
    size, dim = values.shape
    if rows.shape[0] != size or rows.shape[1] < embedding_words(dim, data_type):
        raise ValueError(
            f"{OPERATION}: rows for {size} embeddings of {dim} {data_type.value} elements must have shape [{size}, >= "
            f"{embedding_words(dim, data_type)}], got {list(rows.shape)}"
        )
    if rounding is not None:
        rounding.check(OPERATION, size)
    chosen = native.pack_embeddings if implementation == "native" and rows.is_cpu else reference.pack_embeddings
    chosen(values.detach(), rows, data_type, rounding, step)
