"""take_rows in csrc/buffers/take_rows.cu, for a matrix in device memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .._kernels import kernels_of, matrix, place_of
from .._row_checks import pointer

__all__ = ["take_rows"]


def take_rows(source: Tensor, index: Tensor, bad_position: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the package's, both on one device; those of rows out of range are undefined. `bad_position`: gather_rows."""
    rows = torch.empty(index.numel(), source.shape[1], dtype=torch.float32, device=source.device)
    peaks = torch.empty(index.numel(), dtype=torch.float32, device=source.device)
    kernels_of(source).take_rows(
        matrix(source), (pointer(index), index.numel()), source.shape[1], pointer(rows), pointer(peaks),
        pointer(bad_position), place_of(source),
    )  # fmt: skip
    return rows, peaks
