"""What the operations' Triton kernels share: whether they can run here, how wide accesses are, how a launch is made.

triton itself is imported at first use only; the package works without it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .on_device import place

__all__ = ["LAUNCH", "interpreted", "on_device_of", "power_of_two", "row_places", "vector_width", "why_not"]

LAUNCH: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
"""Of every launch. Programs of one warp: bags and rows differ in length, and a warp that is done makes room for the
next. Without fusion, as the rules of exactness have no fused multiply-add."""

WIDEST_ACCESS_BYTES = 16
NOWHERE = -(1 << 62)


@functools.cache
def _import_problem() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}); pip install triton"
    return None


def interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 was set before triton was imported: kernels then run on the CPU, for tests."""
    if _import_problem() is not None:
        return False
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def why_not(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on tensors of `device`; None where they can."""
    problem = _import_problem()
    if problem is None and device.type != "cuda" and not interpreted():
        return f"Triton kernels need tensors of a CUDA device, got {device.type}"
    return problem


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the tensor's device, whatever the current one is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less than `number` >= 1."""
    return 1 << (number - 1).bit_length()


def vector_width(matrices: Sequence[Tensor | None], dim: int) -> int:
    """Elements that one access to a row may take, a power of two: rows, strides and `dim` are multiples of it."""
    width = dim & -dim or 1
    for matrix in matrices:
        if matrix is None:
            continue
        size = matrix.element_size()
        units = (matrix.data_ptr() // size) | (matrix.stride(0) if matrix.shape[0] > 1 else 0)
        width = min(width, WIDEST_ACCESS_BYTES // size, units & -units if units else width)
    return width


def row_places(matrices: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor, int]:
    """Where the rows of matrices lie that one kernel reads, or writes.

    Args:
        matrices: of one dtype, on one device, with contiguous rows; None stands for rows that are not there.
        sizes: rows of each.
        like: a tensor of that device, as many columns.

    Returns:
        The first matrix; int64 [sum of sizes] on the device: how far behind its beginning each row lies, in units of
        as many elements as one access takes, -2^62 for None; that number of elements.
    """
    width, device = vector_width(matrices, like.shape[1]), like.device
    base = next((matrix for matrix in matrices if matrix is not None), like)
    unit = width * base.element_size()
    bases = [NOWHERE if matrix is None else (matrix.data_ptr() - base.data_ptr()) // unit for matrix in matrices]
    steps = [0 if matrix is None or len(matrix) < 2 else matrix.stride(0) // width for matrix in matrices]
    if len(sizes) == 1:
        return base, torch.arange(sizes[0], device=device) * steps[0] + bases[0], width
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    first = [start - number * step for start, number, step in zip(bases, starts, steps)]
    table = place(torch.tensor([first, steps, list(sizes)], dtype=torch.int64), like)
    spread = torch.repeat_interleave(table[:2], table[2], dim=1, output_size=starts[-1])
    return base, spread[0] + torch.arange(starts[-1], device=device) * spread[1], width
