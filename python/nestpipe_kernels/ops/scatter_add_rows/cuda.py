"""scatter_rows, scatter_add_rows, zero_rows in csrc/buffers/scatter_add_rows.cu, for rows in device memory."""

from __future__ import annotations

from torch import Tensor

from .._kernels import kernels_of, matrix, place_of
from .._row_checks import pointer

__all__ = ["scatter_add_rows", "scatter_rows", "zero_rows"]


def scatter_rows(target: Tensor, index: Tensor, source: Tensor, bad_position: Tensor | None = None) -> None:
    """As the package's, all on one device; `bad_position` as in gather_rows."""
    _call("scatter_rows", target, index, matrix(source), bad_position)


def scatter_add_rows(target: Tensor, index: Tensor, source: Tensor, bad_position: Tensor | None = None) -> None:
    """As the package's, all on one device; `bad_position` as in gather_rows."""
    _call("scatter_add_rows", target, index, matrix(source), bad_position)


def zero_rows(target: Tensor, index: Tensor, bad_position: Tensor | None = None) -> None:
    """As the package's, all on one device; `bad_position` as in gather_rows."""
    _call("zero_rows", target, index, (0, 0, 0), bad_position)


def _call(name: str, target: Tensor, index: Tensor, source: tuple[int, int, int], bad_position: Tensor | None) -> None:
    getattr(kernels_of(target), name)(
        matrix(target), (index.data_ptr(), index.numel()), source, target.shape[1], pointer(bad_position),
        place_of(target),
    )  # fmt: skip
