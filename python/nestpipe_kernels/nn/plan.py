"""Turns the features of a call into the lookup that answers it: checks, keys, bags and segments per store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn.layout import Layout, Segment, StoreGroup
from nestpipe_kernels.types import KeyedJaggedLike, LookupCall, PoolingType, StoreKeys

__all__ = ["CallInput", "Samples", "check_ids", "checked_values", "plan_lookup", "read_features"]


@dataclass
class CallInput:
    """The checked input of one call; copies of the caller's tensors, so that later changes do not reach the lookup."""

    keys: list[str]
    values: Tensor
    """int64 [n], key-major: all samples of the first key, then of the second."""
    lengths: Tensor
    """int64 [F, B]."""
    starts: list[int]
    """[F + 1] where each key's values begin."""
    caller_weights: Tensor | None
    """float32 [n], the caller's own tensor: may require a gradient."""
    weights: Tensor | None
    """float32 [n], a detached copy."""

    @property
    def batch_size(self) -> int:
        return self.lengths.size(1)

    def slice_of(self, feature: str) -> slice:
        """Where the values of `feature` stand."""
        row = self.keys.index(feature)
        return slice(self.starts[row], self.starts[row + 1])


def read_features(features: Any, needed: Sequence[str], owner: str, weighted: bool | None) -> CallInput:
    """Check a KeyedJaggedTensor (ours or TorchRec's) and copy what a lookup needs.

    Args:
        features: the caller's input.
        needed: keys that must be there; others are ignored.
        owner: name of the module's class, for messages.
        weighted: whether per-sample weights are required (True), forbidden (False) or ignored (None).

    Raises:
        TypeError: not a KeyedJaggedTensor, tensors of the wrong dtype, or weights with gradients on another device.
        ValueError: missing keys, lengths that do not fit, weights missing or unexpected.
    """
    if type(features) is not KeyedJaggedTensor and not isinstance(features, KeyedJaggedLike):
        raise TypeError(
            f"{owner}: features must be a KeyedJaggedTensor, got {type(features).__name__}; "
            "build one with nk.KeyedJaggedTensor(keys, values, lengths=...)"
        )
    keys = list(features.keys())
    missing = [name for name in needed if name not in keys]
    if missing:
        raise ValueError(f"{owner}: features {missing} are missing from the input, which has {keys}")
    if getattr(features, "variable_stride_per_key", bool)():
        raise ValueError(f"{owner}: a batch size per key is not supported; give every key the same number of samples")
    values = checked_values(features.values(), owner)
    lengths, starts = _checked_lengths(features, len(keys), values.numel(), owner)
    caller_weights = _checked_weights(features, values.numel(), owner, weighted)
    return CallInput(
        keys=keys,
        values=values,
        lengths=lengths,
        starts=starts,
        caller_weights=caller_weights,
        weights=None if caller_weights is None else caller_weights.detach().clone(),
    )


def plan_lookup(
    layout: Layout, batch: CallInput, pooled: bool, owner: str, finish: Callable[[Sequence[Tensor]], Any]
) -> LookupCall:
    """Describe the lookup of a checked input; the order of occurrences is (feature, sample, position) per store.

    Raises:
        IndexError: an id outside a fixed vocabulary; names table, feature, position and value.
    """
    check_ids(layout, batch, owner)
    if pooled:
        output_shapes = [(batch.batch_size, sum(layout.output_dims))]
    else:
        slices = [batch.slice_of(segment.feature) for segment in layout.segments]
        output_shapes = [(where.stop - where.start, dim) for where, dim in zip(slices, layout.output_dims, strict=True)]
    planned = [_plan_store(group, batch) for group in layout.stores]
    signature = [batch.values, batch.lengths]
    if batch.weights is not None:
        signature.append(batch.weights)
    return LookupCall(
        stores=[keys for keys, _, _ in planned],
        output_shapes=output_shapes,
        views=[[(segment.output, segment.column) for segment in group.segments] for group in layout.stores],
        finish=finish,
        weights=batch.caller_weights,
        weight_positions=[positions for _, positions, _ in planned],
        signature=signature,
        samples=Samples([samples for _, _, samples in planned]),
    )


