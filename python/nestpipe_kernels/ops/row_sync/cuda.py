"""row_sync in csrc/buffers/row_sync.cu, for rows in device memory."""

from __future__ import annotations

from torch import Tensor

from .._kernels import kernels_of, matrix, place_of
from .._row_checks import pointer

__all__ = ["row_sync"]


def row_sync(
    source: Tensor, target: Tensor, source_index: Tensor, target_index: Tensor, bad_position: Tensor | None = None
) -> None:
    """As the package's, all on one device; `bad_position` as in gather_rows, of either index."""
    kernels_of(target).row_sync(
        matrix(source),
        matrix(target),
        (source_index.data_ptr(), target_index.data_ptr(), source_index.numel()),
        pointer(bad_position),
        place_of(target),
    )
