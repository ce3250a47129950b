"""The picture of several runs on one time axis."""

from __future__ import annotations

import pytest

from nestpipe_kernels.trace import Span
from nestpipe_kernels.trace.side_by_side import save_side_by_side


def spans_of(step_ns: int, steps: int) -> list[Span]:
    found = []
    for batch in range(steps):
        start = batch * step_ns
        found.append(Span("compute", "wait rows", batch, 0, start, start + step_ns // 4, "communication", True))
        found.append(
            Span("compute", "forward_backward", batch, 0, start + step_ns // 4, start + step_ns, "compute", False)
        )
        found.append(Span("retrieval", "retrieve", batch, None, start, start + step_ns // 2, "lookup", False))
    return found


def test_runs_of_any_length_are_drawn(tmp_path) -> None:
    path = tmp_path / "picture.png"
    runs = [("slow", spans_of(8_000_000, 5)), ("quick", spans_of(2_000_000, 20)), ("one step", spans_of(5_000_000, 1))]
    save_side_by_side(path, "three runs\nof nothing", runs)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("runs", [[], [("a", [])], [("a", spans_of(10, 2)), ("b", spans_of(10, 2)[2:3])]])
def test_runs_without_a_step_are_refused(tmp_path, runs) -> None:
    with pytest.raises(ValueError, match="every run needs spans on the compute lane; run a step first"):
        save_side_by_side(tmp_path / "picture.png", "", runs)
    assert not (tmp_path / "picture.png").exists()
