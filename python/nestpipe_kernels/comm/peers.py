"""PeerProcesses: which rank is the cause of a failed exchange, and what it was doing; used only to word errors, so
every answer is best effort. Ranks on other machines are not seen.

In this order: a rank that failed by itself (its last words say so), a rank whose process has ended without a word, a
rank that is stopped, a rank whose network interface is down, a rank that has not joined the exchange and waits for
nobody, or that nothing came from. A rank that only failed because of another one is never the cause: what it found out
is passed on.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nestpipe_kernels.comm.board import LINK, OWN, SECONDARY, Board, PageView, shared_memory
from nestpipe_kernels.config import process_environment

__all__ = ["PeerProcesses"]

_GRACE_S = 1.0
"""A dying process closes its sockets a moment before it counts as ended; ranks give up within moments of each other."""
_SIOCGIFFLAGS, _IFF_RUNNING = 0x8913, 0x40


@dataclass
class Identity:
    """Where a rank runs; empty strings where the system does not tell."""

    machine: str
    """Machine and process namespace."""
    pid: int
    started: str
    memory: int
    """Its descriptor of shared memory, -1 without."""


class PeerProcesses:
    """The peers' process identities and their pages of the board, set up once (collective)."""

    def __init__(self, rank: int, identities: list[Identity], board: Board, seen: list[bool]) -> None:
        self.board = board
        self._rank = rank
        self._identities = identities
        self._seen = seen
        self._lock = threading.Lock()
        self._found: str | None = None

    @classmethod
    def gather(cls, process_group: Any) -> PeerProcesses:
        """Exchange identities over `process_group`; every rank calls it."""
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        own = _own_identity(shared_memory(size))
        try:
            identities: list[Any] = [None] * size
            dist.all_gather_object(identities, own, group=process_group)
            memory, leader = _join_memory(identities, own, size)
            leaders: list[Any] = [None] * size
            dist.all_gather_object(leaders, leader, group=process_group)  # now nobody needs the descriptors any more
        finally:
            if own.memory >= 0:
                os.close(own.memory)
        seen = [leader >= 0 and leaders[peer] == leader for peer in range(size)]
        return cls(rank, identities, Board(memory, rank, size), seen)

    # ---------------------------------------------------------------------------------------- the cause

    def describe_cause(self, purpose: int, number: int, silent: Sequence[int]) -> str:
        """`; rank 1 (process 4711) has ended, in gather of batch 4`, or an empty string where nothing is known.

        Args:
            purpose, number: the exchange that failed; an exchange that cannot even be posted is the next one.
            silent: ranks that nothing came from, as far as known.

        The first answer stays, and becomes this rank's last words.
        """
        with self._lock:
            if self._found is None:
                self._found = self._find_cause(purpose, number, silent)
                self.board.note(SECONDARY, self._found)
        return f"; {self._found}" if self._found else ""

    def _find_cause(self, purpose: int, number: int, silent: Sequence[int]) -> str:
        own_link = _interface_down()
        if own_link:
            self.board.note(LINK, f"{self._name(self._rank)}: its network interface {own_link} is down")
        deadline = time.monotonic() + _GRACE_S
        while True:
            sure = self._certain()
            if sure or time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        if own_link and not sure:
            sure = f"this rank's network interface {own_link} is down"
        return sure or self._probable(purpose, number, silent)

    def _peers(self) -> list[int]:
        return [rank for rank in range(len(self._identities)) if rank != self._rank]

    def _certain(self) -> str:
        """A cause that cannot turn out to be another rank's consequence."""
        views = {rank: self.board.view(rank) for rank in self._peers() if self._seen[rank]}
        own = [(view.note.time_ns, rank) for rank, view in views.items() if view.note and view.note.kind == OWN]
        if own:
            rank = min(own)[1]
            return f"rank {rank} failed in {_text(views[rank])}"
        gone = [r for r in self._peers() if self._has_ended(r)]
        silent = [rank for rank in gone if rank not in views or views[rank].note is None]
        if silent:
            return "; ".join(
                f"{self._name(r)} has ended{views[r].doing(ended=True) if r in views else ''}" for r in silent
            )
        stopped = [rank for rank in views if self._state(rank) in ("T", "t")]
        if stopped:
            return "; ".join(f"{self._name(r)} is stopped{views[r].doing()}" for r in stopped)
        return next((view.note.text for view in views.values() if view.note and view.note.kind == LINK), "")

    def _probable(self, purpose: int, number: int, silent: Sequence[int]) -> str:
        """Nobody has ended by itself: who has not come, or what others have found out."""
        views = {rank: self.board.view(rank) for rank in self._peers() if self._seen[rank]}
        late = [r for r in _roots(views, purpose, number) if views[r].note is None]
        if late:
            return "; ".join(f"{self._name(r)} has not joined it{views[r].doing()}" for r in late)
        told = [(v.note.time_ns, r) for r, v in views.items() if v.note and v.note.kind == SECONDARY and v.note.text]
        if told:
            rank = min(told)[1]
            return f"rank {rank} had given up: {_text(views[rank])}"
        gone = [r for r in self._peers() if self._has_ended(r)]
        if gone:
            return "; ".join(f"{self._name(r)} has ended" for r in gone)
        if not silent:
            return ""
        names = " and ".join(self._name(r) for r in silent)
        if all(r in views for r in silent):
            return f"nothing came from {names}, joined though it is: look at the network between the ranks"
        return f"nothing came from {names}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self._identities[rank].pid})"

    def _here(self, rank: int) -> bool:
        """Whether the rank's process can be looked at from here."""
        machine = self._identities[rank].machine
        return bool(machine) and machine == self._identities[self._rank].machine

    def _has_ended(self, rank: int) -> bool:
        if not self._here(rank) or not self._identities[self._rank].started:
            return False
        return _process(self._identities[rank].pid)[1] != self._identities[rank].started

    def _state(self, rank: int) -> str:
        return _process(self._identities[rank].pid)[0] if self._here(rank) else ""


