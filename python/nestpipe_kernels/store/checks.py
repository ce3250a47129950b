"""Checks at the boundary of a store: keys, tables, handles and rows, before anything changes or an address is taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops._arrays import as_tensor
from ..types import UNBOUNDED, DataType, TableSpec

__all__ = [
    "check_batch",
    "check_bounds",
    "check_counts",
    "check_keys",
    "check_spec",
    "check_storage",
    "check_tensor",
    "key_vector",
]

MAX_BATCH = 1 << 62
"""Ages and the next index stay far from overflow."""


def key_vector(operation: str, keys: Tensor, device: torch.device | None = None) -> Tensor:
    """keys as contiguous int64 [n] on the CPU, or on `device`; int32 is widened.

    Raises:
        TypeError: not a tensor of int64 or int32. ValueError: not one-dimensional, or on another device.
    """
    keys = as_tensor(keys)
    if not isinstance(keys, Tensor):
        raise TypeError(f"{operation}: keys must be an int64 tensor, got {type(keys).__name__}: use torch.tensor(keys)")
    shape = list(keys.shape)
    if keys.dtype not in (torch.int64, torch.int32):
        dtype = str(keys.dtype).removeprefix("torch.")
        raise TypeError(
            f"{operation}: keys must be int64, got {dtype} (shape {shape}): make ids int64 where they are read "
            "(floats lose digits of large ids)"
        )
    if keys.dim() != 1:
        raise ValueError(f"{operation}: keys must have shape [n], got {shape}: flatten them with keys.reshape(-1)")
    if device is None and keys.device.type != "cpu":
        raise ValueError(f"{operation}: keys must be on the CPU, got {keys.device}: use keys.cpu()")
    if device is not None and keys.device != device:
        raise ValueError(f"{operation}: keys must be on {device}, got {keys.device}: use keys.to({str(device)!r})")
    return keys.to(torch.int64).contiguous()


def check_tensor(
    operation: str,
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int | None],
    device: torch.device | None = None,
) -> None:
    """A contiguous tensor of this dtype and shape (None: any extent), whose address may go to native code; on the CPU,
    or on `device`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{operation}: {name} must be a tensor, got {type(tensor).__name__}")
    found = tuple(tensor.shape)
    right = len(found) == len(shape) and all(want is None or got == want for got, want in zip(found, shape))
    there = tensor.is_cpu if device is None else tensor.device == device
    if tensor.dtype == dtype and right and tensor.is_contiguous() and there:
        return
    wanted = ", ".join("n" if extent is None else str(extent) for extent in shape)
    kind = "CPU tensor" if device is None else f"tensor on {device}"
    layout = "contiguous" if tensor.is_contiguous() else f"strides {list(tensor.stride())}"
    error = TypeError if tensor.dtype != dtype else ValueError
    raise error(
        f"{operation}: {name} must be a contiguous {kind} of {_short(dtype)} [{wanted}], "
        f"got {_short(tensor.dtype)} {list(found)} on {tensor.device}, {layout}"
    )


def check_keys(operation: str, keys: Tensor, tables: Tensor) -> None:
    """Raises TypeError or ValueError for anything but keys int64 [n] and tables int32 [n]."""
    check_tensor(operation, "keys", keys, torch.int64, (None,))
    check_tensor(operation, "tables", tables, torch.int32, (keys.numel(),))


def check_bounds(operation: str, keys: Tensor, spec: TableSpec) -> None:
    """Raises IndexError for the first key of a fixed table outside [0, num_embeddings)."""
    if spec.num_embeddings == UNBOUNDED or keys.numel() == 0:
        return
    low, high = torch.aminmax(keys)
    if int(low) >= 0 and int(high) < spec.num_embeddings:
        return
    position = int(((keys < 0) | (keys >= spec.num_embeddings)).nonzero()[0])
    raise IndexError(
        f"{operation}: key {int(keys[position])} at position {position} is outside [0, {spec.num_embeddings}) of table "
        f"{spec.name!r}: map ids into the range, or make the table open with num_embeddings=UNBOUNDED"
    )


def check_batch(batch: int) -> None:
    """Raises TypeError or ValueError for an index that no batch can have."""
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise TypeError(f"retrieve: batch must be an integer, got {batch!r}")
    if not -1 <= batch <= MAX_BATCH:
        raise ValueError(f"retrieve: batch must be an index in [0, 2^62], or -1 for none, got {batch}")


def check_counts(counts: Tensor, size: int) -> None:
    """Raises TypeError or ValueError for anything but int64 [size], >= 0."""
    check_tensor("retrieve", "counts", counts, torch.int64, (size,))
    if size and int(counts.min()) < 0:
        position = int((counts < 0).nonzero()[0])
        raise ValueError(f"retrieve: counts must be >= 0, got {int(counts[position])} at position {position}")


def check_spec(spec: TableSpec) -> None:
    """Raises ValueError or TypeError for settings of a table that no store can have."""
    if not isinstance(spec.name, str) or not spec.name:
        raise ValueError(f"store: a table needs a name, got {spec.name!r}")
    for field, value in (("num_embeddings", spec.num_embeddings), ("seed", spec.seed), ("capacity", spec.capacity)):
        if isinstance(value, bool) or not (isinstance(value, int) or (field == "capacity" and value is None)):
            raise TypeError(f"store: {field} of table {spec.name!r} must be an integer, got {value!r}")
    if spec.num_embeddings != UNBOUNDED and spec.num_embeddings < 1:
        raise ValueError(
            f"store: num_embeddings of table {spec.name!r} must be >= 1 or UNBOUNDED ({UNBOUNDED}), "
            f"got {spec.num_embeddings}"
        )
    if spec.capacity is not None and spec.capacity < 0:
        raise ValueError(f"store: capacity of table {spec.name!r} must be >= 0 or None, got {spec.capacity}")


def check_storage(data_type: DataType, stochastic_rounding: bool) -> None:
    """Raises TypeError or ValueError for a storage type or a rounding that no store can have."""
    if not isinstance(data_type, DataType):
        raise TypeError(f"store: data_type must be a DataType, got {data_type!r}: use DataType.BF16, for example")
    if not isinstance(stochastic_rounding, bool):
        raise TypeError(f"store: stochastic_rounding must be True or False, got {stochastic_rounding!r}")
    if stochastic_rounding and data_type is DataType.FP32:
        raise ValueError(
            "store: stochastic_rounding needs data_type FP16 or BF16, got FP32, which the arithmetic is done in"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
