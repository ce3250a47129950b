"""The native kernels of the device that a tensor is on, and what a call of them needs: addresses and a place.

A call enters the current stream of the tensor's device and returns. Its tensors may go at once: their memory belongs to
torch's allocator, which gives it to later work of the same stream, and other streams' use of it is recorded by lanes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _native

__all__ = ["kernels_of", "matrix", "place_of", "work_memory"]


def kernels_of(tensor: Tensor) -> Any:
    """The extension `_cuda` for a tensor on a CUDA device; None where plain PyTorch has to do."""
    return _native.kernels(tensor.device.type)


def place_of(tensor: Tensor) -> tuple[int, int]:
    """(device, its current stream's address), the last argument of every kernel."""
    if tensor.is_cpu:  # CUDA's kernels run there in tests
        return 0, 0
    stream: Any = torch.get_device_module(tensor.device).current_stream(tensor.device)
    return tensor.device.index or 0, stream.cuda_stream


def matrix(rows: Tensor) -> tuple[int, int, int]:
    """(address, rows, stride) of a matrix."""
    return rows.data_ptr(), rows.shape[0], rows.stride(0)


def work_memory(num_bytes: int, like: Tensor) -> Tensor:
    """Memory for a kernel's intermediate results on the device of `like`, contents undefined."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
