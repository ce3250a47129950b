"""What the pictures share: order of lanes, colours of kinds, rows for spans that overlap within a lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nestpipe_kernels.trace.summary import COMPUTE_LANE

if TYPE_CHECKING:
    from nestpipe_kernels.trace.timeline import Span

__all__ = ["COLOURS", "EXPOSED_COLOUR", "lane_names", "stack_rows"]

COLOURS = {"lookup": "#c27d12", "communication": "#3b82c4", "compute": "#3d8a5f", "other": "#7b7d8c"}
EXPOSED_COLOUR = "#d1344b"


def lane_names(spans: Sequence[Span]) -> list[str]:
    """Lanes in the order to draw them: the compute lane first, then by first appearance."""
    names = list(dict.fromkeys(span.lane for span in spans))
    return sorted(names, key=lambda name: name != COMPUTE_LANE)


def stack_rows(spans: Sequence[Span]) -> list[int]:
    """A row per span (in order of start) so that spans of one row do not overlap; a container comes before its parts.

    Lanes run one thing after another, so this is 0 throughout unless waits or nested stages were recorded inside.
    """
    ends: list[int] = []
    rows = []
    for span in spans:
        row = next((index for index, end_ns in enumerate(ends) if end_ns <= span.start_ns), len(ends))
        if row == len(ends):
            ends.append(span.end_ns)
        else:
            ends[row] = span.end_ns
        rows.append(row)
    return rows
