"""A made-up run of a nested schedule: spans as a pipeline records them."""

from __future__ import annotations

from nestpipe_kernels.trace import Timeline

MS = 1_000_000


def record_run(steps: int, micros: int = 4, rank: int = 0, start_ns: int = 10**12, window_steps: int = 50) -> Timeline:
    """Each step: a 2 ms wait for rows, then `micros` micro-batches of 8 ms, a 1 ms wait for gradients, 3 ms update."""
    timeline = Timeline(window_steps, rank)
    now = start_ns + rank * MS // 2
    for batch in range(steps):
        compute = now
        timeline.record("compute", "receive_rows", batch, 0, compute, compute + 2 * MS, "communication", exposed=True)
        compute += 2 * MS
        for micro in range(micros):
            timeline.record("compute", "forward_backward", batch, micro, compute, compute + 8 * MS, "compute")
            timeline.record("grads", "send_grads", batch, micro, compute + 8 * MS, compute + 9 * MS, "communication")
            if micro + 1 < micros:
                timeline.record("rows", "send_rows", batch, micro + 1, compute, compute + 5 * MS, "communication")
            compute += 8 * MS
        timeline.record("compute", "commit", batch, None, compute, compute + MS, "lookup", exposed=True)
        timeline.record("compute", "update", batch, None, compute + MS, compute + 4 * MS, "other")
        timeline.record("retrieval", "route", batch + 1, None, now, now + 6 * MS, "lookup")
        timeline.record("retrieval", "retrieve", batch + 1, None, now + 6 * MS, now + 15 * MS, "lookup")
        timeline.record("retrieval", "gather", batch + 1, None, now + 15 * MS, now + 27 * MS, "lookup")
        timeline.record("loader", "prefetch", batch + 2, None, now + MS, now + 2 * MS, "other")
        now = compute + 4 * MS
    return timeline
