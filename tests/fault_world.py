"""Worlds of real rank processes in which one thing goes wrong, for tests of what the others do.

`FaultWorld.play(case)` forks the ranks of a case from a server process that has everything imported
(tests/fault_server.py), so that a world costs a fraction of a second, and tells how each rank ended.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("fault_server.py")
GRACE_S = 5.0
START_S = 90.0
"""What a start on a busy machine may take at most."""


@dataclass
class Fault:
    """What happens to a rank when it comes to a stage of a batch (before the stage does its work).

    kind: "kill", "stop", "exit", "interrupt" (signals and exits of the whole process); "raise" (an error that nothing
    in the stage expects); "tell" (tells the test and waits for its leave).
    """

    rank: int
    kind: str
    stage: str
    batch: int = 5
    micro: int = 0


@dataclass
class Case:
    """A run of `batches` batches on `size` ranks.

    special: what is odd about model, data or messages (see fault_server); special_rank: on which rank.
    """

    folder: str
    schedule: str = "nested"
    size: int = 2
    batches: int = 8
    timeout_s: float = 10.0
    fault: Fault | None = None
    special: str = ""
    special_rank: int = 1
    save_after: int = 0
    load: bool = False
    workers: str = ""
    """Batches come from two DataLoader workers that start so: "fork" or "spawn"."""
    network: list[str] = field(default_factory=list)
    """Per rank, the network namespace to enter."""
    whole_exit: bool = False
    """The interpreter takes itself apart at the end, as it does in a user's program."""
    early_send: bool = False


@dataclass
class Ended:
    """How a rank's process ended."""

    rank: int
    status: int
    """As Popen.returncode."""
    at: float
    """time.monotonic()"""
    errors: list[str] = field(default_factory=list)
    """Its exception and that one's causes, if it could still say."""
    output: str = ""

    def said(self) -> str:
        return " | ".join(self.errors)


class FaultWorld:
    """The server; one per test module."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "NESTPIPE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._read(START_S) == {"ready": True}
        self._pids: dict[int, int] = {}

    def _read(self, limit_s: float) -> dict[str, Any]:
        """The server's next line. It writes whole lines and never two at once."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout.fileno()], [], [], limit_s)
        if not ready:
            raise TimeoutError(f"nothing from the fault server within {limit_s} s")
        data = b""
        while not data.endswith(b"\n"):
            piece = os.read(self._process.stdout.fileno(), 1)
            if not piece:
                raise EOFError("the fault server has ended")
            data += piece
        answer: dict[str, Any] = json.loads(data)
        return answer

    def start(self, case: Case) -> None:
        """Fork the ranks of a case."""
        Path(case.folder).mkdir(parents=True, exist_ok=True)
        os.mkfifo(Path(case.folder) / "leave")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(case)) + "\n")
        self._process.stdin.flush()
        self._pids = {int(rank): pid for rank, pid in self._read(START_S)["pids"].items()}

    @property
    def pids(self) -> dict[int, int]:
        """Processes of the case that runs, or ran last."""
        return dict(self._pids)

    def finish(self, case: Case, limit_s: float = START_S, leave_when_alone: bool = False) -> dict[int, Ended]:
        """Wait for all ranks; those that are still there after `limit_s` seconds are killed. `leave_when_alone`: a rank
        that waits for leave gets it when all others have ended."""
        ended: dict[int, Ended] = {}
        deadline = time.monotonic() + limit_s
        late = False
        while len(ended) < case.size:
            try:
                told = self._read(max(deadline - time.monotonic(), 0.0) if not late else START_S)
            except TimeoutError:
                if late:
                    raise
                late = True
                for rank, pid in self._pids.items():
                    if rank not in ended:
                        os.kill(pid, signal.SIGKILL)  # the server reaps, so the number cannot be anybody else's
                continue
            rank = told["rank"]
            stopped = case.fault is not None and case.fault.kind == "stop" and case.fault.rank not in ended
            if stopped and len(ended) == case.size - 2 and rank != case.fault.rank:
                os.kill(self._pids[case.fault.rank], signal.SIGKILL)  # the others have ended: nothing else will end it
            ended[rank] = Ended(rank, told["status"], told["at"])
            if leave_when_alone and len(ended) == case.size - 1:
                give_leave(case)
            folder = Path(case.folder)
            ended[rank].output = (folder / f"out{rank}").read_text(errors="replace")
            if (folder / f"end{rank}").exists():
                ended[rank].errors = json.loads((folder / f"end{rank}").read_text())
        return ended

    def play(self, case: Case, limit_s: float = START_S) -> dict[int, Ended]:
        self.start(case)
        return self.finish(case, limit_s)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def hit_at(case: Case, rank: int) -> float:
    """When (time.monotonic()) the fault struck."""
    return float((Path(case.folder) / f"hit{rank}").read_text())


def await_hit(case: Case, rank: int, alive: Callable[[], bool] = lambda: True) -> None:
    """Wait until a rank with a "tell" fault is there."""
    deadline = time.monotonic() + START_S
    while not (Path(case.folder) / f"hit{rank}").exists():
        assert time.monotonic() < deadline and alive(), f"rank {rank} did not come to its fault"
        time.sleep(0.02)


def give_leave(case: Case) -> None:
    """Let a rank that has told go on."""
    with open(Path(case.folder) / "leave", "w") as pipe:
        pipe.write("go")


def outcomes(case: Case) -> list[Any]:
    """What every rank of a case that ran to its end has (testing.explorer.Outcome), by rank."""
    return [pickle.loads((Path(case.folder) / f"outcome{rank}").read_bytes()) for rank in range(case.size)]


def assert_nothing_left(case: Case, world: FaultWorld) -> None:
    """No process of the ranks' sessions, and no shared memory of theirs."""
    pids = {int(text) for file in Path(case.folder).glob("pids*") for text in file.read_text().split()}
    pids |= set(world.pids.values())
    deadline = time.monotonic() + 30
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    names = [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)]
    assert names == []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
