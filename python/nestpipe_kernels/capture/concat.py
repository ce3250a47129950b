"""Joining batches of one kind into a larger one: what splitting takes apart, by the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.capture.bags import join_bags, pair_lengths
from nestpipe_kernels.capture.split import batch_size_of
from nestpipe_kernels.capture.tree import (
    Path,
    children,
    format_path,
    is_jagged,
    is_keyed_jagged,
    is_keyed_tensor,
    is_namedtuple,
    rebuild,
    walk,
)

__all__ = ["concat"]

_REMEDY = "give all batches the same structure, or join them yourself, in a loader that wraps this one"


def concat(batches: Sequence[Any]) -> Any:
    """One batch with the samples of all, in order; a single batch is returned as it is.

    Tensors and arrays are joined along dim 0; jagged objects and (values, offsets) pairs bag by bag; lists and tuples
    of one number or string per sample one after the other; an int named `batch_size` becomes the sum. Other leaves, and
    0-dim tensors, must be the same in all batches.

    Args:
        batches: at least one, of the same type and structure.

    Raises:
        ValueError: no batches, or parts that cannot be joined; names the path and the remedy.
    """
    if not batches:
        raise ValueError("concat: expected at least one batch, got none")
    if len(batches) == 1:
        return batches[0]
    for batch in batches:
        for _ in walk(batch, _cycle):
            pass
    return _join(list(batches), [batch_size_of(batch) for batch in batches], ())


def _join(parts: list[Any], sizes: list[int], path: Path) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
        raise _refusal(path, f"is of different types ({kinds})")
    if isinstance(first, Tensor | np.ndarray):
        return _join_arrays(parts, sizes, path)
    if is_keyed_jagged(first) or is_jagged(first):
        if is_keyed_jagged(first) and any(list(part.keys()) != list(first.keys()) for part in parts):
            raise _refusal(path, "has different keys")
        if any((part.weights_or_none() is None) is not (first.weights_or_none() is None) for part in parts):
            raise _refusal(path, "has weights in some batches only")
        return join_bags(parts)
    if is_keyed_tensor(first):
        if any(list(part.keys()) != list(first.keys()) for part in parts):
            raise _refusal(path, "has different keys")
        values = torch.cat([part.values() for part in parts])
        return type(first)(keys=list(first.keys()), length_per_key=list(first.length_per_key()), values=values)
    if _are_pairs(parts):
        lengths = [pair_lengths(part[0], part[1], size) for part, size in zip(parts, sizes)]
        if any(one is not None for one in lengths):  # then those are, too, that have as many values as starts
            lengths = [_lengths_of_starts(part) if one is None else one for part, one in zip(parts, lengths)]
        found = [one for one in lengths if one is not None]
        if len(found) == len(parts) and [len(one) for one in found] == sizes:
            return _join_pairs(parts, found)
    if _per_sample(parts, sizes):
        return type(first)([item for part in parts for item in part])
    return _join_children(parts, sizes, path)


def _join_children(parts: list[Any], sizes: list[int], path: Path) -> Any:
    found = [children(part) for part in parts]
    first = found[0]
    if first is None:
        if all(part is parts[0] or part == parts[0] for part in parts):
            return parts[0]
        raise _refusal(path, f"is a {type(parts[0]).__name__} that differs ({parts[0]!r}, {parts[-1]!r})")
    names = [[step for step, _ in one or ()] for one in found]
    if any(one != names[0] for one in names):
        raise _refusal(path, "has different parts")
    joined = []
    for k, (step, child) in enumerate(first):
        of_all = [one[k][1] for one in found if one is not None]
        if step.name == "batch_size" and type(child) is int and of_all == sizes:
            joined.append(sum(sizes))
        else:
            joined.append(_join(of_all, sizes, (*path, step)))
    return rebuild(parts[0], joined)


def _join_arrays(parts: list[Any], sizes: list[int], path: Path) -> Any:
    if all(part.ndim == 0 for part in parts):
        if any(part != parts[0] for part in parts):
            raise _refusal(path, "is a number that differs")
        return parts[0]
    for part, size in zip(parts, sizes):
        if part.ndim == 0 or part.shape[0] != size:
            raise _refusal(path, f"has shape {list(part.shape)} in a batch of {size} samples")
    if any(part.shape[1:] != parts[0].shape[1:] or part.dtype != parts[0].dtype for part in parts):
        shapes = " and ".join(str(f"{part.dtype} {list(part.shape)}") for part in (parts[0], parts[-1]))
        raise _refusal(path, f"has different shapes ({shapes}), which only padding to one length would join")
    return torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)


def _join_pairs(parts: list[Any], lengths: list[Tensor]) -> Any:
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    first = parts[0]
    if first[1].numel() == lengths[0].numel():  # starts alone
        bounds = bounds[:-1].clone()
    values = [part[0][: int(one.sum())] for part, one in zip(parts, lengths)]  # what follows the last end is no one's
    return type(first)([torch.cat(values), bounds.to(first[1].dtype)])


def _lengths_of_starts(pair: Any) -> Tensor | None:
    values, starts = pair
    if starts.dim() != 1:
        return None
    return pair_lengths(values, torch.cat([starts, starts.new_tensor([values.numel()])]), starts.numel())


def _are_pairs(parts: list[Any]) -> bool:
    return all(
        type(part) in (tuple, list) and len(part) == 2 and all(isinstance(item, Tensor) for item in part)
        for part in parts
    )


def _per_sample(parts: list[Any], sizes: list[int]) -> bool:
    plain = (str, bytes, int, float)
    return all(
        isinstance(part, list | tuple)
        and not is_namedtuple(part)
        and len(part) == size
        and all(isinstance(item, plain) for item in part)
        for part, size in zip(parts, sizes)
    )


def _refusal(path: Path, what: str) -> ValueError:
    return ValueError(f"concat: {format_path(path)} {what}, so the batches of a window cannot be joined; {_REMEDY}")


def _cycle(path: Path) -> ValueError:
    return ValueError(f"concat: {format_path(path)} contains itself; {_REMEDY}")
