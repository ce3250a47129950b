"""A limit on the memory of other processes, page cache included: a control group of Linux, version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryLimit", "make_memory_limit"]


@dataclass
class MemoryLimit:
    """A control group of our own."""

    directory: Path
    limit_file: str
    usage_file: str

    @property
    def kind(self) -> str:
        """What sets the limit, in words."""
        return f"cgroup {self.limit_file}"

    def add(self, pid: int) -> None:
        """Put a process into it; what it touches first from now on counts."""
        (self.directory / "cgroup.procs").write_text(str(pid), encoding="utf-8")

    def set(self, limit_bytes: int) -> None:
        """Limit what the group holds. Raises OSError if it holds more that cannot leave."""
        (self.directory / self.limit_file).write_text(str(limit_bytes), encoding="utf-8")

    def usage(self) -> int:
        """Bytes that the group holds now."""
        return int((self.directory / self.usage_file).read_text(encoding="utf-8"))

    def remove(self) -> None:
        """Remove the group; its processes must have ended."""
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.directory.rmdir()
                return
            time.sleep(0.1)


def make_memory_limit(name: str) -> MemoryLimit | None:
    """A group below the one that this process is in; None where the system or its rights allow none."""
    for mount, own, files in _hierarchies():
        for parent in (mount / own.lstrip("/"), mount):
            directory = parent / f"{name}-{os.getpid()}"
            try:
                directory.mkdir()
            except OSError:
                continue
            if all((directory / file).exists() for file in files):
                return MemoryLimit(directory, *files)
            directory.rmdir()
    return None


def _hierarchies() -> list[tuple[Path, str, tuple[str, str]]]:
    """(where it is mounted, this process's group, (limit, usage)) of hierarchies that may count memory."""
    found = []
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    for _, where, kind, options, *_ in mounts:
        for _, controllers, own in groups:
            if kind == "cgroup" and "memory" in options.split(",") and "memory" in controllers.split(","):
                found.append((Path(where), own, ("memory.limit_in_bytes", "memory.usage_in_bytes")))
            if kind == "cgroup2" and controllers == "":
                found.append((Path(where), own, ("memory.max", "memory.current")))
    return found
