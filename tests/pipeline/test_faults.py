"""Real runs that go wrong on one rank: the others end in time, that rank is named, nothing is left behind.

In the soak: what test_process_faults (a loader that fails) and test_run_ranks (rank 1 killed) show in less time."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestpipe_kernels.errors import RemoteRankError
from nestpipe_kernels.launch import run_ranks

PROGRAM = str(Path(__file__).with_name("fault_program.py"))
TIMEOUT_S = 4.0
GRACE_S = 5.0

pytestmark = pytest.mark.multiprocess


def run(case: str, folder: Path, nproc: int = 2, launcher_s: float = TIMEOUT_S) -> int:
    return run_ranks([sys.executable, PROGRAM, case, str(folder), str(TIMEOUT_S)], nproc, timeout_s=launcher_s)


def ended(folder: Path, rank: int) -> tuple[float, list[str]]:
    """When a rank ended by itself, and its exception with all its causes."""
    when, *causes = (folder / f"end{rank}").read_text().splitlines()
    return float(when), causes


def assert_nothing_left(folder: Path) -> None:
    for file in folder.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("case", "stage", "message"),
    [
        ("model", "forward_backward", "ArithmeticError: the model broke"),
        pytest.param("loader", "prefetch", "OSError: the disk is gone", marks=pytest.mark.soak),
    ],
)
def test_fault_38_an_exception_on_one_rank(tmp_path, capfd, case, stage, message):
    assert run(case, tmp_path) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == f"rank 1 failed first: exited with code 1: {message}"
    assert ended(tmp_path, 1)[1][0] == message
    when, causes = ended(tmp_path, 0)
    assert causes[0] == f"RemoteRankError: rank 1 failed in {stage} of batch 3: {message}"
    assert when - ended(tmp_path, 1)[0] < TIMEOUT_S + GRACE_S
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_fault_38_a_rank_killed_in_the_middle(tmp_path, capfd, dead):
    assert run(f"kill{dead}", tmp_path, nproc=3) == 128 + signal.SIGKILL
    *lines, last = capfd.readouterr().err.splitlines()
    assert last == f"rank {dead} failed first: killed by signal 9 (SIGKILL)"
    said = [line for line in lines if re.search(rf"; rank {dead} \(process \d+\) has ended", line)]
    assert said, lines
    # The launcher repeats another's words only where rank 0, whose own are printed, has none.
    assert sum(bool(re.match(r"rank [012] said: ", line)) for line in said) == (dead == 0), said
    killed_at = float((tmp_path / f"ready{dead}").read_text())
    for rank in {0, 1, 2} - {dead}:
        when, causes = ended(tmp_path, rank)
        assert causes[0].startswith("CommunicationError: "), causes
        assert when - killed_at < TIMEOUT_S + GRACE_S
    assert any(f"rank {dead} (process " in cause for rank in {0, 1, 2} - {dead} for cause in ended(tmp_path, rank)[1])
    assert_nothing_left(tmp_path)


def test_a_rank_that_stops_for_longer_than_the_time_out(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("nestpipe_kernels.launch.run.GRACE_S", 0.5)
    assert run("stop", tmp_path, launcher_s=1.0) == 128 + signal.SIGKILL
    # The stopped rank cannot say anything: the launcher ends it, and names it since the other only complains of it.
    *lines, last = capfd.readouterr().err.splitlines()
    assert last == "rank 1 failed first: killed by signal 9 (SIGKILL)"
    assert any(re.search(r"; rank 1 \(process \d+\) is stopped", line) for line in lines), lines
    assert not any("rank 0 said" in line for line in lines)
    when, causes = ended(tmp_path, 0)
    assert causes[0].startswith("CommunicationError: "), causes
    assert f"got no answer after {TIMEOUT_S:g}." in causes[0]
    assert when - float((tmp_path / "ready1").read_text()) < TIMEOUT_S + GRACE_S
    assert_nothing_left(tmp_path)


def test_ctrl_c_in_the_middle_of_training(tmp_path):
    code = (
        "import sys; from nestpipe_kernels.launch import run_ranks; "
        f"sys.exit(run_ranks([sys.executable, {PROGRAM!r}, 'endless', {str(tmp_path)!r}, '60'], 2, timeout_s=60))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline and launcher.poll() is None:
        time.sleep(0.02)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert err.splitlines()[-1] == "interrupted; all ranks have ended"
    # A rank that does not get to say so in time has been killed by the launcher.
    kinds = {ended(tmp_path, rank)[1][0].partition(":")[0] for rank in (0, 1) if (tmp_path / f"end{rank}").exists()}
    assert "KeyboardInterrupt" in kinds
    assert_nothing_left(tmp_path)


def test_a_remote_error_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(RemoteRankError(1, "route", 3, "ValueError: bad")))
    assert str(error) == "rank 1 failed in route of batch 3: ValueError: bad"
    assert (error.rank, error.stage, error.batch, error.message) == (1, "route", 3, "ValueError: bad")
