"""Timelines as a picture of the last steps, through matplotlib (an optional dependency)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe_kernels.trace.layout import COLOURS, EXPOSED_COLOUR, lane_names, stack_rows
from nestpipe_kernels.trace.summary import COMPUTE_LANE, summarize

if TYPE_CHECKING:
    from nestpipe_kernels.trace.timeline import Span

__all__ = ["draw_lanes", "draw_legend", "new_figure", "write"]

SHOWN_STEPS = 3
WIDTH_INCHES = 15.0
LANE_INCHES = 0.42
POINTS_PER_CHARACTER = 4.6


def write(path: Path, ranks: Sequence[tuple[int, Sequence[Span]]]) -> None:
    """Draw the last SHOWN_STEPS steps. Raises ImportError with the remedy when matplotlib is missing."""
    start_ns, end_ns = _window(ranks)
    num_lanes = sum(len(lane_names(spans)) for _, spans in ranks)
    figure = new_figure((WIDTH_INCHES, 1.5 + LANE_INCHES * num_lanes + 0.45 * len(ranks)))
    heights = [max(len(lane_names(spans)), 1) for _, spans in ranks]
    axes = figure.subplots(len(ranks), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (rank, spans) in zip(axes, ranks):
        _draw_rank(axis, rank, spans, start_ns, end_ns)
    axes[-1].set_xlabel("milliseconds")
    draw_legend(figure)
    figure.subplots_adjust(left=0.09, right=0.99, hspace=0.35 if len(ranks) > 1 else 0.0)
    figure.savefig(path, bbox_inches="tight")


def _window(ranks: Sequence[tuple[int, Sequence[Span]]]) -> tuple[int, int]:
    """From the first span of the shown steps on the compute lanes (else on all) to their last one's end."""
    every = [span for _, spans in ranks for span in spans]
    steps = [span for span in every if span.lane == COMPUTE_LANE] or every
    batches = sorted({span.batch for span in steps})[-SHOWN_STEPS:]
    shown = [span for span in steps if span.batch in batches]
    return min(span.start_ns for span in shown), max(span.end_ns for span in shown)


def _draw_rank(axis: Any, rank: int, spans: Sequence[Span], start_ns: int, end_ns: int) -> None:
    lanes = lane_names(spans)
    width_ms = max((end_ns - start_ns) / 1e6, 1e-6)
    draw_lanes(axis, lanes, width_ms)
    numbers = summarize(spans)
    axis.set_title(
        f"rank {rank}: step {numbers['step_ms']:.2f} ms, compute {numbers['compute_ms']:.2f}, exposed lookup "
        f"{numbers['exposed_lookup_ms']:.2f}, exposed communication {numbers['exposed_communication_ms']:.2f}, "
        f"exposed other {numbers['exposed_other_ms']:.2f} (medians of {numbers['steps']} steps)",
        loc="left",
        fontsize=9,
    )
    for index, lane in enumerate(lanes):
        own = sorted((span for span in spans if span.lane == lane), key=lambda span: (span.start_ns, -span.end_ns))
        rows = stack_rows(own)
        height = 0.76 / (max(rows, default=0) + 1)
        for span, row in zip(own, rows):
            if span.end_ns > start_ns and span.start_ns < end_ns:
                _draw_span(axis, span, index + 0.12 + row * height, height, (start_ns, width_ms))


def draw_lanes(axis: Any, lanes: Sequence[str], width_ms: float) -> None:
    """Empty lanes with their names, lane k between the heights k and k + 1 from above; time in milliseconds."""
    axis.set_xlim(0, width_ms)
    axis.set_ylim(len(lanes), 0)
    axis.set_yticks([index + 0.5 for index in range(len(lanes))], lanes)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    for index in range(1, len(lanes)):
        axis.axhline(index, color="#e4e4ea", linewidth=0.8, zorder=0)


def _draw_span(axis: Any, span: Span, top: float, height: float, window: tuple[int, float]) -> None:
    start_ns, width_ms = window
    left = max((span.start_ns - start_ns) / 1e6, 0.0)
    right = min((span.end_ns - start_ns) / 1e6, width_ms)
    style = {"facecolor": COLOURS[span.kind], "edgecolor": "white", "linewidth": 0.5}
    if span.exposed:
        style = {"facecolor": "#fbe3e6", "edgecolor": EXPOSED_COLOUR, "linewidth": 0.6, "hatch": "/////"}
    axis.broken_barh([(left, right - left)], (top, height), **style)
    if span.exposed:
        return
    place = f"{span.batch}" + ("" if span.micro is None else f".{span.micro}")
    characters = (right - left) / width_ms * WIDTH_INCHES * 0.88 * 72 / POINTS_PER_CHARACTER - 1
    text = next((label for label in (f"{span.stage} {place}", place) if len(label) <= characters), "")
    axis.text((left + right) / 2, top + height / 2, text, ha="center", va="center", fontsize=7, color="white")


def new_figure(inches: tuple[float, float]) -> Any:
    """An empty matplotlib figure. Raises ImportError with the remedy when matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "timeline: .png needs matplotlib; install it (pip install 'nestpipe_kernels[plot]') or save as .html"
        ) from error
    figure = Figure(figsize=inches, dpi=130)
    FigureCanvasAgg(figure)
    return figure


def draw_legend(figure: Any, y: float = 1.0) -> None:
    """What the colours mean, at the right of height `y` (0 to 1)."""
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=colour, label=kind) for kind, colour in COLOURS.items()]
    entries.append(Patch(facecolor="#fbe3e6", edgecolor=EXPOSED_COLOUR, hatch="/////", label="exposed: compute waits"))
    figure.legend(
        handles=entries, loc="upper right", bbox_to_anchor=(1.0, y), ncols=len(entries), fontsize=8, frameon=False
    )
