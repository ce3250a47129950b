"""wire_rows in plain PyTorch: what the bytes of a message are."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import DataType
from ..row_storage.reference import round_to_nearest, widen

__all__ = ["decode_rows", "encode_rows", "round_rows"]

_HALVES = {"bf16": DataType.BF16, "fp16": DataType.FP16}
_SMALLEST_STEP = 2.0**-126


def encode_rows(rows: Tensor, wire: str) -> Tensor:
    """Arguments as checked by the package."""
    if wire in _HALVES:
        return round_to_nearest(rows.contiguous(), _HALVES[wire]).view(torch.uint8)
    largest = rows.abs().amax(1)  # a NaN is larger than all
    step = (largest / torch.tensor(127.0)).clamp_min(_SMALLEST_STEP)
    counts = (rows / step[:, None]).round()
    lost = ~largest.isfinite()
    step[lost], counts[lost] = torch.nan, 0.0
    return torch.cat([step.view(torch.uint8).view(len(rows), 4), counts.to(torch.int8).view(torch.uint8)], 1)


def decode_rows(message: Tensor, dim: int, wire: str) -> Tensor:
    """Arguments as checked by the package."""
    if wire in _HALVES:
        return widen(_whole(message).view(torch.int16).view(_HALVES[wire].torch_dtype))
    step = _whole(message[:, :4]).view(torch.float32)
    return message[:, 4:].view(torch.int8).to(torch.float32) * step


def _whole(bytes_of_rows: Tensor) -> Tensor:
    """A copy with the strides of its shape, whatever the shape: only such can be seen as another type."""
    return bytes_of_rows.clone(memory_format=torch.contiguous_format)


def round_rows(rows: Tensor, wire: str) -> Tensor:
    """float32 [n, dim]: rows as they arrive."""
    return rows if wire == "fp32" else decode_rows(encode_rows(rows, wire), rows.shape[1], wire)
