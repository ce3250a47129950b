"""Case `pipeline` of the suite: lines as documented, results checked, what it refuses; no test looks at a time."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from nestpipe_kernels.cli.bench import PIPELINE_SHAPES
from nestpipe_kernels.cli.main import main
from nestpipe_kernels.launch.network import bits_per_second
from nestpipe_kernels.trace import Span

case = pytest.importorskip("nestpipe_kernels.bench.pipeline", reason="the suite comes with the installed package")
from nestpipe_kernels.bench import link_meter, pipeline_lines, pipeline_runs, pipeline_shapes  # noqa: E402

FIELDS = {
    "case", "shape", "impl", "micro_batches", "dtype", "step_ms", "p20_ms", "p80_ms", "compute_ms", "lookup_ms",
    "comm_ms", "exposed_lookup_ms", "exposed_comm_ms", "exposed_other_ms", "bound_ms", "bound_by", "cpu_ms",
    "rows_sent", "bytes_sent", "speedup", "fraction_of_bound", "exposed_lookup_share", "exposed_comm_share",
    "identical", "steps", "note", "dense", "emulated_ms", "net", "ranks", "threads", "versions", "cpu",
}  # fmt: skip
COUNTS = {"distinct_rows", "first_rows", "last_rows", "resent_rows", "lanes_ms", "edge_ms"}


@pytest.mark.multiprocess
def test_ranks_over_a_slow_link(can_make_networks, capfd, tmp_path) -> None:
    path, folder = tmp_path / "lines.jsonl", tmp_path / "pictures"
    arguments = ["--net", "200mbit", "--dense", "emulated", "--shape", "small", "--only", "nested", "--block", "2"]
    more = ["--repeat", "1", "--json", str(path), "--output", str(folder)]
    assert main(["bench", "pipeline", *arguments, *more]) == 0
    captured = capfd.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [json.loads(text) for text in path.read_text().splitlines()] == lines
    assert [(line["impl"], line["micro_batches"]) for line in lines] == [
        ("sequential", 1), ("sequential", 4), ("nested", 4)
    ]  # fmt: skip
    for line in lines:
        assert set(line) == FIELDS | COUNTS
        assert line["identical"] is True and line["steps"] == 2 and line["ranks"] == 2
        assert "emulated accelerator" in line["note"] and line["dense"] == "emulated"
        assert line["rows_sent"] == line["distinct_rows"] <= line["resent_rows"]
        # Half of the rows go to the other rank, 8 floats each way, and their keys; headers come on top.
        assert line["bytes_sent"] > line["rows_sent"] / 2 * 2 * 8 * 4 * 0.7
        assert 0 < line["p20_ms"] <= line["step_ms"] <= line["p80_ms"]
        assert line["compute_ms"] >= 8
    assert "emulated accelerator" in captured.err
    names = {file.name for file in folder.iterdir()}
    wanted = {"lines.jsonl", "side_by_side.png", "sequential_N1.html", "sequential_N4.html", "nested_N4.html"}
    assert names == wanted
    assert (folder / "side_by_side.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
@pytest.mark.multiprocess
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_steps_of_real_processes_are_equal(capfd, seed: int) -> None:
    """What rests on the order in which threads happen to run shows rarely: the command itself compares every bit."""
    arguments = ["--net", "loopback", "--dense", "cpu", "--shape", "small", "--block", "100", "--repeat", "6"]
    assert main(["bench", "pipeline", *arguments, "--seed", str(seed)]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["identical"] for line in lines if line["impl"] != "async"] == [True] * (len(lines) - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--net", "loopback"],
            "--shape paper-npu gets its size from the link's rate: give --net RATE and --ranks >= 2",
        ),
        (["--net", "1gbit", "--ranks", "1"], "give --net RATE and --ranks >= 2"),
        (["--net", "100kbit"], "--net: too slow for --shape paper-npu"),
        (["--net", "fast"], "a rate is a number with kbit, mbit or gbit, at least 100kbit; got 'fast'"),
        (["--net", "1gbit", "--only", "nested", "best"], "--only: unknown best; choose from sequential, dbp, fwp"),
        (["--net", "1gbit", "--shape", "ml100k"], "--shape ml100k needs --data with the path of MovieLens-100K"),
        (["--net", "1gbit", "--shape", "small", "--data", "x"], "--data goes with --shape ml100k, got it with small"),
        (["--net", "1gbit", "--peers"], "--peers needs tables of fixed size, those of --shape paper-npu are open"),
        (["--net", "loopback", "--shape", "small", "--json", "/nowhere/x"], "--json /nowhere/x: there is no folder"),
    ],
)
def test_requests_that_cannot_be_met(capsys, arguments: list[str], message: str) -> None:
    assert main(["bench", "pipeline", "--dense", "emulated", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_without_iproute2(capsys, monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["bench", "pipeline", "--dense", "emulated", "--net", "1gbit"]) == 1
    assert "network: ip and tc not found: install iproute2" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- batches


def keys_of(batch) -> list[set[int]]:
    return [set(batch.sparse[feature].values().tolist()) for feature in batch.sparse.keys()]  # noqa: SIM118


def test_batches_of_the_paper_s_shape_overlap_as_they_should() -> None:
    shape = pipeline_shapes.sized(pipeline_shapes.SHAPES["paper-npu"], bits_per_second("50mbit"), 2)
    both = [pipeline_shapes.make_batches(shape, rank, 2, 7, None) for rank in (0, 1)]
    for first, second, other in zip(both[0], both[0][1:], both[1]):
        for t, (mine, following, theirs) in enumerate(zip(keys_of(first), keys_of(second), keys_of(other))):
            places = len(first.sparse[f"f{t}"].values())
            assert places == shape.batch * shape.bag
            assert len(mine) == round(places / (1 + shape.twice))
            assert abs(len(mine & following) - shape.carried * len(mine)) < 2
            assert len(mine & theirs) >= int(shape.common * len(mine)) > 0
    again = pipeline_shapes.make_batches(shape, 0, 2, 7, None)
    assert all(torch.equal(a.sparse.values(), b.sparse.values()) for a, b in zip(both[0], again))


def test_the_command_line_offers_the_shapes_and_implementations_there_are(capsys) -> None:
    assert tuple(pipeline_shapes.SHAPES) == PIPELINE_SHAPES
    with pytest.raises(SystemExit):
        main(["bench", "pipeline", "--help"])
    first, *others = pipeline_runs.IMPLEMENTATIONS
    assert f"beside {first}: {', '.join(others)} (all)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("rate", "ranks"), [("500mbit", 2), ("1gbit", 4)])
def test_the_paper_s_shape_is_sized_by_the_link(rate: str, ranks: int) -> None:
    """Rows and their gradients take about the communication's time on the link of each rank."""
    shape = pipeline_shapes.sized(pipeline_shapes.SHAPES["paper-npu"], bits_per_second(rate), ranks)
    distinct = shape.tables * shape.batch * shape.bag / (1 + shape.twice)
    sent_bits = 2 * distinct * (ranks - 1) / ranks * shape.dim * 4 * 8
    assert sent_bits / bits_per_second(rate) * 1e3 == pytest.approx(shape.times.communication, rel=0.06)
    small = pipeline_shapes.SHAPES["small"]
    assert pipeline_shapes.sized(small, None, 2) is small


