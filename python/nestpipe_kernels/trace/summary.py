"""Numbers from spans: step time, compute, exposed time by cause, busy time per lane."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nestpipe_kernels.trace.timeline import Span

__all__ = ["COMPUTE_LANE", "KINDS", "STEP_COLUMNS", "step_table", "summarize"]

COMPUTE_LANE = "compute"
"""Name of the lane that is the thread that calls `progress()`."""

KINDS = ("lookup", "communication", "compute", "other")

STEP_COLUMNS = (
    "step_ms",
    "compute_ms",
    "exposed_lookup_ms",
    "exposed_communication_ms",
    "exposed_other_ms",
)


def step_table(spans: Sequence[Span]) -> list[dict[str, float]]:
    """One row per batch, ascending: "batch" and STEP_COLUMNS, milliseconds.

    A step lasts from the end of the batch before it on the compute lane to its own end there (the first of the
    window: from its own start). Exposed time of kind "compute" counts as other.
    """
    on_compute = [span for span in spans if span.lane == COMPUTE_LANE] or list(spans)
    by_batch: dict[int, list[Span]] = {}
    for span in on_compute:
        by_batch.setdefault(span.batch, []).append(span)
    rows: list[dict[str, float]] = []
    previous_end: int | None = None
    for batch in sorted(by_batch):
        row: dict[str, float] = dict.fromkeys(STEP_COLUMNS, 0.0)
        start_ns = min(span.start_ns for span in by_batch[batch])
        end_ns = max(span.end_ns for span in by_batch[batch])
        row["step_ms"] = (end_ns - (start_ns if previous_end is None else previous_end)) / 1e6
        previous_end = end_ns
        for span in by_batch[batch]:
            ms = (span.end_ns - span.start_ns) / 1e6
            if span.exposed:
                cause = span.kind if span.kind in ("lookup", "communication") else "other"
                row[f"exposed_{cause}_ms"] += ms
            elif span.kind == "compute":
                row["compute_ms"] += ms
        rows.append({"batch": float(batch), **row})
    return rows


def summarize(spans: Sequence[Span]) -> dict[str, Any]:
    """Medians over steps, milliseconds: STEP_COLUMNS, "steps" (how many), "busy_ms" {lane: ms per step}.

    Busy time of a lane is the time its spans cover that are not exposed waits, summed per batch.
    """
    rows = step_table(spans)
    result: dict[str, Any] = {"steps": len(rows)}
    for column in STEP_COLUMNS:
        result[column] = median([row[column] for row in rows]) if rows else 0.0
    busy: dict[str, dict[int, float]] = {}
    for span in spans:
        lane = busy.setdefault(span.lane, {})
        worked_ms = 0.0 if span.exposed else (span.end_ns - span.start_ns) / 1e6
        lane[span.batch] = lane.get(span.batch, 0.0) + worked_ms
    result["busy_ms"] = {lane: median(per_batch.values()) for lane, per_batch in sorted(busy.items())}
    return result
