"""The frame of the kernel cases: lines, turns, checks, floors, several cases in a command, pictures, revisions."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import nestpipe_kernels
from nestpipe_kernels.cli import bench as command
from nestpipe_kernels.cli.main import main

case = pytest.importorskip("nestpipe_kernels.bench.case", reason="the suite comes with the installed package")
from nestpipe_kernels.bench import compare, machine_floor  # noqa: E402

FIELDS = {
    "case", "shape", "impl", "dtype", "threads", "median_ms", "p20_ms", "p80_ms", "gb_per_s", "fraction_of_floor",
    "versions", "cpu",
}  # fmt: skip
LINE = {"case": "c", "shape": {"n": 1}, "threads": 1, "impl": "x", "cpu": "?", "median_ms": 4.0}
SMALL = {
    "dedup": ["--keys", "3000", "--zipf-keys", "500", "--repeat", "2"],
    "intersect": ["--keys", "3000", "500", "--repeat", "2"],
    "row_sync": ["--rows", "300", "--dim", "8", "20", "--repeat", "2"],
    "row_update": ["--rows", "300", "--dim", "8", "20", "--repeat", "2", "--optimizer", "sgd", "adagrad", "adam"],
}


def _lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def toys(monkeypatch) -> dict[str, list]:
    """Two cases `toy` and `toyish` whose implementations only note what is called."""
    calls: dict[str, list] = {"toy": [], "toyish": []}
    for name, called in calls.items():
        module = types.ModuleType(f"nestpipe_kernels.bench.{name}")

        def add_options(parser, name=name) -> None:
            parser.add_argument("--size", type=int, default=len(name))

        def setups(parsed, called=called):
            def step(impl: str):
                return lambda k: called.append((impl, k)) or torch.arange(parsed.size)

            ours, peer = case.Implementation("ours", step("ours")), case.Implementation("peer", step("peer"))
            yield case.Setup({"size": parsed.size}, [ours, peer] if parsed.peers else [ours], 4e6, 1e3)

        module.add_options, module.setups = add_options, setups
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(command, "KERNEL_CASES", dict.fromkeys(calls, "a toy"))
    return calls


@pytest.mark.parametrize("name", sorted(SMALL))
def test_case_prints_a_line_for_each_shape_implementation_and_thread_count(capsys, tmp_path, name: str) -> None:
    path = tmp_path / "lines.jsonl"
    assert main(["bench", name, *SMALL[name], "--peers", "--threads", "1", "2", "--json", str(path)]) == 0
    lines = _lines(capsys.readouterr().out)
    assert lines == _lines(path.read_text())
    assert len(lines) >= 2 * 2 * 2
    assert {line["threads"] for line in lines} == {1, 2}
    for line in lines:
        assert set(line) == FIELDS
        assert (line["case"], lines[0]["impl"]) == (name, "nestpipe")
        assert 0 < line["p20_ms"] <= line["median_ms"] <= line["p80_ms"]
        assert line["gb_per_s"] > 0 and line["fraction_of_floor"] > 0


FIND_OR_INSERT = ["bench", "find_or_insert", "--keys", "3000", "--batch", "1000", "--dim", "8", "--repeat", "2"]


def test_find_or_insert_without_its_peer(capsys, monkeypatch) -> None:
    find_or_insert = importlib.import_module("nestpipe_kernels.bench.find_or_insert")
    monkeypatch.setattr(find_or_insert, "load", lambda: (None, "absl (no compiler)"))
    assert main([*FIND_OR_INSERT, "--peers", "--threads", "1", "2"]) == 0
    out, err = capsys.readouterr()
    assert "left out: absl (no compiler)" in err
    lines = _lines(out)
    assert [(x["shape"]["mix"], x["threads"], x["impl"]) for x in lines] == [
        (mix, threads, "nestpipe") for threads in (1, 2) for mix in ("hits", "misses", "half")
    ]


def test_growth_counts_every_call(capsys, monkeypatch) -> None:
    growth = importlib.import_module("nestpipe_kernels.bench.growth")
    monkeypatch.setattr(growth, "load", lambda: (None, "absl (no compiler)"))
    arguments = ["--keys", "2500", "--batch", "1000", "--dim", "8", "--repeat", "1", "--peers", "--threads", "1"]
    assert main(["bench", "growth", *arguments]) == 0
    out, err = capsys.readouterr()
    assert "left out: absl (no compiler)" in err
    (line,) = _lines(out)
    assert set(line) == FIELDS | {"max_ms", "max_over_median", "index_bytes_per_key"}
    assert line["max_ms"] >= line["p80_ms"] and line["max_over_median"] >= 1
    assert 16 < line["index_bytes_per_key"] < 100


def test_capacity_says_what_a_key_takes(capsys) -> None:
    arguments = ["--keys", "6000", "--small", "2000", "--batch", "500", "--fill", "900", "--dim", "8", "--repeat", "2"]
    assert main(["bench", "capacity", *arguments, "--threads", "1"]) == 0
    small, large = _lines(capsys.readouterr().out)
    assert (small["impl"], large["impl"]) == ("nestpipe, 2000 keys", "nestpipe, 6000 keys")
    assert set(small) == FIELDS | {
        "ns_per_key", "over_small", "process_bytes", "store_bytes", "untouched_bytes", "bytes_per_key",
    }  # fmt: skip
    assert small["over_small"] == 1
    assert large["over_small"] == pytest.approx(large["median_ms"] / small["median_ms"], rel=0.01)
    assert large["ns_per_key"] == pytest.approx(large["median_ms"] * 1e6 / 500, rel=0.01)
    assert 12 + 40 + 32 < large["bytes_per_key"] < 300


def test_capacity_compares_the_tables_first(monkeypatch) -> None:
    capacity = importlib.import_module("nestpipe_kernels.bench.capacity")
    parsed = argparse.Namespace(keys=60, small=20, batch=10, fill=30, dim=4, seed=0)
    (setup,) = capacity.setups(parsed)
    setup.check()
    changed = iter((0.25, 0.5))
    made = capacity.EmbeddingStore
    monkeypatch.setattr(
        capacity, "EmbeddingStore", lambda **given: made(**{**given, "init": capacity.Constant(next(changed))})
    )
    (setup,) = capacity.setups(parsed)
    with pytest.raises(ValueError, match="bench capacity: the tables' rows differ; nothing was timed"):
        setup.check()


@pytest.mark.soak
def test_find_or_insert_beside_absl(capsys) -> None:
    _, missing = importlib.import_module("nestpipe_kernels.bench.absl_peer").load()
    if missing:
        pytest.skip(missing)
    assert main([*FIND_OR_INSERT, "--peers", "--threads", "1", "2"]) == 0
    lines = _lines(capsys.readouterr().out)
    assert len(lines) == 3 * 3 * 2
    assert {"nestpipe", "absl::flat_hash_map + memcpy"} < {line["impl"] for line in lines}


def test_absl_s_absence_has_a_reason(monkeypatch, tmp_path) -> None:
    absl_peer = importlib.import_module("nestpipe_kernels.bench.absl_peer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(absl_peer, "__file__", str(tmp_path / "absl_peer.py"))
    assert "comes with a checkout" in absl_peer.load()[1]
    (tmp_path / "absl_peer.cpp").write_text("#error no absl here\n")
    monkeypatch.setattr(absl_peer.shutil, "which", lambda name: None)
    assert "no C++ compiler" in absl_peer.load()[1]
    monkeypatch.setattr(absl_peer.shutil, "which", lambda name: "/bin/false" if name == "c++" else None)
    assert "Debian has it in libabsl-dev" in absl_peer.load()[1]


def test_two_processes_exchange(capsys) -> None:
    assert main(["bench", "exchange", "--rows", "40", "--dim", "4", "--repeat", "2", "--peers", "--threads", "1"]) == 0
    lines = _lines(capsys.readouterr().out)
    assert [line["impl"] for line in lines] == ["nestpipe", "torch.distributed.all_to_all_single (gloo)"]
    assert lines[0]["shape"]["bytes_sent"] == 40 * 4 * 4


def test_several_cases_have_their_default_shapes(capsys, toys) -> None:
    assert main(["bench", "toy", "toyish", "--peers", "--repeat", "2"]) == 0
    lines = _lines(capsys.readouterr().out)
    assert [(x["case"], x["shape"]["size"], x["impl"]) for x in lines] == [
        ("toy", 3, "ours"), ("toy", 3, "peer"), ("toyish", 6, "ours"), ("toyish", 6, "peer"),
    ]  # fmt: skip


def test_one_case_has_its_own_options_and_several_do_not_mix_them(capsys, toys) -> None:
    assert main(["bench", "toyish", "--size", "9", "--repeat", "1"]) == 0
    assert [x["shape"]["size"] for x in _lines(capsys.readouterr().out)] == [9]
    assert main(["bench", "toy", "toyish", "--size", "9", "--repeat", "1"]) == 1
    assert "--size goes with one case alone" in capsys.readouterr().err


def test_unknown_further_case_is_named(capsys) -> None:
    assert main(["bench", "intersect", "tier"]) == 1
    assert "tier is not a kernel case; they are" in capsys.readouterr().err


def test_implementations_take_turns_after_a_check(capsys, toys) -> None:
    assert main(["bench", "toy", "--peers", "--repeat", "2"]) == 0
    check, rounds = toys["toy"][:2], toys["toy"][2:]
    assert check == [("ours", 0), ("peer", 0)]
    assert rounds == [(impl, k) for k in (-2, -1, 0, 1) for impl in ("ours", "peer")]


def test_preparation_is_not_timed_and_the_budget_ends_the_rounds(capsys) -> None:
    prepared: list[int] = []

    def prepare(k: int) -> None:
        prepared.append(k)
        time.sleep(0.02)

    times = case.measure([case.Implementation("x", lambda k: None, prepare)], repeat=1000, budget_s=0.1)
    assert prepared[:3] == [-2, -1, 0]
    assert 1 <= len(times["x"]) < 20
    assert min(times["x"]) < 20
    assert "of 1000 rounds" in capsys.readouterr().err


def test_warmed_steps_come_after_one_that_is_not_timed() -> None:
    calls: list[tuple[str, int]] = []
    one = case.Implementation("x", lambda k: calls.append(("step", k)), lambda k: calls.append(("prepare", k)))
    times = case.measure([one], repeat=2, warmed=True)
    assert len(times["x"]) == 2
    assert calls == [(what, k) for k in (-2, -1, 0, 1) for what in ("prepare", "step") * 2]


def test_list_that_is_not_rebuilt_is_not_timed(capsys, monkeypatch) -> None:
    from nestpipe_kernels.bench import dedup as module

    right = module.dedup
    for wrong in (
        lambda keys: right(keys)._replace(inverse=right(keys).inverse.flip(0)),
        lambda keys: right(torch.arange(len(keys)))._replace(unique_index=torch.arange(len(keys))),
    ):
        monkeypatch.setattr(module, "dedup", wrong)
        assert main(["bench", "dedup", "--kinds", "zipf", "--zipf-keys", "300", "--peers", "--repeat", "1"]) == 1
        assert "bench dedup: nestpipe does not rebuild the list of keys; nothing was timed" in capsys.readouterr().err


def test_result_that_differs_is_not_timed() -> None:
    right = case.Implementation("right", lambda k: (torch.arange(3), torch.zeros(2)))
    for other in ((torch.arange(3), torch.ones(2)), (torch.arange(3),), (torch.arange(4), torch.zeros(2))):
        wrong = case.Implementation("wrong", lambda k, other=other: other)
        with pytest.raises(ValueError, match="bench toy: wrong computes something else than right; nothing was timed"):
            case.check_equal("toy", [right, wrong])
    case.check_equal("toy", [right, right])


def test_floor_counts_bytes_and_lines() -> None:
    machine = machine_floor.MachineFloor(1, bytes_per_s=1e9, lines_per_s=1e6)
    assert machine_floor.floor_ms(3e6, 2e3, machine) == pytest.approx(5.0)
    assert [machine_floor.lines_of(n) for n in (4, 64, 65, 256)] == [1, 1, 2, 4]
    setup = case.Setup({}, [], bytes_streamed=1e8, random_lines=1e6)
    (line,) = case.lines("toy", 1, setup, {"x": [40.0]})
    assert line["fraction_of_floor"] == pytest.approx((10 + 10) / 40)
    assert line["gb_per_s"] == pytest.approx(0.164 / 0.040)


def test_machine_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(machine_floor, "COPY_FLOATS", 1 << 18)
    monkeypatch.setattr(machine_floor, "RANDOM_LINES", 1 << 14)
    threads = torch.get_num_threads()
    monkeypatch.setattr(machine_floor, "_copy_rate", machine_floor._copy_rate.__wrapped__)
    found = machine_floor.machine_floor.__wrapped__(1, 4)
    assert found.bytes_per_s > 0 and found.lines_per_s > 0
    assert torch.get_num_threads() == threads


def test_pictures_are_drawn(capsys, tmp_path, toys) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["bench", "toy", "toyish", "--peers", "--repeat", "1", "--threads", "1", "2"]
    assert main([*arguments, "--plot", str(tmp_path)]) == 0
    for name in toys:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_revision_and_the_present_take_turns(capsys, tmp_path, monkeypatch) -> None:
    ran = []

    def lines(name: str, path: str, arguments: list[str]) -> list[dict]:
        ran.append((name, path, arguments))
        return [{**LINE, "median_ms": 4.0 if name == "now" else 6.0}]

    monkeypatch.setattr(compare, "build", lambda revision, folder: Path("/package/of") / revision)
    monkeypatch.setattr(compare, "_lines", lines)
    path = tmp_path / "ratios.jsonl"
    arguments = ["bench", "row_sync", "--rows", "50", "--threads", "1", "2"]
    assert main([*arguments, "--compare", "v0", f"--json={path}"]) == 0
    (line,) = _lines(capsys.readouterr().out)
    assert _lines(path.read_text()) == [line]
    assert (line["revision"], line["ratio"]) == ("v0", 1.5)
    assert ran == [("then", "/package/of/v0", arguments), ("now", "", arguments)] * compare.ROUNDS


@pytest.mark.soak
def test_a_package_elsewhere_runs(capsys, monkeypatch) -> None:
    monkeypatch.setattr(compare, "build", lambda revision, folder: Path(nestpipe_kernels.__file__).parents[1])
    monkeypatch.setattr(compare, "ROUNDS", 1)
    arguments = ["bench", "row_sync", "--rows", "50", "--dim", "8", "--repeat", "1", "--threads", "1"]
    assert main([*arguments, "--compare", "v0"]) == 0
    (line,) = _lines(capsys.readouterr().out)
    assert line["ratio"] == pytest.approx(line["then_ms"] / line["now_ms"], rel=0.2)


def test_ratios_pair_what_is_alike() -> None:
    one = LINE
    new = {**one, "impl": "y"}
    found = compare.ratios(
        [one, {**one, "median_ms": 8.0}, {**one, "median_ms": 6.0}], [{**one, "median_ms": 3.0}, new], "v0"
    )
    assert [(x["impl"], x["then_ms"], x["now_ms"], x["ratio"]) for x in found] == [
        ("x", 6.0, 3.0, 2.0), ("y", None, 4.0, None),
    ]  # fmt: skip


def test_revision_that_is_not_there_is_named(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "row_sync", "--compare", "no-such-revision"]) == 1
    assert "git has no revision 'no-such-revision' here" in capsys.readouterr().err
