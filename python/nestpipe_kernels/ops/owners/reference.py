"""The hash of csrc/include/nestpipe/hash.h in PyTorch, and owners by it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["hash_keys", "mix64", "owners"]


def _signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - 2**64 if word >= 2**63 else word


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Logical shift of 64-bit words held as int64."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def mix64(words: Tensor) -> Tensor:
    """A bijection of 64-bit words (int64 [n]); products wrap."""
    words = words ^ _shift_right(words, 32)
    words = words * _signed(0x9FB21C651E98DF25)
    words = words ^ _shift_right(words, 29)
    words = words * _signed(0xD6E8FEB86659FD93)
    return words ^ _shift_right(words, 32)


def hash_keys(table_hashes: Tensor, keys: Tensor) -> Tensor:
    """int64 [n] hashes of keys int64 [n] whose tables' hashes are int64 [n] or [1]."""
    return mix64(keys ^ table_hashes)


def owners(keys: Tensor, tables: Tensor | None, table_hashes: Tensor, slice_owner: Tensor) -> tuple[Tensor, int]:
    """Owners int32 [n], and the first position with a bad table or -1; for checked arguments."""
    table_list = torch.zeros_like(keys) if tables is None else tables.to(torch.int64)
    bad = ((table_list < 0) | (table_list >= table_hashes.numel())).nonzero()
    if bad.numel() > 0:
        return torch.empty(0, dtype=torch.int32), int(bad[0])
    slices = _shift_right(hash_keys(table_hashes[table_list], keys), 48)
    return slice_owner[slices], -1