def _text(view: PageView) -> str:
    return view.note.text if view.note is not None else ""


def _roots(views: dict[int, PageView], purpose: int, number: int) -> list[int]:
    """Ranks that an exchange waits for, directly or through other ranks' waits, and that wait for nobody themselves."""
    todo, closure, roots = [(purpose, number)], set(), []
    done = set()
    while todo:
        exchange = todo.pop()
        if exchange in done:
            continue
        done.add(exchange)
        for rank, view in views.items():
            if rank in closure or not 0 <= exchange[0] < len(view.posted) or view.posted[exchange[0]] > exchange[1]:
                continue
            closure.add(rank)
            if view.waits and not view.running:
                todo += [(wait.purpose, wait.number) for wait in view.waits]
            else:
                roots.append(rank)
    return sorted(roots)


def _join_memory(identities: list[Identity], own: Identity, size: int) -> tuple[mmap.mmap | None, int]:
    """The board's memory, made by the lowest rank of this machine, and that rank; (None, -1) where it is out of
    reach."""
    leader = next(k for k, one in enumerate(identities) if one.machine == own.machine)
    identity = identities[leader]
    if not own.machine or identity.memory < 0:
        return None, -1
    try:
        if identity.pid == own.pid:
            return mmap.mmap(own.memory, 0), leader
        descriptor = os.open(f"/proc/{identity.pid}/fd/{identity.memory}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, 0), leader
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None, -1


def _own_identity(memory: int) -> Identity:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = ""
    return Identity(machine, os.getpid(), _process(os.getpid())[1], memory)


def _process(pid: int) -> tuple[str, str]:
    """(state, start time) of a process, as the system writes them; empty if it does not run (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return ("", "") if fields[0] in ("Z", "X") else (fields[0], fields[19])


def _interface_down() -> str:
    """The interface that gloo was told to use, if it has no link."""
    name = process_environment().get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not name or name == "lo":
        return ""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode()[:15], 0))
        if not struct.unpack_from("H", answer, 16)[0] & _IFF_RUNNING:
            return name
    return ""
