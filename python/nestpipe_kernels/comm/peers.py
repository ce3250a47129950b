"""PeerProcesses: which peers on this machine have ended; used only to word errors, so every answer is best effort."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["PeerProcesses"]

_GRACE_S = 1.0
"""A dying process closes its sockets a moment before it counts as ended."""


class PeerProcesses:
    """The peers' process identities, gathered once at set-up (collective)."""

    def __init__(self, rank: int, identities: list[tuple[str, int, str]]) -> None:
        self._rank = rank
        self._identities = identities

    @classmethod
    def gather(cls, process_group: Any) -> PeerProcesses:
        """Exchange identities over `process_group`; every rank calls it."""
        identities: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(identities, _own_identity(), group=process_group)
        return cls(dist.get_rank(process_group), identities)

    def describe_gone(self) -> str:
        """`; rank 1 (process 4711) has ended`, or an empty string where nothing is known."""
        deadline = time.monotonic() + _GRACE_S
        while True:
            gone = [rank for rank in range(len(self._identities)) if rank != self._rank and self._has_ended(rank)]
            if gone or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return "".join(f"; rank {rank} (process {self._identities[rank][1]}) has ended" for rank in gone)

    def _has_ended(self, rank: int) -> bool:
        machine, pid, started = self._identities[rank]
        own_machine, _, own_started = _own_identity()
        if not machine or machine != own_machine or not own_started:
            return False
        return _start_time(pid) != started


def _own_identity() -> tuple[str, int, str]:
    """(machine and process namespace, pid, start time); empty strings where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = ""
    return machine, os.getpid(), _start_time(os.getpid())


def _start_time(pid: int) -> str:
    """When a process started, as the system writes it; empty if it does not run (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
