"""Elements that rows of each format take on the wire."""

from __future__ import annotations

import torch

__all__ = ["wire_dtype", "wire_width"]


def wire_dtype(wire: str) -> torch.dtype:
    """Of a message's elements: float32, or uint8."""
    return torch.float32 if wire == "fp32" else torch.uint8


def wire_width(dim: int, wire: str) -> int:
    """Elements of the message (of `wire_dtype`) that a row of `dim` takes."""
    return {"fp32": dim, "bf16": 2 * dim, "fp16": 2 * dim, "int8": 4 + dim}[wire]
