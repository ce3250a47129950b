"""Bags (runs of values given by lengths): offsets, selection in any order, and the checks all jagged types share."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bag_positions", "check_bags", "lengths_to_offsets", "offsets_to_lengths", "select_bags"]

_INT32_MAX = 2**31 - 1
_INTEGER_DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)


def lengths_to_offsets(lengths: Tensor, num_values: int | None = None) -> Tensor:
    """Where each bag starts, and the end of the last.

    Args:
        lengths: integer [m].
        num_values: sum of lengths, if known (saves reading it back from the device).

    Returns:
        [m + 1], int64; int32 if lengths are int32 and the total fits in it.
    """
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    if lengths.dtype != torch.int32:
        return offsets
    total = int(offsets[-1]) if num_values is None else num_values
    return offsets.to(torch.int32) if total <= _INT32_MAX else offsets


def offsets_to_lengths(offsets: Tensor) -> Tensor:
    """The length of each bag, [m], from offsets [m + 1]; same dtype."""
    return offsets[1:] - offsets[:-1]


def bag_positions(lengths: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Where the values of chosen bags stand.

    Args:
        lengths: integer [m], the length of each bag.
        indices: int64 [k], bags to take, in this order; repeats are allowed.

    Returns:
        (positions int64 [n], lengths [k]): the positions of the chosen bags' values, bag by bag, and their lengths.

    Raises:
        TypeError: indices are not integers.
        IndexError: an index is outside 0 .. m - 1.
    """
    indices = check_indices("bag_positions", indices, lengths.numel())
    return _positions(lengths, lengths_to_offsets(lengths), indices)


def select_bags(values: Tensor, lengths: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen bags, in the given order.

    Args:
        values: [n, ...], the values of all bags, bag by bag.
        lengths: integer [m], summing to n. From offsets: `offsets[1:] - offsets[:-1]`.
        indices: int64 [k]; repeats are allowed.

    Returns:
        (values, lengths [k]) of the chosen bags; differentiable in values.

    Raises:
        TypeError, IndexError: as `bag_positions`.
        ValueError: lengths do not sum to n.
    """
    checked, _ = check_bags("select_bags", values, None, lengths, None, None)
    assert checked is not None
    positions, chosen = bag_positions(checked, indices)
    return values.index_select(0, positions), chosen


def _positions(lengths: Tensor, offsets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`bag_positions` with offsets at hand and nothing to check."""
    chosen = lengths.index_select(0, indices)
    ends = torch.cumsum(chosen, 0)  # int64, whatever the lengths' dtype
    total = int(ends[-1]) if ends.numel() else 0
    # Position of value j of the result = j + (start of its bag in the source - start of its bag in the result).
    shift = offsets.index_select(0, indices).to(torch.int64) - (ends - chosen)
    positions = torch.repeat_interleave(shift, chosen.to(torch.int64), output_size=total)
    positions += torch.arange(total, device=positions.device)
    return positions, chosen


def check_indices(what: str, indices: Tensor, size: int) -> Tensor:
    """`indices` as int64 [k] after checking that each lies in 0 .. size - 1."""
    if not isinstance(indices, Tensor) or indices.dim() != 1:
        got = list(indices.shape) if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"{what}: indices must be a tensor of shape [k], got {got}")
    if indices.numel() == 0:
        return indices.to(torch.int64)
    if indices.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"{what}: indices must be integers, got {indices.dtype} (shape {list(indices.shape)})")
    indices = indices.to(torch.int64)
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise IndexError(f"{what}: index {wrong} is outside 0 .. {size - 1} ({size} to choose from)")
    return indices


