"""Jagged objects of any class with TorchRec's names: taking bags and keys, joining, rebuilding in the same class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.capture.tree import is_keyed_jagged
from nestpipe_kernels.jagged import KeyedJaggedTensor, bag_positions

__all__ = ["join_bags", "make_jagged", "make_keyed", "num_bags", "pair_lengths", "select_samples", "take_keys"]


def make_keyed(cls: type, keys: Sequence[str], values: Tensor, weights: Tensor | None, lengths: Tensor) -> Any:
    """A KeyedJaggedTensor of class `cls` through its public constructor."""
    return cls(keys=list(keys), values=values, weights=weights, lengths=lengths)


def make_jagged(cls: type, values: Tensor, weights: Tensor | None, lengths: Tensor) -> Any:
    """A JaggedTensor of class `cls` through its public constructor."""
    return cls(values=values, weights=weights, lengths=lengths)


def num_bags(features: Any) -> int:
    """Samples of a keyed jagged object (its stride), bags of a jagged one."""
    if is_keyed_jagged(features):
        return int(features.stride())
    return int(features.lengths().numel())


def unsupported(features: Any) -> str | None:
    """Why samples cannot be chosen from this keyed jagged object, or None."""
    if getattr(features, "variable_stride_per_key", lambda: False)():
        return "its keys have different strides"
    if getattr(features, "inverse_indices_or_none", lambda: None)() is not None:
        return "it carries inverse_indices"
    return None


def select_samples(features: Any, indices: Tensor) -> Any:
    """The bags of the given samples, in that order, in an object of the same class that owns its tensors.

    Args:
        features: a keyed jagged or jagged object of B samples.
        indices: int64 [m], checked.
    """
    if isinstance(features, KeyedJaggedTensor):
        return features.select(indices)
    lengths = features.lengths()
    indices = indices.to(lengths.device)
    if not is_keyed_jagged(features):
        positions, lengths = bag_positions(lengths, indices)
        return make_jagged(type(features), *_at(features, positions), lengths)
    keys, stride = list(features.keys()), int(features.stride())
    starts = torch.arange(len(keys), device=indices.device).unsqueeze(1) * stride
    positions, lengths = bag_positions(lengths, (starts + indices).reshape(-1))
    return make_keyed(type(features), keys, *_at(features, positions), lengths)


def take_keys(features: Any, keys: Sequence[str]) -> Any:
    """Some of the features of a keyed jagged object, in the given order. One key's tensors are views."""
    stride, bounds = int(features.stride()), features.offset_per_key()
    places = [list(features.keys()).index(key) for key in keys]

    def take(tensor: Tensor, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        parts = [tensor[start:end] for start, end in zip(starts, ends)]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else tensor[:0]

    starts, ends = [bounds[p] for p in places], [bounds[p + 1] for p in places]
    weights = features.weights_or_none()
    return make_keyed(
        type(features),
        keys,
        take(features.values(), starts, ends),
        None if weights is None else take(weights, starts, ends),
        take(features.lengths(), [p * stride for p in places], [(p + 1) * stride for p in places]),
    )


def join_bags(parts: Sequence[Any]) -> Any:
    """One object with the samples of all parts one after another; keyed parts have the same keys."""
    first = parts[0]
    weights = [part.weights_or_none() for part in parts]
    values = torch.cat([part.values() for part in parts])
    joined_weights = torch.cat(weights) if all(w is not None for w in weights) else None
    lengths = torch.cat([part.lengths() for part in parts])
    if not is_keyed_jagged(first):
        return make_jagged(type(first), values, joined_weights, lengths)
    # The parts' bags stand part by part; wanted is key by key, and within a key part by part.
    num_keys, bags, start = len(first.keys()), [], 0
    for part in parts:
        stride = int(part.stride())
        bags.append((torch.arange(num_keys * stride) + start).view(num_keys, stride))
        start += num_keys * stride
    order = torch.cat(bags, dim=1).reshape(-1).to(lengths.device)
    positions, lengths = bag_positions(lengths, order)
    joined_weights = None if joined_weights is None else joined_weights.index_select(0, positions)
    return make_keyed(type(first), first.keys(), values.index_select(0, positions), joined_weights, lengths)


def pair_lengths(values: Any, offsets: Any, batch_size: int | None) -> Tensor | None:
    """The lengths int64 [B] of a (values, offsets) pair of nn.EmbeddingBag, or None if it is not one.

    A pair is two 1-D integer tensors; offsets ascend from 0 to at most len(values). B offsets are starts (the last
    bag ends with the values, and there are not B values); B + 1 offsets also have the last end.

    Args:
        batch_size: B; None accepts any number of offsets and takes the last one as an end if it is len(values).
    """
    for tensor in (values, offsets):
        if not isinstance(tensor, Tensor) or tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex():
            return None
    count, ends = offsets.numel(), values.numel()
    if count == 0 or torch.bool in (values.dtype, offsets.dtype):
        return None
    if batch_size is not None and count != batch_size + 1 and (count != batch_size or ends == batch_size):
        return None
    if int(offsets[0]) != 0 or int(offsets[-1]) > ends or bool((offsets[1:] < offsets[:-1]).any()):
        return None
    closed = count == batch_size + 1 if batch_size is not None else int(offsets[-1]) == ends
    bounds = offsets if closed else torch.cat([offsets, offsets.new_tensor([ends])])
    return (bounds[1:] - bounds[:-1]).to(torch.int64)


def _at(features: Any, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    weights = features.weights_or_none()
    values = features.values().index_select(0, positions)
    return values, None if weights is None else weights.index_select(0, positions)
