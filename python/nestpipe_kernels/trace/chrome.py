"""Timelines as Chrome trace files, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe_kernels.trace.layout import lane_names

if TYPE_CHECKING:
    from nestpipe_kernels.trace.timeline import Span

__all__ = ["write"]


def write(path: Path, ranks: Sequence[tuple[int, Sequence[Span]]]) -> None:
    """One process per rank, one thread per lane, one complete event per span; microseconds from the first span."""
    origin_ns = min(span.start_ns for _, spans in ranks for span in spans)
    events: list[dict[str, Any]] = []
    for rank, spans in ranks:
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        lanes = lane_names(spans)
        for index, lane in enumerate(lanes):
            events.append(_name("thread_name", rank, index, lane))
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": index, "args": {"sort_index": index}}
            )
        for span in spans:
            events.append(_complete(span, rank, lanes.index(span.lane), origin_ns))
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}


def _complete(span: Span, rank: int, lane: int, origin_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {"batch": span.batch}
    if span.micro is not None:
        args["micro"] = span.micro
    return {
        "ph": "X",
        "name": f"wait: {span.stage}" if span.exposed else span.stage,
        "cat": f"{span.kind},exposed" if span.exposed else span.kind,
        "pid": rank,
        "tid": lane,
        "ts": (span.start_ns - origin_ns) / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": args,
    }
