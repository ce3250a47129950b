"""Recording spans, the numbers from them, and the three file formats."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest

from nestpipe_kernels.trace import Timeline, save_merged

sys.path.insert(0, str(Path(__file__).parent))

from made_up_run import MS, record_run


def test_the_window_follows_the_newest_batch_and_memory_is_bounded():
    timeline = Timeline(window_steps=3)
    for batch in [0, 1, 2, 4, 3, 5, 1]:
        timeline.record("compute", "forward", batch, None, batch * MS, batch * MS + 1, "compute")
    assert [span.batch for span in timeline.to_events()] == [3, 4, 5]
    timeline.clear()
    assert timeline.to_events() == []


def test_threads_may_record_together():
    timeline = Timeline(window_steps=1000)

    def record(lane: str) -> None:
        for batch in range(200):
            timeline.record(lane, "work", batch, None, batch, batch + 1, "other")

    threads = [threading.Thread(target=record, args=(f"lane {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.to_events()) == 800


def test_summary_of_a_known_run():
    summary = record_run(5).summary()
    busy = summary.pop("busy_ms")
    assert summary == {
        "steps": 5,
        "step_ms": 38.0,
        "compute_ms": 32.0,
        "exposed_lookup_ms": 1.0,
        "exposed_communication_ms": 2.0,
        "exposed_other_ms": 0.0,
    }
    assert busy == {"compute": 35.0, "grads": 4.0, "loader": 1.0, "retrieval": 27.0, "rows": 15.0}


def test_step_time_includes_what_no_span_covers():
    timeline = Timeline()
    for batch in range(3):
        timeline.record("compute", "forward", batch, None, batch * 10 * MS, batch * 10 * MS + 4 * MS, "compute")
    assert timeline.summary()["step_ms"] == 10.0
    assert Timeline().summary()["steps"] == 0


def test_chrome_trace(tmp_path):
    ranks = [(rank, record_run(2, rank=rank).to_events()) for rank in (1, 0)]
    save_merged(tmp_path / "run.json", ranks)
    trace = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert names[0, 0] == names[1, 0] == "compute"
    assert {e["args"]["name"] for e in trace if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    spans = [e for e in trace if e["ph"] == "X"]
    assert len(spans) == sum(len(events) for _, events in ranks)
    (wait,) = [e for e in spans if e["name"] == "wait: receive_rows" and e["pid"] == 1 and e["args"]["batch"] == 0]
    assert wait == {
        "ph": "X",
        "name": "wait: receive_rows",
        "cat": "communication,exposed",
        "pid": 1,
        "tid": 0,
        "ts": 500.0,
        "dur": 2000.0,
        "args": {"batch": 0, "micro": 0},
    }
    assert min(e["ts"] for e in spans) == 0.0


def test_html_is_self_contained_and_safe_against_names(tmp_path):
    timeline = record_run(2)
    timeline.record("rows", "</script><b>", 1, None, 10**12, 10**12 + MS, "other")
    timeline.save(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert page.count("</script>") == 1
    assert not re.search(r"https?://|src=|@import|url\(", page)
    data = json.loads(re.search(r"const data = (.*);\n", page).group(1))
    (rank,) = data["ranks"]
    assert rank["lanes"][0]["name"] == "compute"
    assert rank["summary"]["exposed_communication_ms"] == 2.0
    assert [0.0, 2000.0, "receive_rows", 0, 0, "communication", 1, 0] in rank["lanes"][0]["bars"]
    assert "</script><b>" in [bar[2] for lane in rank["lanes"] for bar in lane["bars"]]


def test_html_puts_overlapping_spans_of_a_lane_in_rows_of_their_own(tmp_path):
    timeline = Timeline()
    timeline.record("compute", "outer", 0, None, 0, 10 * MS, "compute")
    timeline.record("compute", "inner", 0, None, 0, 4 * MS, "compute")
    timeline.record("compute", "next", 0, None, 10 * MS, 12 * MS, "compute")
    timeline.save(tmp_path / "run.html")
    data = json.loads(re.search(r"const data = (.*);\n", (tmp_path / "run.html").read_text()).group(1))
    (lane,) = data["ranks"][0]["lanes"]
    assert [(bar[2], bar[7]) for bar in lane["bars"]] == [("outer", 0), ("inner", 1), ("next", 0)]
    assert lane["rows"] == 2


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    save_merged(tmp_path / "run.PNG", [(rank, record_run(3, rank=rank).to_events()) for rank in (0, 1)])
    assert (tmp_path / "run.PNG").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"\.png needs matplotlib; install it .* or save as \.html"):
        record_run(1).save(tmp_path / "run.png")


def test_bad_requests(tmp_path):
    with pytest.raises(ValueError, match=r"cannot write 'run\.svg': the suffix must be \.json .*, got '\.svg'"):
        record_run(1).save(tmp_path / "run.svg")
    with pytest.raises(ValueError, match=r"nothing recorded, so nothing to write to 'run\.html'; run a step first"):
        Timeline().save(tmp_path / "run.html")
    with pytest.raises(ValueError, match="unknown kind 'idle' of stage 'x'; expected one of lookup, communication"):
        Timeline().record("compute", "x", 0, None, 0, 1, "idle")
    with pytest.raises(ValueError, match="window_steps must be >= 1, got 0"):
        Timeline(window_steps=0)
    assert list(tmp_path.iterdir()) == []


def test_trace_imports_no_torch():
    import subprocess

    code = "import sys, nestpipe_kernels.trace.html, nestpipe_kernels.trace.png; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
