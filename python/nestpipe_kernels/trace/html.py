"""Timelines as one self-contained page: no network, plain JavaScript on a canvas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe_kernels.trace.layout import COLOURS, EXPOSED_COLOUR, lane_names, stack_rows
from nestpipe_kernels.trace.summary import STEP_COLUMNS, step_table, summarize

if TYPE_CHECKING:
    from nestpipe_kernels.trace.timeline import Span

__all__ = ["write"]


def write(path: Path, ranks: Sequence[tuple[int, Sequence[Span]]]) -> None:
    """Fill the page's template with the spans, microseconds from the first one."""
    origin_ns = min(span.start_ns for _, spans in ranks for span in spans)
    data = {
        "colours": COLOURS,
        "exposedColour": EXPOSED_COLOUR,
        "columns": STEP_COLUMNS,
        "ranks": [_rank(rank, spans, origin_ns) for rank, spans in ranks],
    }
    page = resources.files("nestpipe_kernels.trace").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # names must not end the script element
    path.write_text(page.replace("/*DATA*/null", text, 1), encoding="utf-8")


def _rank(rank: int, spans: Sequence[Span], origin_ns: int) -> dict[str, Any]:
    lanes = []
    for name in lane_names(spans):
        own = sorted((span for span in spans if span.lane == name), key=lambda span: (span.start_ns, -span.end_ns))
        rows = stack_rows(own)
        bars = [
            [
                round((span.start_ns - origin_ns) / 1e3, 3),
                round((span.end_ns - span.start_ns) / 1e3, 3),
                span.stage,
                span.batch,
                span.micro,
                span.kind,
                int(span.exposed),
                row,
            ]
            for span, row in zip(own, rows)
        ]
        lanes.append({"name": name, "rows": max(rows, default=0) + 1, "bars": bars})
    return {"rank": rank, "lanes": lanes, "steps": step_table(spans), "summary": summarize(spans)}
