"""Timeline: a bounded, thread-safe record of which stage ran on which lane, and what the compute lane waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nestpipe_kernels.trace.summary import COMPUTE_LANE, KINDS, summarize

__all__ = ["COMPUTE_LANE", "KINDS", "Span", "Timeline", "save_merged"]


class Span(NamedTuple):
    """One stage's run on one lane. Times are `time.perf_counter_ns()`, shared by the processes of a machine."""

    lane: str
    stage: str
    batch: int
    micro: int | None
    start_ns: int
    end_ns: int
    kind: str
    """One of KINDS; of an exposed span, what the compute lane waited for."""
    exposed: bool
    """True for time in which the compute lane waited."""


class Timeline:
    """Spans of the last `window_steps` batches of one rank.

    Any thread may record; a span of a batch that has left the window is dropped. Memory is bounded by the window.

    Args:
        window_steps: batches kept, >= 1, counted back from the largest batch index seen.
        rank: whose spans these are, for the files.
    """

    def __init__(self, window_steps: int = 50, rank: int = 0) -> None:
        if window_steps < 1:
            raise ValueError(f"timeline: window_steps must be >= 1, got {window_steps}")
        self.window_steps = window_steps
        self.rank = rank
        self._lock = threading.Lock()
        self._batches: dict[int, list[Span]] = {}
        self._newest = -1

    def record(
        self,
        lane: str,
        stage: str,
        batch: int,
        micro: int | None,
        start_ns: int,
        end_ns: int,
        kind: str,
        exposed: bool = False,
    ) -> None:
        """Add one span.

        Args:
            lane: row of the picture; the thread that calls `progress()` is COMPUTE_LANE.
            stage: name of the stage.
            batch, micro: which batch, >= 0, and micro-batch (None: the whole batch).
            start_ns, end_ns: `time.perf_counter_ns()`.
            kind: "lookup", "communication", "compute" or "other"; of an exposed span, what was waited for.
            exposed: the compute lane was kept waiting.

        Raises:
            ValueError: unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"timeline: unknown kind {kind!r} of stage {stage!r}; expected one of {', '.join(KINDS)}")
        span = Span(lane, stage, batch, micro, start_ns, end_ns, kind, exposed)
        with self._lock:
            if batch > self._newest:
                self._newest = batch
                limit = batch - self.window_steps
                for old in [index for index in self._batches if index <= limit]:
                    del self._batches[old]
            if batch > self._newest - self.window_steps:
                self._batches.setdefault(batch, []).append(span)

    def to_events(self) -> list[Span]:
        """The spans of the window by start time (a copy; plain tuples that pickle)."""
        with self._lock:
            spans = [span for batch in self._batches.values() for span in batch]
        return sorted(spans, key=lambda span: (span.start_ns, span.end_ns))

    def clear(self) -> None:
        """Forget everything recorded."""
        with self._lock:
            self._batches.clear()
            self._newest = -1

    def summary(self) -> dict[str, Any]:
        """Medians over the steps of the window, milliseconds; see `trace.summary.summarize`."""
        return summarize(self.to_events())

    def save(self, path: str | Path) -> None:
        """Write the window as `.json` (Chrome trace for Perfetto), `.html` (one page) or `.png` (matplotlib).

        Raises:
            ValueError: another suffix, or nothing recorded.
            ImportError: `.png` without matplotlib.
        """
        save_merged(path, [(self.rank, self.to_events())])


def save_merged(path: str | Path, ranks: Iterable[tuple[int, Sequence[Span]]]) -> None:
    """Write the spans of several ranks of one machine into one file; formats and errors as `Timeline.save`.

    Args:
        path: the file; its suffix chooses the format.
        ranks: (rank, spans) pairs, from `Timeline.to_events()` of each rank.
    """
    from nestpipe_kernels.trace import chrome, html, png

    writers = {".json": chrome.write, ".html": html.write, ".png": png.write}
    target = Path(path)
    writer = writers.get(target.suffix.lower())
    if writer is None:
        raise ValueError(
            f"timeline: cannot write {target.name!r}: the suffix must be .json (Chrome trace), .html or .png, "
            f"got {target.suffix!r}"
        )
    by_rank = sorted(((rank, [Span(*span) for span in spans]) for rank, spans in ranks), key=lambda pair: pair[0])
    if not any(spans for _, spans in by_rank):
        raise ValueError(f"timeline: nothing recorded, so nothing to write to {target.name!r}; run a step first")
    writer(target, by_rank)
