"""gather_rows: copy the embeddings of chosen buffer rows into a float32 matrix, to be sent or pooled."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import DataType
from .. import _row_checks as checks
from .. import on_device
from ..row_storage import embedding_words
from . import native, reference

__all__ = ["gather_rows"]

OPERATION = "gather_rows"


def gather_rows(
    rows: Tensor,
    index: Tensor,
    dim: int,
    out: Tensor | None = None,
    *,
    data_type: DataType = DataType.FP32,
    implementation: str = "native",
) -> Tensor:
    """The embedding of rows[index[j]], for each j, widened. Synchronous; the result shares no memory with `rows`.

    Rows on an accelerator: the index is on the host, the work goes to the current stream.

    Args:
        rows: float32 [U, F], F >= the words that hold `dim` elements, last dimension contiguous.
        index: int64 [m], repeats allowed.
        dim: elements to take of each row.
        out: float32 [m, dim] to fill, last dimension contiguous; None makes a new one.
        data_type: storage type of the embeddings.
        implementation: "native" or "reference"; the same bits.

    Returns:
        float32 [m, dim], `out` if given.

    Raises:
        TypeError: dtype or device. ValueError: shapes, strides. IndexError: a row out of range.
    """
    checks.check_implementation(OPERATION, implementation)
    if not rows.is_cpu:
        return on_device.gather_rows(rows, index, dim, out, data_type)
    checks.check_matrix(OPERATION, "rows", rows)
    checks.check_index(OPERATION, "index", index)
    if dim < 0 or embedding_words(dim, data_type) > rows.shape[1]:
        most = rows.shape[1] * (4 // data_type.itemsize)
        raise ValueError(f"{OPERATION}: dim must lie in [0, {most}] (the row's length), got {dim}")
    if out is None:
        out = torch.empty(index.numel(), dim, dtype=torch.float32)
    else:
        checks.check_matrix(OPERATION, "out", out)
        if out.shape != (index.numel(), dim):
            raise ValueError(f"{OPERATION}: out must have shape {[index.numel(), dim]}, got {list(out.shape)}")
    chosen = native.gather_rows if implementation == "native" else reference.gather_rows
    chosen(rows, index, dim, out, data_type)
    return out
