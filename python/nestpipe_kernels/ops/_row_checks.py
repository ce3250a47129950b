"""Checks and pointers that the operations on rows share; messages say what, expected, got and what to do."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "check_implementation",
    "check_index",
    "check_matrix",
    "check_row_index",
    "contiguous_rows",
    "describe",
    "device_of",
    "pointer",
]


def describe(tensor: object) -> str:
    """`float32 on cpu (shape [3, 4])`, or the type's name for what is no tensor."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type} (shape {list(tensor.shape)})"


def device_of(tensor: object) -> torch.device | None:
    """The accelerator that a tensor is on; None for the CPU, and for what is no tensor."""
    return tensor.device if isinstance(tensor, Tensor) and not tensor.is_cpu else None


def check_implementation(operation: str, implementation: str) -> None:
    """ValueError unless native or reference."""
    if implementation not in ("native", "reference"):
        raise ValueError(f"{operation}: unknown implementation {implementation!r}: choose native or reference")


def check_matrix(
    operation: str,
    name: str,
    tensor: Tensor,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> None:
    """TypeError or ValueError unless `tensor` is a matrix of `dtype` on the CPU (or `device`), its rows contiguous."""
    here = isinstance(tensor, Tensor) and (tensor.is_cpu if device is None else tensor.device == device)
    if not here or tensor.dtype != dtype:
        wanted = str(dtype).removeprefix("torch.")
        place = "CPU tensor" if device is None else f"tensor on {device}"
        raise TypeError(f"{operation}: {name} must be a {wanted} {place}, got {describe(tensor)}")
    if tensor.dim() != 2:
        raise ValueError(f"{operation}: {name} must have 2 dimensions, got {describe(tensor)}")
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(
            f"{operation}: {name} must be contiguous along its last dimension, got strides {list(tensor.stride())}; "
            "call .contiguous()"
        )


def check_index(operation: str, name: str, tensor: Tensor, size: int | None = None) -> None:
    """TypeError or ValueError unless `tensor` is a contiguous CPU int64 vector (of `size` entries)."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64 or not tensor.is_cpu:
        raise TypeError(f"{operation}: {name} must be an int64 CPU tensor, got {describe(tensor)}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{operation}: {name} must be a contiguous vector, got {describe(tensor)}")
    if size is not None and tensor.numel() != size:
        raise ValueError(f"{operation}: {name} must have {size} entries, got {tensor.numel()}")


def check_row_index(operation: str, name: str, index: Tensor, num_rows: int, *, distinct: bool = False) -> None:
    """IndexError unless 0 <= index < num_rows; ValueError if rows repeat. For references; native code checks alike."""
    bad = ((index < 0) | (index >= num_rows)).nonzero()
    if bad.numel():
        position = int(bad[0])
        value = int(index[position])
        raise IndexError(f"{operation}: {name} must lie in [0, {num_rows}), got {value} at position {position}")
    if not distinct:
        return
    seen: set[int] = set()
    for position, row in enumerate(index.tolist()):
        if row in seen:
            raise ValueError(f"{operation}: {name} must be distinct, got row {row} again at position {position}")
        seen.add(row)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor itself if its rows are contiguous, else a contiguous copy (of an expanded gradient, say)."""
    return tensor if tensor.shape[1] <= 1 or tensor.stride(1) == 1 else tensor.contiguous()


def pointer(tensor: Tensor | None) -> int:
    """Address of the first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