def check_ids(layout: Layout, batch: CallInput, owner: str) -> None:
    """Raise IndexError for an id outside a fixed vocabulary; names table, feature, position and value."""
    fixed = [segment for segment in layout.segments if not segment.config.is_open]
    if not fixed or batch.values.numel() == 0:
        return
    found = batch.values.numpy()  # all features at once: far fewer calls where bags are small
    if int(found.min()) >= 0 and int(found.max()) < min(segment.config.num_embeddings for segment in fixed):
        return
    for segment in fixed:
        _check_range(segment, batch, owner)


class Samples(Sequence[Tensor]):
    """Of each store, the sample of every key; made when asked for: only clustering asks."""

    def __init__(self, makers: Sequence[Callable[[], Tensor]]) -> None:
        self._makers = makers

    @overload
    def __getitem__(self, store: int) -> Tensor: ...
    @overload
    def __getitem__(self, store: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, store: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(store, slice):
            return Samples(self._makers[store])
        return self._makers[store]()

    def __len__(self) -> int:
        return len(self._makers)


def _plan_store(group: StoreGroup, batch: CallInput) -> tuple[StoreKeys, Tensor | None, Callable[[], Tensor]]:
    """The store's keys, where their weights stand, and what gives the sample of each."""
    segments = group.segments
    rows = [batch.keys.index(segment.feature) for segment in segments]
    slices = [slice(batch.starts[row], batch.starts[row + 1]) for row in rows]
    sizes = np.array([where.stop - where.start for where in slices], dtype=np.int64)
    keys = _pick(batch.values, slices)
    # numpy for what is counted here: its calls on small arrays cost a fraction of torch's.
    lengths = batch.lengths.numpy()
    lengths = (lengths if rows == list(range(len(lengths))) else lengths[rows]).reshape(-1)  # [S * B]
    tables = np.array([segment.table_index for segment in segments], dtype=np.int32)
    num_samples = batch.batch_size
    if segments[0].mode is PoolingType.NONE:
        bag_offsets = np.arange(keys.numel() + 1)
        segment_bags = [0, *sizes.cumsum().tolist()]
    else:
        bag_offsets = np.zeros(len(segments) * num_samples + 1, dtype=np.int64)
        np.cumsum(lengths, out=bag_offsets[1:])
        segment_bags = [num_samples * index for index in range(len(segments) + 1)]
    positions = None
    if batch.weights is not None:
        positions = torch.cat([torch.arange(where.start, where.stop) for where in slices])
    store_keys = StoreKeys(
        keys=keys,
        tables=torch.from_numpy(tables.repeat(sizes)),
        bag_offsets=torch.from_numpy(bag_offsets),
        segment_bags=tuple(segment_bags),
        segment_modes=tuple(segment.mode.code for segment in segments),
        weights=None if batch.weights is None else _pick(batch.weights, slices),
        valid=_valid(segments, slices, keys),
    )
    return store_keys, positions, partial(_samples_of, num_samples, len(segments), lengths)


def _samples_of(num_samples: int, num_segments: int, lengths: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.tile(np.arange(num_samples), num_segments).repeat(lengths))


def _pick(values: Tensor, slices: Sequence[slice]) -> Tensor:
    """The slices one after another; `values` itself where they cover it in order."""
    ends = [0, *(where.stop for where in slices)]
    if ends[-1] == values.numel() and all(where.start == end for where, end in zip(slices, ends[:-1], strict=True)):
        return values
    return torch.cat([values[where] for where in slices])


def _valid(segments: Sequence[Segment], slices: Sequence[slice], keys: Tensor) -> Tensor | None:
    """False where a key is its table's padding key; None where no table has one."""
    if all(segment.config.padding_key is None for segment in segments):
        return None
    valid = torch.ones(keys.numel(), dtype=torch.bool)
    start = 0
    for segment, where in zip(segments, slices, strict=True):
        end = start + where.stop - where.start
        padding = segment.config.padding_key
        if padding is not None:
            torch.ne(keys[start:end], padding, out=valid[start:end])
        start = end
    return valid


def _check_range(segment: Segment, batch: CallInput, owner: str) -> None:
    ids = batch.values[batch.slice_of(segment.feature)]
    if ids.numel() == 0:
        return
    size = segment.config.num_embeddings
    found = ids.numpy()
    if int(found.min()) >= 0 and int(found.max()) < size:
        return
    position = int(((ids < 0) | (ids >= size)).nonzero()[0])
    row = batch.lengths[batch.keys.index(segment.feature)]
    sample = int(torch.searchsorted(row.cumsum(0), position, right=True))
    raise IndexError(
        f"{owner}: table {segment.config.name!r}, feature {segment.feature!r}: id {int(ids[position])} at position "
        f"{position} (sample {sample}) is outside [0, {size}); raise num_embeddings, or use UNBOUNDED for any id"
    )


def checked_values(values: Tensor, owner: str) -> Tensor:
    """int64 [n] on the CPU, a copy of one dimension of ids; from an accelerator it waits for that.

    Raises TypeError for another dtype or shape.
    """
    if values.dtype not in (torch.int64, torch.int32) or values.dim() != 1:
        raise TypeError(
            f"{owner}: feature values must be int64 (or int32) [n], got {_describe(values)}; "
            "other types lose digits of keys"
        )
    # By numpy: torch would wake threads for it, which then wait for more, busily, where ours want to work.
    return torch.from_numpy(np.array(values.cpu().numpy(), dtype=np.int64, order="C"))


def _checked_lengths(features: KeyedJaggedLike, num_keys: int, num_values: int, owner: str) -> tuple[Tensor, list[int]]:
    stride = int(features.stride())
    lengths = features.lengths().cpu()
    if lengths.numel() != num_keys * stride:
        raise ValueError(
            f"{owner}: {num_keys} keys with {stride} samples need {num_keys * stride} lengths, got {lengths.numel()}"
        )
    matrix = lengths.to(torch.int64, copy=True, memory_format=torch.contiguous_format).view(num_keys, stride)
    found = matrix.numpy()
    if found.size and int(found.min()) < 0:
        raise ValueError(f"{owner}: lengths must be >= 0, got {int(found.min())}")
    starts = [0, *found.sum(1).cumsum().tolist()]
    if starts[-1] != num_values:
        raise ValueError(f"{owner}: lengths sum to {starts[-1]}, but there are {num_values} values")
    return matrix, starts


def _checked_weights(features: KeyedJaggedLike, num_values: int, owner: str, weighted: bool | None) -> Tensor | None:
    if weighted is None:
        return None
    weights = features.weights_or_none()
    if not weighted:
        if weights is not None:
            raise ValueError(
                f"{owner}: the input has per-sample weights, but is_weighted is False; "
                "construct the collection with is_weighted=True, or leave the weights out"
            )
        return None
    if weights is None:
        raise ValueError(f"{owner}: is_weighted is True, but the input has no per-sample weights")
    if weights.dtype != torch.float32:
        raise TypeError(f"{owner}: per-sample weights must be float32, got {_describe(weights)}")
    if not weights.is_cpu:
        if weights.requires_grad:
            raise TypeError(
                f"{owner}: per-sample weights that require a gradient must be on the CPU, got {weights.device}; move "
                "them with .cpu(), which passes gradients on"
            )
        weights = weights.cpu()
    if weights.dim() != 1 or weights.numel() != num_values:
        raise ValueError(f"{owner}: {num_values} values need as many weights, got {_describe(weights)}")
    return weights


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} (shape {list(tensor.shape)})"
