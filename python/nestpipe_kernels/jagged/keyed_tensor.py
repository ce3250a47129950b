"""KeyedTensor: one matrix whose columns belong to named features (pooled embeddings), with TorchRec's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["KeyedTensor"]


class KeyedTensor:
    """Dense tensors of several features, concatenated along `key_dim`.

    Args:
        keys: names.
        length_per_key: extent of each along key_dim.
        values: [B, sum(length_per_key)] for key_dim 1.
        key_dim: the dimension that the features share.

    Raises:
        ValueError: the lengths do not match the keys or the tensor.
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor, key_dim: int = 1) -> None:
        if len(keys) != len(length_per_key):
            raise ValueError(f"KeyedTensor: {len(keys)} keys but {len(length_per_key)} lengths")
        if not -values.dim() <= key_dim < values.dim():
            raise ValueError(f"KeyedTensor: key_dim {key_dim} does not exist in values of shape {list(values.shape)}")
        if sum(length_per_key) != values.shape[key_dim]:
            raise ValueError(
                f"KeyedTensor: length_per_key sums to {sum(length_per_key)} but dimension {key_dim} of values has "
                f"{values.shape[key_dim]}"
            )
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._values = values
        self._key_dim = key_dim
        self._index = {key: i for i, key in enumerate(self._keys)}
        self._offset_per_key = [0]
        for length in self._length_per_key:
            self._offset_per_key.append(self._offset_per_key[-1] + length)

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """Concatenate one tensor per key."""
        return KeyedTensor(
            keys, [tensor.shape[key_dim] for tensor in tensors], torch.cat(list(tensors), cat_dim), key_dim
        )

    def keys(self) -> list[str]:
        """Names, in column order."""
        return self._keys

    def values(self) -> Tensor:
        """All features, [B, sum(length_per_key)]."""
        return self._values

    def key_dim(self) -> int:
        """The dimension that the features share."""
        return self._key_dim

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """[F]"""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """[F + 1]"""
        return self._offset_per_key

    def __getitem__(self, key: str) -> Tensor:
        """The key's view of the values, [B, length]. Raises KeyError naming the keys there are."""
        if key not in self._index:
            raise KeyError(f"KeyedTensor has no key {key!r}; it has {self._keys}")
        i = self._index[key]
        return self._values.narrow(self._key_dim, self._offset_per_key[i], self._length_per_key[i])

    def to_dict(self) -> dict[str, Tensor]:
        """A view per key."""
        return {key: self[key] for key in self._index}

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """For each group of keys, their features concatenated in the group's order.

        A key that several KeyedTensors have is taken from the last. Raises KeyError for a key that none has.
        """
        if not keyed_tensors:
            raise ValueError("KeyedTensor.regroup: give at least one KeyedTensor")
        features: dict[str, Tensor] = {}
        for keyed in keyed_tensors:
            features.update(keyed.to_dict())
        missing = sorted({key for group in groups for key in group} - features.keys())
        if missing:
            raise KeyError(f"KeyedTensor.regroup: no KeyedTensor has {missing}; there are {sorted(features)}")
        key_dim = keyed_tensors[0].key_dim()
        return [torch.cat([features[key] for key in group], key_dim) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """`regroup` with a name per group."""
        if len(groups) != len(keys):
            raise ValueError(f"KeyedTensor.regroup_as_dict: {len(groups)} groups but {len(keys)} names")
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups)))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """A copy on `device`."""
        moved = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, moved, self._key_dim)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until work queued on `stream` is done."""
        self._values.record_stream(stream)

    def __repr__(self) -> str:
        columns = ", ".join(f"{key!r}: {length}" for key, length in zip(self._keys, self._length_per_key))
        return f"KeyedTensor({{{columns}}}, values {list(self._values.shape)} {self._values.dtype})"
