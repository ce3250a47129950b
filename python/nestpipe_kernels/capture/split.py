"""Splitting a batch into micro-batches that take given samples, in a given order, and own all their tensors.

Rules, applied recursively through containers (see `tree.children`):
- a tensor or array whose dim 0 is the batch size is selected along dim 0; 0-dim ones are copied whole;
- a KeyedJaggedTensor (stride = batch size) or JaggedTensor is selected bag by bag, a KeyedTensor row by row;
- a 2-tuple or 2-list of 1-D integer tensors (values, offsets) is a set of bags, see `bags.pair_lengths`;
- a list or tuple of as many plain numbers or strings as there are samples is taken per sample;
- an int named `batch_size` (key or attribute) that equals the batch size becomes the micro-batch's size;
- other scalars, strings and None are passed as they are; anything else is an error that names its path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.capture.bags import num_bags, pair_lengths, select_samples, unsupported
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
from nestpipe_kernels.jagged import bag_positions

__all__ = ["SplitBatch", "batch_size_of", "check_size", "split"]

SplitBatch = Callable[[Any, list[Tensor]], list[Any]]
"""A user's own `split_batch(batch, indices) -> one micro-batch per entry of indices`."""

_REMEDY = "pass split_batch= (a function `(batch, indices) -> list of micro-batches`)"


def batch_size_of(batch: Any) -> int:
    """Number of samples in a batch.

    The first of these that exists: an int named `batch_size` (key or attribute of the batch itself); the stride of the
    first KeyedJaggedTensor; the number of bags of the first JaggedTensor if it comes before any tensor; dim 0 of the
    first tensor or array, in traversal order, that is not part of a (values, offsets) pair; the bags of the first pair.

    Raises:
        ValueError: the batch holds nothing that has a size.
    """
    for step, child in children(batch) or ():
        if step.name == "batch_size" and type(child) is int:
            return child
    if not isinstance(batch, dict) and type(getattr(batch, "batch_size", None)) is int:
        return int(batch.batch_size)
    plain: int | None = None
    pair: int | None = None
    looks_plain: list[tuple[Path, Tensor, Tensor]] = []
    rows: list[tuple[Path, int]] = []
    inside_pairs: list[Path] = []
    for path, value in walk(batch, _cycle):
        if is_keyed_jagged(value):
            return num_bags(value)
        if path[:-1] in inside_pairs:
            continue
        if _is_pair_shaped(value) and value[0].shape != value[1].shape:
            lengths = pair_lengths(value[0], value[1], None)
            if lengths is not None:
                inside_pairs.append(path)
                pair = lengths.numel() if pair is None else pair
        elif _is_pair_shaped(value):
            looks_plain.append((path, value[0], value[1]))
        if plain is None and is_jagged(value):
            plain = num_bags(value)
        if plain is None and isinstance(value, Tensor | np.ndarray) and value.ndim > 0:
            plain = int(value.shape[0])
        if isinstance(value, Tensor | np.ndarray) and value.ndim > 0:
            rows.append((path, int(value.shape[0])))
    plain = _size_of_others(looks_plain, rows, plain)
    size = plain if plain is not None else pair
    if size is None:
        raise ValueError(
            f"batch_size_of: expected a batch with a tensor of at least one dimension or a KeyedJaggedTensor, got "
            f"{type(batch).__name__} without any; return tensors from the loader, or give the batch an int `batch_size`"
        )
    return size


def _size_of_others(pairs: Sequence[tuple[Path, Tensor, Tensor]], rows: Sequence[tuple[Path, int]], plain: Any) -> Any:
    """What the batch's other tensors say where two of one length may be columns of samples or (values, offsets) with as
    many values as samples + 1: the size, if all others have it and the offsets fit; else `plain`."""
    inside = [path for path, _, _ in pairs]
    others = {count for path, count in rows if path[:-1] not in inside}
    if len(others) != 1:
        return plain
    (size,) = others
    fits = [pair_lengths(values, offsets, size) is not None for _, values, offsets in pairs if len(offsets) == size + 1]
    return size if fits and all(fits) else plain


def check_size(batch: Any, size: int) -> None:
    """Where a function splits batches, that nothing in one contradicts its size.

    Raises:
        ValueError: tensors have different numbers of rows, and neither an int `batch_size` nor a KeyedJaggedTensor says
            which of them are samples.
    """
    named = any(step.name == "batch_size" and type(child) is int for step, child in children(batch) or ())
    if named or (not isinstance(batch, dict) and type(getattr(batch, "batch_size", None)) is int):
        return
    found: dict[str, int] = {}
    for path, value in walk(batch, _cycle):
        if is_keyed_jagged(value):
            return
        if isinstance(value, Tensor | np.ndarray) and value.ndim > 0:
            found[format_path(path)] = int(value.shape[0])
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{name} has {count}" for name, count in list(found.items())[:4])
        raise ValueError(
            f"split: with split_batch the number of samples must be certain, but tensors have different numbers "
            f"of rows ({shown}); put an int `batch_size` into the batch ({size} would be taken)"
        )


