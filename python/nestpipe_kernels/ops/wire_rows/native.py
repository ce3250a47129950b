"""wire_rows through the extension (csrc/buffers/wire_rows.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._native import core
from ...config import WIRE_FORMATS
from .._row_checks import pointer
from .formats import wire_dtype, wire_width

__all__ = ["decode_rows", "encode_rows"]


def encode_rows(rows: Tensor, wire: str) -> Tensor:
    """Arguments as checked by the package."""
    size, dim = rows.shape
    message = torch.empty(size, wire_width(dim, wire), dtype=wire_dtype(wire))
    core().encode_rows(WIRE_FORMATS.index(wire), (pointer(rows), size, rows.stride(0)), dim, pointer(message))
    return message


def decode_rows(message: Tensor, dim: int, wire: str) -> Tensor:
    """Arguments as checked by the package."""
    rows = torch.empty(message.shape[0], dim, dtype=torch.float32)
    core().decode_rows(WIRE_FORMATS.index(wire), pointer(message), message.shape[0], dim, pointer(rows))
    return rows
