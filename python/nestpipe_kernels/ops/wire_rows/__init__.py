"""wire_rows: rows of embeddings or gradients to the elements that they travel as, and back.

`wire` is one of config.WIRE_FORMATS. "fp32" is the rows themselves: nothing is copied. The others make bytes: "bf16"
and "fp16" round every element to nearest, ties to even; "int8" counts steps of a size of the row's own.
"""

from __future__ import annotations

from torch import Tensor

from ...config import WIRE_FORMATS
from .. import _row_checks as checks
from . import native, reference
from .formats import wire_dtype, wire_width

__all__ = ["decode_rows", "encode_rows", "wire_dtype", "wire_width"]

OPERATION = "wire_rows"


def encode_rows(rows: Tensor, wire: str, *, implementation: str = "native") -> Tensor:
    """Rows float32 [n, dim] as they travel: `wire_dtype` [n, wire_width]. Synchronous.

    A NaN or infinity stays one with "bf16" and "fp16" (which makes infinities from 65520 on); with "int8" its row
    arrives as NaN throughout. With "int8" the step is max(largest magnitude / 127, 2^-126).

    Args:
        rows: float32 [n, dim], dim >= 1, rows contiguous.
        wire: one of WIRE_FORMATS; "fp32" returns `rows`.
        implementation: "native" or "reference"; the same bits.

    Raises:
        TypeError, ValueError: dtype, shape, strides; an unknown format.
    """
    _check(wire, implementation)
    if rows.is_cpu:
        checks.check_matrix(OPERATION, "rows", rows)
    if wire == "fp32":
        return rows
    chosen = native.encode_rows if implementation == "native" and rows.is_cpu else reference.encode_rows
    return chosen(rows.detach(), wire)


def decode_rows(message: Tensor, dim: int, wire: str, *, implementation: str = "native") -> Tensor:
    """The rows float32 [n, dim] of a message `wire_dtype` [n, wire_width(dim, wire)]; "fp32" returns the message.

    Raises:
        TypeError, ValueError: dtype, shape, strides; an unknown format.
    """
    _check(wire, implementation)
    if message.is_cpu:
        checks.check_matrix(OPERATION, "message", message, wire_dtype(wire))
    if message.shape[1] != wire_width(dim, wire):
        raise ValueError(
            f"{OPERATION}: {wire} rows of {dim} elements take {wire_width(dim, wire)} message elements each, got "
            f"{message.shape[1]}"
        )
    if wire == "fp32":
        return message
    if not message.is_contiguous():
        raise ValueError(f"{OPERATION}: message must be contiguous, got strides {list(message.stride())}")
    chosen = native.decode_rows if implementation == "native" and message.is_cpu else reference.decode_rows
    return chosen(message, dim, wire)


def _check(wire: str, implementation: str) -> None:
    checks.check_implementation(OPERATION, implementation)
    if wire not in WIRE_FORMATS:
        raise ValueError(f"{OPERATION}: unknown format {wire!r}: choose one of {', '.join(WIRE_FORMATS)}")