def split(batch: Any, indices: Sequence[Tensor], split_batch: SplitBatch | None = None) -> list[Any]:
    """Micro-batches that take the given samples in the given order; no tensor of theirs shares memory with the batch.

    Args:
        batch: anything the module's rules cover, B samples.
        indices: int64 [n_i] each, samples 0 .. B - 1; repeats and empty entries are allowed.
        split_batch: does the splitting instead of the rules (its result is only counted).

    Returns:
        One micro-batch per entry of `indices`, of the batch's own type.

    Raises:
        TypeError, IndexError: bad indices.
        ValueError: a part of the batch cannot be split; names its path, its shape and the remedy.
    """
    size = batch_size_of(batch)
    for place, index in enumerate(indices):
        _check_index(place, index, size)
    if split_batch is not None:
        parts = split_batch(batch, list(indices))
        if not isinstance(parts, list | tuple) or len(parts) != len(indices):
            got = f"{len(parts)} micro-batches" if isinstance(parts, list | tuple) else type(parts).__name__
            raise ValueError(f"split: split_batch must return a list of {len(indices)} micro-batches, got {got}")
        return list(parts)
    for _ in walk(batch, _cycle):
        pass
    return [_take(batch, index, size, ()) for index in indices]


def _check_index(place: int, index: Any, size: int) -> None:
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
        got = f"{index.dtype} of shape {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"split: indices[{place}] must be an int64 tensor of shape [n], got {got}")
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
        wrong = int(index.min()) if int(index.min()) < 0 else int(index.max())
        raise IndexError(f"split: indices[{place}] has sample {wrong}, but the batch has samples 0 .. {size - 1}")


def _take(value: Any, index: Tensor, size: int, path: Path) -> Any:
    if isinstance(value, Tensor):
        return _take_tensor(value, index, size, path)
    if isinstance(value, np.ndarray):
        return _take_array(value, index, size, path)
    if is_keyed_jagged(value) or is_jagged(value):
        return _take_bags(value, index, size, path)
    if is_keyed_tensor(value):
        values = _take_tensor(value.values(), index, size, path)
        return type(value)(keys=list(value.keys()), length_per_key=list(value.length_per_key()), values=values)
    if _is_pair_shaped(value):
        lengths = pair_lengths(value[0], value[1], size)
        if lengths is not None:
            return _take_pair(value, lengths, index, size)
    if _is_per_sample(value, size):
        return type(value)([value[i] for i in index.tolist()])
    parts = children(value)
    if parts is None:
        return _pass(value, path)
    taken = [
        index.numel()
        if step.name == "batch_size" and type(child) is int and child == size
        else _take(child, index, size, (*path, step))
        for step, child in parts
    ]
    return rebuild(value, taken)


def _take_tensor(value: Tensor, index: Tensor, size: int, path: Path) -> Tensor:
    if value.dim() == 0:
        return value.clone()
    if value.is_nested or value.shape[0] != size:
        raise _mismatch("tensor", "nested" if value.is_nested else list(value.shape), size, path)
    return value.index_select(0, index.to(value.device))


def _take_array(value: np.ndarray[Any, Any], index: Tensor, size: int, path: Path) -> np.ndarray[Any, Any]:
    if value.ndim == 0:
        return value.copy()
    if value.shape[0] != size:
        raise _mismatch("numpy array", list(value.shape), size, path)
    return np.take(value, index.cpu().numpy(), axis=0)


def _take_bags(value: Any, index: Tensor, size: int, path: Path) -> Any:
    reason = unsupported(value) if is_keyed_jagged(value) else None
    if reason is not None:
        raise ValueError(f"split: {format_path(path)} ({type(value).__name__}) cannot be split: {reason}; {_REMEDY}")
    if num_bags(value) != size:
        what = "stride" if is_keyed_jagged(value) else "number of bags"
        raise ValueError(
            f"split: {format_path(path)} ({type(value).__name__}) must have {what} {size}, the batch size, got "
            f"{num_bags(value)}; {_REMEDY}"
        )
    return select_samples(value, index)


def _take_pair(pair: Any, lengths: Tensor, index: Tensor, size: int) -> Any:
    values, offsets = pair
    positions, chosen = bag_positions(lengths, index.to(lengths.device))
    bounds = torch.zeros(chosen.numel() + 1, dtype=torch.int64, device=chosen.device)
    torch.cumsum(chosen, 0, out=bounds[1:])
    bounds = bounds.to(offsets.dtype)
    if offsets.numel() == size:
        bounds = bounds[:-1].clone()
    return type(pair)([values.index_select(0, positions), bounds])


def _pass(value: Any, path: Path) -> Any:
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        raise ValueError(
            f"split: {format_path(path)} is a {type(value).__name__}, which cannot be split into micro-batches; "
            f"expected a tensor, an array or a container of them; convert it in the loader, or {_REMEDY}"
        )
    return value


def _is_pair_shaped(value: Any) -> bool:
    return type(value) in (tuple, list) and len(value) == 2 and all(isinstance(part, Tensor) for part in value)


def _is_per_sample(value: Any, size: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and not is_namedtuple(value)
        and len(value) == size
        and all(isinstance(item, str | bytes | int | float) for item in value)
    )


def _mismatch(kind: str, shape: Any, size: int, path: Path) -> ValueError:
    return ValueError(
        f"split: {format_path(path)} is a {kind} {shape}, but dim 0 of every {kind} in a batch must be the "
        f"batch size, {size}; {_REMEDY}"
    )


def _cycle(path: Path) -> ValueError:
    return ValueError(f"split: {format_path(path)} contains itself; expected a tree of containers; {_REMEDY}")
