"""One started rank: its process (leader of its own group), the end of its stderr, and how it ended."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

__all__ = ["Child"]

TAIL_LINES = 40


class Child:
    """Starts the command as rank `rank`; `on_exit(child)` is called once, on a thread of its own, when it has ended.

    `launcher_pipe` is the reading end of a pipe that closes with the launcher; the child inherits it. Rank 0 shares the
    launcher's stdout and its stderr is passed on; of the others only the end of stderr is kept.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        launcher_pipe: int,
        on_exit: Callable[[Child], None],
    ) -> None:
        self.rank = rank
        self.ended_at = 0.0
        self._reaping = threading.Lock()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            pass_fds=(launcher_pipe,),
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stderr,), name=f"nestpipe-stderr-{rank}", daemon=True
        )
        self._waiter = threading.Thread(target=self._wait, args=(on_exit,), name=f"nestpipe-wait-{rank}", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, minus the signal's number if one ended it, None while it runs."""
        return self._process.returncode if self.ended_at else None

    @property
    def tail(self) -> list[str]:
        """The last lines of stderr that are not blank."""
        return list(self._tail)

    def signal(self, number: int) -> None:
        """Send a signal to the rank's process group: it and what it started. Nothing once it has ended."""
        with self._reaping:
            if self._process.returncode is None:
                self._signal_group(number)

    def describe(self) -> str:
        """How it ended: `killed by signal 9 (SIGKILL)`, `exited with code 3: ValueError: bad id`."""
        code = self.code
        if code is None:
            return "is still running"
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = "unknown"
            return f"killed by signal {-code} ({name})"
        last = self._tail[-1].strip() if code and self._tail else ""
        return f"exited with code {code}" + (f": {last}" if last else "")

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # nobody of the group is left

    def _read(self, stream: IO[bytes]) -> None:
        """Keep the last lines; pass rank 0's on as they come (progress bars end in no newline)."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        open_line = ""
        while chunk := os.read(stream.fileno(), 65536):
            text = decoder.decode(chunk)
            if self.rank == 0:
                sys.stderr.write(text)
                sys.stderr.flush()
            *lines, open_line = (open_line + text).replace("\r", "\n").split("\n")
            self._keep(lines)
        self._keep([open_line])
        stream.close()

    def _keep(self, lines: Sequence[str]) -> None:
        # torch.distributed puts the rank before every line of an uncaught exception; our report does so itself.
        own = f"[rank{self.rank}]: "
        self._tail.extend(line.removeprefix(own).rstrip() for line in lines if line.strip())

    def _wait(self, on_exit: Callable[[Child], None]) -> None:
        """Wait, end what the rank has left behind while its process id is still reserved, then reap it."""
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            ended_at = time.monotonic()
            with self._reaping:
                self._signal_group(signal.SIGKILL)
                self._process.wait()
        else:
            self._process.wait()
            ended_at = time.monotonic()
        self._reader.join(1.0)
        self.ended_at = ended_at
        on_exit(self)
