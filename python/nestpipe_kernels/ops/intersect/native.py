"""Intersect in csrc/keys/intersect.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._native import core
from .._key_checks import pointer

__all__ = ["intersect"]


def intersect(
    keys_a: Tensor, tables_a: Tensor | None, keys_b: Tensor, tables_b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `nestpipe_kernels.ops.intersect.intersect`, for checked arguments."""
    index_a = torch.empty(keys_b.numel(), dtype=torch.int64)
    index_b = torch.empty(keys_b.numel(), dtype=torch.int64)
    num_matches = core().intersect(
        keys_a.data_ptr(),
        pointer(tables_a),
        keys_a.numel(),
        keys_b.data_ptr(),
        pointer(tables_b),
        keys_b.numel(),
        index_a.data_ptr(),
        index_b.data_ptr(),
    )
    return index_a[:num_matches].clone(), index_b[:num_matches].clone()