def check_bags(
    what: str, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None, bags: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """Check that lengths and/or offsets describe `values`; returns them as int32 or int64.

    In code that torch.compile traces, shapes and dtypes alone are checked; a lookup checks the numbers when it runs.

    Args:
        what: the name that errors start with.
        values: [n, ...].
        weights: [n, ...] or None.
        lengths: [m] or None. offsets: [m + 1] or None; at least one is given.
        bags: m, if it is known beforehand.

    Raises:
        TypeError: lengths or offsets are not integers.
        ValueError: anything else that does not fit; the message has both numbers.
    """
    for name, tensor in (("values", values), ("weights", weights), ("lengths", lengths), ("offsets", offsets)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{what}: {name} must be a tensor, got {type(tensor).__name__}")
    if values.dim() == 0:
        raise ValueError(f"{what}: values must have shape [n, ...], got a scalar")
    if weights is not None and (weights.dim() == 0 or weights.shape[0] != values.shape[0]):
        raise ValueError(
            f"{what}: weights must have one entry per value ({values.shape[0]}), got shape {list(weights.shape)}"
        )
    if lengths is None and offsets is None:
        raise ValueError(f"{what}: give lengths or offsets, got neither")
    if lengths is not None:
        lengths = _check_lengths(what, lengths, values.shape[0], bags)
    if offsets is not None:
        offsets = _check_offsets(what, offsets, values.shape[0], bags if lengths is None else lengths.numel())
        if lengths is None or torch.compiler.is_dynamo_compiling():
            return lengths, offsets
        if not torch.equal(offsets_to_lengths(offsets).long(), lengths.long()):
            raise ValueError(f"{what}: lengths and offsets disagree; give only one of them")
    return lengths, offsets


def _as_index_dtype(what: str, name: str, tensor: Tensor) -> Tensor:
    if tensor.dim() != 1:
        raise ValueError(f"{what}: {name} must have one dimension, got shape {list(tensor.shape)}")
    if tensor.numel() == 0 and tensor.dtype not in _INTEGER_DTYPES:
        return tensor.to(torch.int64)  # torch.tensor([]) is float32
    if tensor.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"{what}: {name} must be integers, got {tensor.dtype} (shape {list(tensor.shape)})")
    return tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.to(torch.int64)


def _check_lengths(what: str, lengths: Tensor, num_values: int, bags: int | None) -> Tensor:
    lengths = _as_index_dtype(what, "lengths", lengths)
    if bags is not None and lengths.numel() != bags:
        raise ValueError(f"{what}: lengths must have {bags} entries, got {lengths.numel()}")
    if torch.compiler.is_dynamo_compiling():
        return lengths
    if lengths.numel() and int(lengths.min()) < 0:
        at = int(lengths.argmin())
        raise ValueError(f"{what}: lengths must not be negative, got {int(lengths[at])} at position {at}")
    total = int(lengths.sum())
    if total != num_values:
        raise ValueError(f"{what}: lengths sum to {total} but there are {num_values} values")
    return lengths


def _check_offsets(what: str, offsets: Tensor, num_values: int, bags: int | None) -> Tensor:
    offsets = _as_index_dtype(what, "offsets", offsets)
    if offsets.numel() == 0:
        if num_values:
            raise ValueError(f"{what}: offsets are empty but there are {num_values} values")
        offsets = offsets.new_zeros(1)
    if bags is not None and offsets.numel() != bags + 1:
        raise ValueError(f"{what}: offsets must have {bags} + 1 entries, got {offsets.numel()}")
    if torch.compiler.is_dynamo_compiling():
        return offsets
    if int(offsets[0]) != 0:
        raise ValueError(f"{what}: offsets must start at 0, got {int(offsets[0])}")
    falls = torch.nonzero(offsets[1:] < offsets[:-1])
    if falls.numel():
        at = int(falls[0])
        raise ValueError(
            f"{what}: offsets must not decrease, got {int(offsets[at])} then {int(offsets[at + 1])} at position {at}"
        )
    if int(offsets[-1]) != num_values:
        raise ValueError(f"{what}: the last offset must be the number of values ({num_values}), got {int(offsets[-1])}")
    return offsets
