"""What dedup returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["DedupResult"]


class DedupResult(NamedTuple):
    """Distinct pairs in order of first appearance."""

    unique_index: Tensor
    """int64 [U], where each distinct pair first appears, ascending: `keys[unique_index]` are the distinct keys."""
    inverse: Tensor
    """int32 [n], the distinct pair at each position: `keys[unique_index][inverse]` equals `keys`."""
    counts: Tensor
    """int64 [U], how often each distinct pair appears."""
