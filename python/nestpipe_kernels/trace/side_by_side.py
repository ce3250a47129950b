"""Several runs of one rank under each other on one time axis, through matplotlib (an optional dependency)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe_kernels.trace.layout import COLOURS, EXPOSED_COLOUR
from nestpipe_kernels.trace.png import WIDTH_INCHES, draw_lanes, draw_legend, new_figure
from nestpipe_kernels.trace.summary import COMPUTE_LANE, summarize

if TYPE_CHECKING:
    from nestpipe_kernels.trace.timeline import Span

__all__ = ["save_side_by_side"]

LANE_INCHES = 0.2
TITLE_INCHES = 0.36
SKIPPED_STEPS = 2
SHOWN_STEPS = 2
"""Of the slowest run; the others show as much time."""


def save_side_by_side(path: str | Path, title: str, runs: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """Draw the lanes of each run, all with the same scale, each from the begin of its third step on.

    Args:
        path: the PNG file.
        title: of the whole picture.
        runs: (name, spans) of each, drawn in this order.

    Raises:
        ValueError: no runs, or one without spans on the compute lane.
        ImportError: matplotlib is missing.
    """
    if not runs or any(not any(span.lane == COMPUTE_LANE for span in spans) for _, spans in runs):
        raise ValueError("side by side: every run needs spans on the compute lane; run a step first")
    starts = [_start(spans) for _, spans in runs]
    width_ms = SHOWN_STEPS * max(summarize(spans)["step_ms"] for _, spans in runs)
    lanes = [_lanes(spans) for _, spans in runs]
    heights = [len(names) * LANE_INCHES + TITLE_INCHES for names in lanes]
    total = sum(heights) + 1.2
    figure = new_figure((WIDTH_INCHES, total))
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (name, spans), start_ns, names in zip(axes, runs, starts, lanes):
        _draw_run(axis, name, spans, (start_ns, width_ms), names)
    axes[-1].set_xlabel("milliseconds")
    figure.suptitle(title, x=0.09, y=1 - 0.08 / total, ha="left", va="top", fontsize=10)
    draw_legend(figure, y=1 - 0.42 / total)
    figure.subplots_adjust(left=0.09, right=0.99, top=1 - 0.95 / total, bottom=0.45 / total, hspace=0.3)
    figure.savefig(path)


def _start(spans: Sequence[Span]) -> int:
    """The end of the step before the first that is shown."""
    batches = sorted({span.batch for span in spans if span.lane == COMPUTE_LANE})
    last = batches[min(SKIPPED_STEPS, len(batches) - 1) - 1] if len(batches) > 1 else batches[0]
    own = [span for span in spans if span.lane == COMPUTE_LANE and span.batch == last]
    return max(span.end_ns for span in own) if len(batches) > 1 else min(span.start_ns for span in own)


_ORDER = (COMPUTE_LANE, "storage", "copy", "routing", "retrieval", "device", "write_back", "exchange", "early", "dense")


def _lanes(spans: Sequence[Span]) -> list[str]:
    found = {span.lane for span in spans}
    return [name for name in _ORDER if name in found] + sorted(found - set(_ORDER))


def _draw_run(axis: Any, name: str, spans: Sequence[Span], window: tuple[int, float], lanes: Sequence[str]) -> None:
    draw_lanes(axis, lanes, window[1])
    axis.tick_params(axis="y", labelsize=7)
    axis.tick_params(axis="x", labelsize=8)
    numbers = summarize(spans)
    axis.set_title(
        f"{name}: step {numbers['step_ms']:.0f} ms, of it waiting for lookup {numbers['exposed_lookup_ms']:.0f}, "
        f"for communication {numbers['exposed_communication_ms']:.0f}",
        loc="left",
        fontsize=9,
        pad=3,
    )
    for end_ms in _step_ends(spans, window):
        axis.axvline(end_ms, color="#33333b", linewidth=0.9, linestyle=(0, (2, 2)), zorder=3)
    for index, lane in enumerate(lanes):
        for exposed in (False, True):
            for kind, colour in COLOURS.items():
                bars = [
                    bar
                    for span in spans
                    if span.lane == lane and span.kind == kind and span.exposed == exposed
                    if (bar := _bar(span, window)) is not None
                ]
                if not bars:
                    continue
                style = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.3}
                if exposed:
                    style = {"facecolor": "#fbe3e6", "edgecolor": EXPOSED_COLOUR, "linewidth": 0.5, "hatch": "//////"}
                axis.broken_barh(bars, (index + 0.12, 0.76), **style)
        if lane == COMPUTE_LANE:
            _name_batches(axis, index, spans, window)


def _bar(span: Span, window: tuple[int, float]) -> tuple[float, float] | None:
    start_ns, width_ms = window
    left = max((span.start_ns - start_ns) / 1e6, 0.0)
    right = min((span.end_ns - start_ns) / 1e6, width_ms)
    return (left, right - left) if right > left else None


def _step_ends(spans: Sequence[Span], window: tuple[int, float]) -> list[float]:
    start_ns, width_ms = window
    ends: dict[int, int] = {}
    for span in spans:
        if span.lane == COMPUTE_LANE:
            ends[span.batch] = max(ends.get(span.batch, 0), span.end_ns)
    shown = [(end_ns - start_ns) / 1e6 for end_ns in ends.values()]
    return [ms for ms in shown if 0 <= ms <= width_ms]


def _name_batches(axis: Any, index: int, spans: Sequence[Span], window: tuple[int, float]) -> None:
    """Numbers in the compute lane's bars: which micro-batch of which batch (counted from the first shown)."""
    start_ns, width_ms = window
    first = min(
        (s.batch for s in spans if s.lane == COMPUTE_LANE and s.kind == "compute" and s.start_ns >= start_ns), default=0
    )
    for span in spans:
        if span.lane != COMPUTE_LANE or span.kind != "compute" or span.exposed or span.micro is None:
            continue
        bar = _bar(span, window)
        if bar is not None and bar[1] / width_ms * WIDTH_INCHES > 0.24:
            text = f"{span.batch - first}.{span.micro}"
            axis.text(bar[0] + bar[1] / 2, index + 0.5, text, ha="center", va="center", fontsize=6, color="white")
