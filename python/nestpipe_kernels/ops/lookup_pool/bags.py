"""The list of bags that the three pooling operations share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Bags"]


@dataclass(frozen=True)
class Bags:
    """Which rows form which bag; see `pool_forward` for the fields. All tensors contiguous, on the CPU."""

    slots: Tensor
    bag_offsets: Tensor
    segment_bags: tuple[int, ...]
    segment_modes: tuple[int, ...]
    weights: Tensor | None

    @property
    def num_bags(self) -> int:
        """Bags of all segments."""
        return self.bag_offsets.numel() - 1

    @property
    def num_segments(self) -> int:
        """Runs of bags with one mode and one output."""
        return len(self.segment_modes)
