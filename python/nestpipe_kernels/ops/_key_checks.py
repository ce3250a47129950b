"""Checks of the arguments that operations on keys share: dtype, shape, device, and the choice of implementation.

Keys may be on the CPU or on a device that has native kernels; arrays of other libraries are taken by DLPack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arrays import as_tensor
from ._kernels import kernels_of

__all__ = ["check_implementation", "check_vector", "key_vector", "pointer", "table_vector"]

MAX_KEYS = 2**31 - 1
IMPLEMENTATIONS = ("native", "reference")


def check_implementation(op: str, implementation: str) -> None:
    """Raise ValueError unless `implementation` is one that `op` has."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: unknown implementation {implementation!r}: choose one of {', '.join(IMPLEMENTATIONS)}")


def check_vector(
    op: str,
    name: str,
    value: Tensor,
    dtypes: tuple[torch.dtype, ...],
    size: int | None = None,
    *,
    keys: Tensor | None = None,
    on_device: bool = False,
) -> Tensor:
    """`value`, once it is known to be a vector of one of `dtypes` (and of `size`); else raise.

    It has to be where `keys` are, or else on the CPU, or (`on_device`) on a device that has kernels.
    """
    value = as_tensor(value)
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a {_names(dtypes)} tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        wanted, got = _names(dtypes), str(value.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must be {wanted}, got {got} (shape {list(value.shape)})")
    if value.dim() != 1:
        raise ValueError(
            f"{op}: {name} must have one dimension, got shape {list(value.shape)}; flatten it with .reshape(-1)"
        )
    if keys is not None:
        if value.device != keys.device:
            raise ValueError(f"{op}: {name} must be on {keys.device}, where the keys are, got {value.device}")
    elif not value.is_cpu and not (on_device and kernels_of(value) is not None):
        raise ValueError(f"{op}: {name} must be on the CPU, got {value.device}; move it with .cpu()")
    if size is not None and value.numel() != size:
        raise ValueError(f"{op}: {name} must have {size} entries, got {value.numel()}")
    return value


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def key_vector(op: str, name: str, keys: Tensor, *, others: Tensor | None = None, on_device: bool = False) -> Tensor:
    """Keys as contiguous int64, where other keys are, if there are any; int32 is widened, nothing is ever narrowed."""
    keys = as_tensor(keys)
    if isinstance(keys, Tensor) and keys.dtype == torch.int32:
        keys = keys.to(torch.int64)
    check_vector(op, name, keys, (torch.int64,), keys=others, on_device=on_device)
    if keys.numel() > MAX_KEYS:
        raise ValueError(f"{op}: {name} must have at most {MAX_KEYS} entries, got {keys.numel()}; split the call")
    return keys.contiguous()


def table_vector(op: str, name: str, tables: Tensor | None, keys: Tensor) -> Tensor | None:
    """Tables of keys as contiguous int32, or None where all keys belong to one table."""
    if tables is None:
        return None
    return check_vector(op, name, tables, (torch.int32,), keys.numel(), keys=keys).contiguous()


def pointer(tensor: Tensor | None) -> int:
    """Address for native code; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
