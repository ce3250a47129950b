"""The list of bags that the three pooling operations share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

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

    def sizes(self) -> list[int]:
        """Bags of each segment."""
        return [end - begin for begin, end in pairwise(self.segment_bags)]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(mode, first bag, behind the last) of neighbouring segments of one mode that have bags."""
        for mode, segments in groupby(range(self.num_segments), key=lambda segment: self.segment_modes[segment]):
            numbers = list(segments)
            first, last = self.segment_bags[numbers[0]], self.segment_bags[numbers[-1] + 1]
            if first < last:
                yield mode, first, last
