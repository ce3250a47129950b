"""Ragged batches of keys and pooled embeddings, with TorchRec's names, and selection of samples."""

from __future__ import annotations

from nestpipe_kernels.jagged.bags import bag_positions, lengths_to_offsets, select_bags
from nestpipe_kernels.jagged.jagged_tensor import JaggedTensor
from nestpipe_kernels.jagged.keyed_jagged_tensor import KeyedJaggedTensor
from nestpipe_kernels.jagged.keyed_tensor import KeyedTensor

__all__ = [
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "bag_positions",
    "lengths_to_offsets",
    "select_bags",
]
