"""KeyedJaggedTensor: a batch of bags of keys for several features, TorchRec's names, and selection of samples.

Key-major: lengths [F * B] hold feature 0 of samples 0 .. B-1, then feature 1, and so on; values follow the same order.
Values keep their dtype always, whatever the dtype of lengths and offsets. What is made here from a checked object
(split, permute, select, moves) is not checked again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.jagged.bags import (
    _positions,
    check_bags,
    check_indices,
    lengths_to_offsets,
    offsets_to_lengths,
)
from nestpipe_kernels.jagged.jagged_tensor import JaggedTensor
from nestpipe_kernels.ops._arrays import as_tensor

__all__ = ["KeyedJaggedTensor"]


class KeyedJaggedTensor:
    """Bags of F features for B samples. Arrays of other libraries are taken as tensors, by DLPack.

    Args:
        keys: F feature names, distinct.
        values: [n], usually int64 or int32 ids.
        weights: [n] or None.
        lengths: integer [F * B], key-major, summing to n.
        offsets: integer [F * B + 1], from 0 to n; give lengths, offsets or both.
        stride: B; follows from the lengths if there are keys.

    Raises:
        TypeError: lengths or offsets are not integers.
        ValueError: what is given does not fit together (both numbers are named), or a key is repeated. The check reads
            lengths, so it waits for them if they are on a device.
    """

    _keys: list[str]
    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None
    _stride: int
    _offset_per_key: list[int] | None

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        keys = _check_keys(keys)
        values, weights, lengths, offsets = map(as_tensor, (values, weights, lengths, offsets))
        if stride is None:
            stride = _infer_stride(len(keys), lengths, offsets)
        elif stride < 0:
            raise ValueError(f"KeyedJaggedTensor: stride must be >= 0, got {stride}")
        bags = len(keys) * stride
        what = "KeyedJaggedTensor"
        if not torch.compiler.is_dynamo_compiling():  # which would compile anew for every stride that it writes down
            what += f" ({len(keys)} keys x {stride} samples)"
        lengths, offsets = check_bags(what, values, weights, lengths, offsets, bags)
        self._set(keys, values, weights, lengths, offsets, stride)

    def _set(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int,
    ) -> KeyedJaggedTensor:
        self._keys, self._values, self._weights, self._stride = keys, values, weights, stride
        self._lengths, self._offsets, self._offset_per_key = lengths, offsets, None
        return self

    @staticmethod
    def _unchecked(
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int,
    ) -> KeyedJaggedTensor:
        made = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
        return made._set(keys, values, weights, lengths, offsets, stride)

    # ------------------------------------------------------------------------------------------------ making

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None, stride: int | None = None
    ) -> KeyedJaggedTensor:
        """From lengths [F * B], with the positions of each key known at once. Raises as the constructor."""
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=stride).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None, stride: int | None = None
    ) -> KeyedJaggedTensor:
        """From offsets [F * B + 1], with the positions of each key known at once. Raises as the constructor."""
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=stride).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """From one JaggedTensor per feature, all with the same number of samples and all or none with weights.

        Raises:
            ValueError: numbers of samples differ, or only some have weights.
        """
        if not jt_dict:
            raise ValueError("KeyedJaggedTensor.from_jt_dict: got an empty dict")
        samples = {key: jt.lengths().numel() for key, jt in jt_dict.items()}
        if len(set(samples.values())) > 1:
            raise ValueError(f"KeyedJaggedTensor.from_jt_dict: numbers of samples differ between features: {samples}")
        parts = list(jt_dict.values())
        weights = _cat_weights("from_jt_dict", [jt.weights_or_none() for jt in parts])
        values, lengths = torch.cat([jt.values() for jt in parts]), torch.cat([jt.lengths() for jt in parts])
        stride = next(iter(samples.values()))
        return KeyedJaggedTensor(list(jt_dict), values, weights, lengths=lengths, stride=stride).sync()

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The features of all, for the same samples.

        Raises:
            ValueError: nothing to join, different numbers of samples, a key twice, or only some have weights.
        """
        if not kjt_list:
            raise ValueError("KeyedJaggedTensor.concat: got an empty list")
        strides = [kjt.stride() for kjt in kjt_list]
        if len(set(strides)) > 1:
            raise ValueError(f"KeyedJaggedTensor.concat: numbers of samples differ: {strides}")
        weights = _cat_weights("concat", [kjt.weights_or_none() for kjt in kjt_list])
        return KeyedJaggedTensor(
            [key for kjt in kjt_list for key in kjt._keys],
            torch.cat([kjt.values() for kjt in kjt_list]),
            weights,
            lengths=torch.cat([kjt.lengths() for kjt in kjt_list]),
            stride=strides[0],
        )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """No keys, no samples, no values. Values are float32 unless `values_dtype` says otherwise, as in TorchRec."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return KeyedJaggedTensor(
            [], values, weights, lengths=torch.empty(0, dtype=lengths_dtype, device=device), stride=0
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | None = None) -> KeyedJaggedTensor:
        """No keys and no values, with the dtypes and stride of `kjt`, on its device or on `device`."""
        target = kjt.device() if device is None else device
        weights = kjt.weights_or_none()
        return KeyedJaggedTensor(
            [],
            torch.empty(0, dtype=kjt.values().dtype, device=target),
            None if weights is None else torch.empty(0, dtype=weights.dtype, device=target),
            lengths=torch.empty(0, dtype=kjt.lengths().dtype, device=target),
            stride=kjt.stride(),
        )

    # ----------------------------------------------------------------------------------------------- reading

    def keys(self) -> list[str]:
        """[F] names."""
        return self._keys

    def values(self) -> Tensor:
        """[n]"""
        return self._values

    def weights(self) -> Tensor:
        """[n]. Raises ValueError where there are none."""
        if self._weights is None:
            raise ValueError("this KeyedJaggedTensor has no weights; ask weights_or_none()")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """[n] or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """int32 or int64 [F * B], key-major."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = offsets_to_lengths(self._offsets)
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Lengths if they were given or asked for before."""
        return self._lengths

    def offsets(self) -> Tensor:
        """int32 or int64 [F * B + 1]."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = lengths_to_offsets(self._lengths, self._values.shape[0])
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Offsets if they were given or asked for before."""
        return self._offsets

    def stride(self) -> int:
        """B, the number of samples."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """[F] times B: every feature has the same samples."""
        return [self._stride] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """False: every feature has the same samples."""
        return False

    def inverse_indices_or_none(self) -> None:
        """None: samples are not deduplicated."""
        return

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def offset_per_key(self) -> list[int]:
        """[F + 1] where each feature's values start. Waits for the lengths the first time; then kept."""
        if self._offset_per_key is None:
            if self._stride:
                self._offset_per_key = self.offsets()[:: self._stride].tolist()
            else:
                self._offset_per_key = [0] * (len(self._keys) + 1)
        return self._offset_per_key

    def length_per_key(self) -> list[int]:
        """[F] number of values of each feature. Waits for the lengths the first time."""
        bounds = self.offset_per_key()
        return [end - start for start, end in itertools.pairwise(bounds)]

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        return {key: i for i, key in enumerate(self._keys)}

    def sync(self) -> KeyedJaggedTensor:
        """Compute what `length_per_key` and `offset_per_key` return; returns self."""
        self.offset_per_key()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Forget what `sync` computed; returns self."""
        self._offset_per_key = None
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one feature (views). Raises KeyError naming the keys there are."""
        if key not in self._keys:
            raise KeyError(f"KeyedJaggedTensor has no key {key!r}; it has {self._keys}")
        return self._feature(self._keys.index(key))

    def to_dict(self) -> dict[str, JaggedTensor]:
        """The bags of every feature (views)."""
        return {key: self._feature(i) for i, key in enumerate(self._keys)}

    def _feature(self, i: int) -> JaggedTensor:
        start, end = self.offset_per_key()[i : i + 2]
        lengths = self.lengths()[i * self._stride : (i + 1) * self._stride]
        weights = None if self._weights is None else self._weights[start:end]
        return JaggedTensor._unchecked(self._values[start:end], weights, lengths, None)

    # ------------------------------------------------------------------------------------------- rearranging

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Consecutive groups of features: `segments[i]` of them in part i (views).

        Raises:
            ValueError: a segment is negative or they do not sum to the number of keys.
        """
        if any(segment < 0 for segment in segments) or sum(segments) != len(self._keys):
            raise ValueError(
                f"KeyedJaggedTensor.split: segments must be >= 0 and sum to the {len(self._keys)} keys, got "
                f"{list(segments)} (sum {sum(segments)})"
            )
        bounds = self.offset_per_key()
        parts, first = [], 0
        for segment in segments:
            last = first + segment
            start, end = bounds[first], bounds[last]
            weights = None if self._weights is None else self._weights[start:end]
            lengths = self.lengths()[first * self._stride : last * self._stride]
            part = self._unchecked(
                self._keys[first:last], self._values[start:end], weights, lengths, None, self._stride
            )
            part._offset_per_key = [bound - start for bound in bounds[first : last + 1]]
            parts.append(part)
            first = last
        return parts

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """The features at `indices`, in that order; repeats are allowed (then `[key]` is any of the equal ones).

        `indices_tensor` is accepted for TorchRec's signature and not needed.

        Raises:
            IndexError: an index is not one of the keys' positions.
        """
        order = check_indices("KeyedJaggedTensor.permute", torch.tensor(list(indices)), len(self._keys)).tolist()
        bounds = self.offset_per_key()
        pieces = [slice(bounds[i], bounds[i + 1]) for i in order]
        lengths = self.lengths().view(len(self._keys), self._stride)
        return self._unchecked(
            [self._keys[i] for i in order],
            torch.cat([self._values[piece] for piece in pieces]) if pieces else self._values[:0],
            None
            if self._weights is None
            else (torch.cat([self._weights[piece] for piece in pieces]) if pieces else self._weights[:0]),
            lengths[order].reshape(-1),
            None,
            self._stride,
        )

    def select(self, indices: Tensor) -> KeyedJaggedTensor:
        """Samples by number: the bags of every feature, and their weights, in the given order.

        Args:
            indices: int64 [m], samples 0 .. B - 1 in any order; repeats are allowed.

        Returns:
            A KeyedJaggedTensor of m samples with the same keys and dtypes; differentiable in the weights.

        Raises:
            TypeError: indices are not integers. IndexError: no such sample.
        """
        indices = check_indices("KeyedJaggedTensor.select", indices, self._stride).to(self.device())
        features = torch.arange(len(self._keys), device=self.device()).unsqueeze(1)
        bags = (features * self._stride + indices).reshape(-1)
        positions, lengths = _positions(self.lengths(), self.offsets(), bags)
        weights = None if self._weights is None else self._weights.index_select(0, positions)
        values = self._values.index_select(0, positions)
        return self._unchecked(list(self._keys), values, weights, lengths, None, indices.numel())

    # ------------------------------------------------------------------------------------------------ moving

    def to(
        self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """A copy on `device`; `dtype` changes the weights only, never the ids."""
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    def pin_memory(self) -> KeyedJaggedTensor:
        """A copy in pinned memory; on a machine without an accelerator, where there is none, the object itself."""
        return self._map(lambda tensor: tensor.pin_memory()) if torch.accelerator.is_available() else self

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of every tensor until work queued on `stream` is done."""
        for tensor in (self._values, self._weights, self._lengths, self._offsets):
            if tensor is not None:
                tensor.record_stream(stream)

    def _map(self, function: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
        weights, lengths, offsets = (
            None if t is None else function(t) for t in (self._weights, self._lengths, self._offsets)
        )
        made = self._unchecked(list(self._keys), function(self._values), weights, lengths, offsets, self._stride)
        made._offset_per_key = self._offset_per_key
        return made

    def __repr__(self) -> str:
        if self._values.numel() > 1000:
            return f"KeyedJaggedTensor({self._keys}, {self._stride} samples, {self._values.shape[0]} values)"
        rows = (f"{key!r}: {[row.tolist() for row in self[key].to_dense()]}" for key in self._keys)
        return f"KeyedJaggedTensor({{{', '.join(rows)}}})"


def _check_keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str):
        raise TypeError(f"KeyedJaggedTensor: keys must be a list of names, got the string {keys!r}")
    names = list(keys)
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"KeyedJaggedTensor: keys must be distinct, got {repeated} more than once")
    return names


def _infer_stride(num_keys: int, lengths: Tensor | None, offsets: Tensor | None) -> int:
    """B from the number of bags; the shapes are checked here only as far as that takes."""
    if isinstance(lengths, Tensor):
        bags, name = lengths.numel(), "lengths"
    elif isinstance(offsets, Tensor):
        bags, name = max(offsets.numel() - 1, 0), "offsets - 1"
    else:
        return 0
    if num_keys == 0:
        if bags:
            raise ValueError(f"KeyedJaggedTensor: there are no keys but {bags} {name}")
        return 0
    if bags % num_keys:
        raise ValueError(
            f"KeyedJaggedTensor: the number of {name} must be a multiple of the {num_keys} keys (one per key and "
            f"sample), got {bags}"
        )
    return bags // num_keys


def _cat_weights(name: str, weights: Sequence[Tensor | None]) -> Tensor | None:
    given = [w for w in weights if w is not None]
    if given and len(given) != len(weights):
        raise ValueError(
            f"KeyedJaggedTensor.{name}: {len(given)} of {len(weights)} parts have weights; all or none must"
        )
    return torch.cat(given) if given else None
