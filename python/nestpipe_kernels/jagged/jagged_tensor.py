"""JaggedTensor: one feature's bags, or one vector per key; TorchRec's names, validated when it is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.jagged.bags import check_bags, lengths_to_offsets, offsets_to_lengths
from nestpipe_kernels.ops._arrays import as_tensor

__all__ = ["JaggedTensor"]


class JaggedTensor:
    """Rows of different lengths, laid end to end. Arrays of other libraries are taken as tensors, by DLPack.

    Args:
        values: [n, ...], any dtype.
        weights: [n, ...] or None.
        lengths: integer [B], summing to n.
        offsets: integer [B + 1], from 0 to n; give lengths, offsets or both.

    Raises:
        TypeError: lengths or offsets are not integers.
        ValueError: lengths, offsets or weights do not fit the values. The check reads lengths, so it waits for them
            if they are on a device.
    """

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        values, weights, lengths, offsets = map(as_tensor, (values, weights, lengths, offsets))
        lengths, offsets = check_bags("JaggedTensor", values, weights, lengths, offsets, None)
        self._values, self._weights, self._lengths, self._offsets = values, weights, lengths, offsets

    @classmethod
    def _unchecked(
        cls, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
    ) -> JaggedTensor:
        jagged = cls.__new__(cls)
        jagged._values, jagged._weights, jagged._lengths, jagged._offsets = values, weights, lengths, offsets
        return jagged

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """No values and no bags. Values are float32 unless `values_dtype` says otherwise, as in TorchRec."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return JaggedTensor(values, weights, lengths=torch.empty(0, dtype=lengths_dtype, device=device))

    @staticmethod
    def empty_like(jt: JaggedTensor, device: torch.device | None = None) -> JaggedTensor:
        """No values and no bags, with the dtypes of `jt`, on its device or on `device`."""
        target = jt.device() if device is None else device
        weights = jt.weights_or_none()
        return JaggedTensor.empty(
            weights is not None,
            target,
            jt.values().dtype,
            None if weights is None else weights.dtype,
            jt.lengths().dtype,
        )

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
        """From one tensor [n_i, ...] per row; lengths become int32, or int64 where a row is longer than that allows."""
        if not values:
            raise ValueError("JaggedTensor.from_dense: give at least one row (for none, use JaggedTensor.empty)")
        joined = torch.cat(values, 0)
        sizes = [row.shape[0] for row in values]
        dtype = torch.int32 if max(sizes) < 2**31 else torch.int64
        lengths = torch.tensor(sizes, dtype=dtype, device=joined.device)
        return JaggedTensor(joined, None if weights is None else torch.cat(weights, 0), lengths=lengths)

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """From a padded matrix [B, L, ...] of which row i counts up to lengths[i].

        Raises:
            ValueError: a length is negative or above L, or there are not B lengths.
        """
        if values.dim() < 2 or lengths.dim() != 1 or lengths.numel() != values.shape[0]:
            raise ValueError(
                "JaggedTensor.from_dense_lengths: expected values [B, L, ...] and lengths [B], got "
                f"{list(values.shape)} and {list(lengths.shape)}"
            )
        mask = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        return JaggedTensor(values[mask], None if weights is None else weights[mask], lengths=lengths)

    def values(self) -> Tensor:
        """[n, ...]"""
        return self._values

    def weights(self) -> Tensor:
        """[n, ...]. Raises ValueError where there are none."""
        if self._weights is None:
            raise ValueError("this JaggedTensor has no weights; ask weights_or_none()")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """[n, ...] or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """int32 or int64 [B]."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = offsets_to_lengths(self._offsets)
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Lengths if they were given or asked for before."""
        return self._lengths

    def offsets(self) -> Tensor:
        """int32 or int64 [B + 1]."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = lengths_to_offsets(self._lengths, self._values.shape[0])
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Offsets if they were given or asked for before."""
        return self._offsets

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def to_dense(self) -> list[Tensor]:
        """One view [n_i, ...] per row. Waits for the lengths."""
        return list(torch.split(self._values, self.lengths().tolist()))

    def to_dense_weights(self) -> list[Tensor] | None:
        """One view of the weights per row, or None."""
        return None if self._weights is None else list(torch.split(self._weights, self.lengths().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[B, L, ...] with row i filled from the left and `padding_value` after it.

        L is `desired_length` (longer rows are cut) or the longest row. Differentiable in the values.
        """
        return self._pad(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """The weights in the same layout, or None."""
        return None if self._weights is None else self._pad(self._weights, desired_length, padding_value)

    def _pad(self, source: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        lengths = self.lengths()
        width = desired_length
        if width is None:
            width = int(lengths.max()) if lengths.numel() else 0
        if width < 0:
            raise ValueError(f"JaggedTensor.to_padded_dense: desired_length must be >= 0, got {desired_length}")
        filled = torch.arange(width, device=source.device) < lengths.unsqueeze(1)
        positions = self.offsets()[:-1].to(torch.int64).unsqueeze(1) + torch.arange(width, device=source.device)
        padded = source.new_full((lengths.numel(), width, *source.shape[1:]), padding_value)
        return padded.index_put((filled,), source.index_select(0, positions[filled]))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """A copy on `device`; the same tensors where they are there already."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedTensor:
        """A copy in pinned memory; on a machine without an accelerator, where there is none, the object itself."""
        return self._map(lambda tensor: tensor.pin_memory()) if torch.accelerator.is_available() else self

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of every tensor until work queued on `stream` is done."""
        for tensor in (self._values, self._weights, self._lengths, self._offsets):
            if tensor is not None:
                tensor.record_stream(stream)

    def _map(self, function: Any) -> JaggedTensor:
        moved = [None if t is None else function(t) for t in (self._weights, self._lengths, self._offsets)]
        return JaggedTensor._unchecked(function(self._values), *moved)

    def __repr__(self) -> str:
        rows = ", ".join(str(row.tolist()) for row in self.to_dense()) if self._values.numel() <= 1000 else "..."
        return f"JaggedTensor([{rows}])"