def test_zipf_batches_are_in_the_tables() -> None:
    shape = pipeline_shapes.PipelineShape(
        "z", "zipf", 2, 500, 8, 16, 5, 2, 3, (8,), (8,), pipeline_shapes.StageTimes(), distinct_batches=3
    )
    first, second = (pipeline_shapes.make_batches(shape, rank, 2, 0, None) for rank in (0, 1))
    assert len(first) == 3 and not torch.equal(first[0].sparse.values(), second[0].sparse.values())
    values = torch.cat([batch.sparse.values() for batch in first + second])
    assert 0 <= int(values.min()) <= int(values.max()) < 500


def test_movielens_batches(ml100k) -> None:
    shape = pipeline_shapes.SHAPES["ml100k"]
    batches = pipeline_shapes.make_batches(shape, 1, 2, 0, str(ml100k))
    assert len(batches) == shape.distinct_batches and {len(batch) for batch in batches} == {shape.batch}


# ----------------------------------------------------------------------------------------------------- emulation


class Clock:
    """time.perf_counter and time.sleep without waiting."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_stages_end_when_the_device_would_have_ended_them(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pipeline_runs, "time", clock)
    times = pipeline_shapes.StageTimes(storage=120, copy=80, routing=50, retrieval=250, compute=296)
    emulation = pipeline_runs.Emulation(times)
    parts = [type("Micro", (), {"indices": range(size)})() for size in (8, 56)]
    batch = type("Batch", (), {"index": 3, "size": 64, "micro": parts})()

    def lasts(stage: str, own_s: float, micro: int = 0) -> float:
        begin = clock.now
        clock.now += own_s
        emulation.hold(stage, batch, micro, begin)
        return clock.now - begin

    assert lasts("forward_backward", 0.01) == pytest.approx(0.037)
    assert lasts("forward_backward", 0.05) == pytest.approx(0.05)
    assert lasts("forward_backward", 0.05, 1) == pytest.approx(0.259)
    assert lasts("route", 0.02) == pytest.approx(0.05)
    assert lasts("copy", 0.0) == pytest.approx(0.08)
    assert lasts("retrieve", 0.03) == pytest.approx(0.03)
    assert lasts("gather_fresh", 0.1) == pytest.approx(0.22)
    assert lasts("gather_all", 0.1) == pytest.approx(0.1)  # a refresh without a retrieval of its own
    assert lasts("update", 0.1) == pytest.approx(0.1)
    begin = clock.now
    assert emulation.fetch("item") == "item" and clock.now - begin == pytest.approx(0.12)


# --------------------------------------------------------------------------------------------------------- lines

FACTS = {
    "shape": {"name": "made up", "dim": 100}, "emulated_ms": None, "dense": "emulated", "net": "8mbit",
    "bits_per_second": 8e6, "ranks": 2, "micro_batches": 8, "threads": 1, "versions": {}, "cpu": "",
}  # fmt: skip


def own(impl: str, parts: int, step_ms: float, **more) -> dict:
    numbers = {
        "impl": impl, "micro_batches": parts, "exact": impl != "async", "step_ms": step_ms, "p20_ms": step_ms,
        "p80_ms": step_ms, "compute_ms": 300.0, "lookup_ms": 490.0, "exposed_lookup_ms": 0.0,
        "exposed_communication_ms": 0.0, "exposed_other_ms": 0.0, "steps": 30, "bytes_sent": 200_000.0, "cpu_ms": 90.0,
        "lanes": {"compute": 300.0, "retrieval": 250.0}, "rows_sent": 10.0, "distinct_rows": 10.0, "first_rows": 1.0,
        "last_rows": 1.0, "edge_rows": 5.0, "resent_rows": 12.0,
        "digests": {"rows of table a": f"{parts}", "parameter b": ""},
    }  # fmt: skip
    return {**numbers, **more}


def report() -> dict:
    first = own("sequential", 1, 1000.0, exposed_lookup_ms=500.0, exposed_communication_ms=200.0)
    eighth = own("sequential", 8, 1100.0, exposed_lookup_ms=500.0, exposed_communication_ms=300.0)
    nested = own("nested", 8, 320.0, exposed_communication_ms=20.0)
    return {"ours": [first, eighth, nested, own("async", 8, 310.0, digests={})], "peers": []}


def test_lines_compare_with_the_best_sequential() -> None:
    other = copy.deepcopy(report())
    other["ours"][2]["step_ms"] = 330.0
    lines = pipeline_lines.make_lines(FACTS, [report(), other])
    assert [line["speedup"] for line in lines] == [1.0, 0.9091, 3.0769, 3.2258]
    nested = lines[2]
    assert nested["step_ms"] == 325.0 and nested["exposed_comm_share"] == 0.1
    assert nested["comm_ms"] == 200.0 and nested["bound_ms"] == 300.0 and nested["bound_by"] == "compute"
    assert nested["edge_ms"] == 2.0
    assert nested["fraction_of_bound"] == round(300 / 325, 4)
    assert [line["identical"] for line in lines] == [True, True, True, None]
    assert set(lines[0]) == FIELDS | COUNTS
    text = pipeline_lines.table(lines)
    assert text[3].split()[:3] == ["nested", "8", "325.00"]
    assert text[-1] == "emulated accelerator: timed waits that use no core; a result about scheduling"


def test_the_slowest_lane_is_the_bound() -> None:
    slow_link = report()
    for one in slow_link["ours"]:
        one["bytes_sent"] = 400_000.0
    assert {line["bound_by"] for line in pipeline_lines.make_lines(FACTS, [slow_link])} == {"link"}
    busy = report()
    busy["ours"][1]["cpu_ms"] = 350.0
    on_cpu = pipeline_lines.make_lines({**FACTS, "dense": "cpu"}, [busy])
    assert [(line["bound_by"], line["bound_ms"]) for line in on_cpu[:3:2]] == [("compute", 300.0), ("cores", 350.0)]
    assert on_cpu[0]["note"] == ""
    without = pipeline_lines.make_lines({**FACTS, "bits_per_second": None}, [report()])
    assert without[0]["comm_ms"] is None and without[0]["bytes_sent"] is None


def test_results_that_differ_are_not_reported() -> None:
    other = report()
    other["ours"][2]["digests"]["parameter b"] = "wrong"
    message = "nested differs from sequential with 8 micro-batches on rank 1, first in the parameter b .1 of 2 differ"
    with pytest.raises(ValueError, match=message):
        pipeline_lines.make_lines(FACTS, [report(), other])


def peer(difference: float) -> dict:
    numbers = {"step_ms": 500.0, "p20_ms": 499.0, "p80_ms": 501.0, "steps": 30, "bytes_sent": 1e5, "cpu_ms": 400.0}
    return {"impl": "torchrec base", **numbers, "lanes": {}, "difference": difference}


def test_peers_have_the_same_fields_and_are_checked() -> None:
    good = {**report(), "peers": [peer(1e-6)]}
    lines = pipeline_lines.make_lines(FACTS, [good, good])
    assert set(lines[-1]) == FIELDS | {"difference"}
    assert lines[-1]["speedup"] == 2.0 and lines[-1]["bound_ms"] is None
    pipeline_lines.table(lines)
    for bad in (2e-3, float("nan")):
        with pytest.raises(ValueError, match=r"torchrec base differs from ours by .* in losses or rows of rank 1"):
            pipeline_lines.make_lines(FACTS, [good, {**report(), "peers": [peer(bad)]}])


# ---------------------------------------------------------------------------------------------------------- link


def test_the_system_s_counters() -> None:
    before = link_meter.LinkMeter("lo").sent_bytes()
    assert before >= 0
    with pytest.raises(OSError, match="no interface 'np7'"):
        link_meter.LinkMeter("np7").sent_bytes()


def test_busy_times_of_the_link() -> None:
    sampler = link_meter.LinkSampler(link_meter.LinkMeter("lo"), 8e9)  # one byte in a nanosecond
    sampler._samples = [(0, 0), (100, 90), (200, 180), (300, 181), (400, 270)]
    name = link_meter.LINK_LANE
    assert sampler.spans() == [
        Span(name, "link", 0, None, 0, 200, "communication", False),
        Span(name, "link", 0, None, 300, 400, "communication", False),
    ]
