"""Arrays of other libraries (CuPy, NumPy) as tensors, by DLPack: the same memory, nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["as_tensor"]


def as_tensor(value: Any) -> Any:
    """A tensor that shares the memory of an array which speaks DLPack; anything else, tensors too, as it is.

    Work that the array's library has under way is ordered before torch's current stream by the protocol.

    Read-only arrays are taken, too: nothing here writes to keys, lengths or gradients.

    Raises:
        TypeError: an array that cannot be shared: negative strides, a dtype that torch has not, a device that it
            cannot use; says which.
    """
    if isinstance(value, Tensor) or not hasattr(value, "__dlpack__"):
        return value
    try:
        if any(stride < 0 for stride in getattr(value, "strides", None) or ()):  # torch would end the process
            raise ValueError("negative strides")
        return torch.utils.dlpack.from_dlpack(value)
    except (AssertionError, AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        kind = f"{type(value).__module__.partition('.')[0]} array of {getattr(value, 'dtype', 'unknown dtype')}"
        raise TypeError(
            f"a {kind} cannot be used as a tensor ({error}); make a contiguous copy of a dtype that torch has"
        ) from error
