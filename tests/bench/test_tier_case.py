"""Case `tier` of the suite: its lines, that both processes end with the same bits, and that nothing is left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading

import pytest

from nestpipe_kernels.cli.main import main

case = pytest.importorskip("nestpipe_kernels.bench.tier", reason="the suite comes with the installed package")
memory_limit = pytest.importorskip("nestpipe_kernels.bench.memory_limit")

SMALL = ["--memory", "1", "--batch", "32", "--bag", "2", "--dim", "16", "--tables", "2", "--threads", "1"]
STEPS = ["--warm-up", "8", "--repeat", "7", "--dense", "emulated", "--compute-ms", "4"]


class WorkerInThread(case.Worker):
    """Saves two starts of Python; a control group would hold this whole process."""

    def __init__(self, settings):
        self.connection, theirs = multiprocessing.Pipe()
        self.thread = threading.Thread(target=case.serve, args=(theirs, settings), daemon=True)
        self.thread.start()

    def end(self):
        self.connection.close()
        self.thread.join(60)


@pytest.fixture
def in_threads(monkeypatch):
    monkeypatch.setattr(case, "Worker", WorkerInThread)
    monkeypatch.setattr(case, "make_memory_limit", lambda name: None)


def test_lines_of_both(in_threads, capsys, tmp_path):
    (tmp_path / "files").mkdir()
    where = ["--directory", str(tmp_path / "files"), "--json", str(tmp_path / "lines")]
    assert main(["bench", "tier", *SMALL, *STEPS, *where]) == 0
    memory, tier = lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()] == lines
    assert [memory["impl"], tier["impl"]] == ["in memory", "file tier"]
    shape = tier["shape"]
    assert shape == memory["shape"] and shape["dense"] == "emulated" and shape["steps"] == 20
    assert 4_100_000 < shape["store_bytes"] <= 4 << 20 and shape["memory_bytes"] == 1 << 20
    assert shape["limit"] == "the tier's own account"
    assert tier["cold_pages"] > 0 and tier["random_reads_per_s"] > 0
    assert tier["bound_ms"] == max(memory["median_ms"], tier["disk_ms"])
    assert tier["over_bound"] == pytest.approx(tier["median_ms"] / tier["bound_ms"], rel=1e-3)
    assert list((tmp_path / "files").iterdir()) == []


def test_a_directory_that_is_not_there(capsys, tmp_path):
    assert main(["bench", "tier", *SMALL, *STEPS, "--directory", str(tmp_path / "gone")]) != 0
    assert "No such file or directory" in capsys.readouterr().err


def test_a_group_for_memory_is_removed_again():
    group = memory_limit.make_memory_limit("nestpipe-test")
    if group is None:
        pytest.skip("control groups that count memory are not at hand")
    group.set(64 << 20)
    assert group.usage() >= 0 and group.kind.startswith("cgroup memory.") and str(os.getpid()) in group.directory.name
    group.remove()
    assert not group.directory.exists()
