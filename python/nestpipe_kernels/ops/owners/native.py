"""Owners in csrc/keys/owners.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._native import core
from .._key_checks import pointer

__all__ = ["owners"]


def owners(keys: Tensor, tables: Tensor | None, table_hashes: Tensor, slice_owner: Tensor) -> tuple[Tensor, int]:
    """Owners int32 [n], and the first position with a bad table or -1; for checked arguments."""
    out = torch.empty(keys.numel(), dtype=torch.int32)
    bad_position = core().owners(
        keys.data_ptr(),
        pointer(tables),
        keys.numel(),
        table_hashes.data_ptr(),
        table_hashes.numel(),
        slice_owner.data_ptr(),
        out.data_ptr(),
    )
    return out, bad_position
