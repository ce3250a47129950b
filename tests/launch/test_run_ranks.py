"""The launcher with real processes: who failed first, deadlines, Ctrl-C, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from nestpipe_kernels.errors import CommunicationError
from nestpipe_kernels.launch import init_rank, run_ranks

PROGRAM = str(Path(__file__).with_name("rank_program.py"))
LIMIT_S = 60.0

pytestmark = pytest.mark.multiprocess


def run(case: str, folder: Path, nproc: int = 2, timeout_s: float = LIMIT_S) -> int:
    return run_ranks([sys.executable, PROGRAM, case, str(folder)], nproc, timeout_s=timeout_s)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def assert_nothing_left(folder: Path) -> None:
    pids = [int(file.read_text()) for pattern in ("pid*", "grandchild*") for file in folder.glob(pattern)]
    assert pids
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if is_running(pid)] == []


def test_ranks_exchange_and_rank_0_is_heard(tmp_path, capfd):
    assert run("ok", tmp_path) == 0
    out, err = capfd.readouterr()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    policy = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    assert out == f"out 0 [0.0, 1.0] {os.environ.get('OMP_NUM_THREADS', threads)} {policy}\n"
    assert "err 0\n" in err
    assert "err 1" not in err
    assert "failed" not in err
    assert_nothing_left(tmp_path)


def test_a_rank_that_raises_is_named_with_its_error(tmp_path, capfd):
    assert run("raise", tmp_path) == 1
    err = capfd.readouterr().err
    assert err.splitlines()[-1] == "rank 1 failed first: exited with code 1: ValueError: bad id"
    assert "[rank 1] Traceback (most recent call last):" in err


def test_fault_38_a_killed_rank_is_named_and_the_others_end_by_themselves(tmp_path, capfd):
    assert run("kill", tmp_path) == 128 + signal.SIGKILL
    err = capfd.readouterr().err
    assert err.splitlines()[-1] == "rank 1 failed first: killed by signal 9 (SIGKILL)"
    assert "CommunicationError: rows exchange 'test': rank 0 of 2 got no answer after" in err
    assert f"rank 1 (process {(tmp_path / 'pid1').read_text()}) has ended" in err
    assert f"rank 1 was killed by signal 9 (SIGKILL); the other ranks have {LIMIT_S + 5:g} s to end" in err
    assert_nothing_left(tmp_path)


def test_a_rank_that_exits_early_is_mentioned(tmp_path, capfd):
    assert run("early", tmp_path) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("rank 0 failed first: exited with code 1: nestpipe_kernels.errors.CommunicationError: ")
    assert last.endswith("(rank 1 had already exited with code 0)")


def test_a_rank_that_only_reports_another_is_not_the_first(tmp_path, capfd):
    assert run("slow_to_die", tmp_path) == 2
    assert capfd.readouterr().err.splitlines()[-1] == "rank 0 failed first: exited with code 2: ValueError: bad id"


def test_a_rank_that_aborts_after_complaining_of_another_is_not_the_first(tmp_path, capfd):
    assert run("aborts", tmp_path) == 3
    assert capfd.readouterr().err.splitlines()[-1] == "rank 1 failed first: exited with code 3"


def test_ranks_that_do_not_end_are_terminated(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("nestpipe_kernels.launch.run.GRACE_S", 0.2)
    assert run("stubborn", tmp_path, timeout_s=0.2) == 3
    err = capfd.readouterr().err
    assert "rank 1 exited with code 3; the other ranks have 0.4 s to end" in err
    assert err.splitlines()[-1] == "rank 1 failed first: exited with code 3"
    assert_nothing_left(tmp_path)


def start_launcher(folder: Path, case: str) -> subprocess.Popen[str]:
    code = (
        "import sys; from nestpipe_kernels.launch import run_ranks; "
        f"sys.exit(run_ranks([sys.executable, {PROGRAM!r}, {case!r}, {str(folder)!r}], 2, timeout_s=60))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LIMIT_S
    while len(list(folder.glob("ready*"))) < 2 and time.monotonic() < deadline and launcher.poll() is None:
        time.sleep(0.05)
    assert len(list(folder.glob("ready*"))) == 2
    return launcher


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_ranks_and_what_they_started(tmp_path, number):
    launcher = start_launcher(tmp_path, "sleep")
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 130
    assert err.splitlines()[-1] == "interrupted; all ranks have ended"
    assert_nothing_left(tmp_path)


def test_ranks_end_when_the_launcher_is_killed(tmp_path):
    launcher = start_launcher(tmp_path, "sleep_joined")
    launcher.kill()
    launcher.communicate(timeout=LIMIT_S)
    assert_nothing_left(tmp_path)


def test_the_launcher_works_outside_the_main_thread(tmp_path):
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run("raise", tmp_path)))
    thread.start()
    thread.join(LIMIT_S)
    assert codes == [1]


def test_bad_requests(tmp_path):
    with pytest.raises(ValueError, match="launch: nproc must be >= 1, got 0"):
        run("ok", tmp_path, nproc=0)
    with pytest.raises(ValueError, match="launch: command is empty"):
        run_ranks([], 2)
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        run_ranks([str(tmp_path / "no-such-program")], 2)


def test_init_rank_without_a_launcher_and_with_half_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert init_rank() == (0, 1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="launch: WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing in the environment"):
        init_rank()


def test_init_rank_without_a_rendezvous(monkeypatch):
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommunicationError, match=r"rank 1 of 2 could not join at 127\.0\.0\.1:9 within 1 s: "):
        init_rank(1.0)
    # Another try joins: groups have names by a count of torch's, which a meeting that failed leaves alone.
    assert torch.distributed.distributed_c10d._world.group_count == 0
