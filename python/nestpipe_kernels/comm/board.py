"""Board: what each rank of one machine is doing, in nameless shared memory that outlives a rank that dies.

One page a rank: the stages it is in, how many exchanges of each purpose it has posted, and its last words. Peers read
it only to word an error, after an exchange has failed: which rank is the cause, and in which stage it was. Nothing of
it has a name in a file system, so nothing can be left behind.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass, field

from nestpipe_kernels.comm.checks import KINDS

__all__ = ["LINK", "OWN", "SECONDARY", "Board", "Note", "PageView", "WaitingStage", "shared_memory"]

OWN, SECONDARY, LINK = 1, 2, 3
"""Kinds of last words: an error of the rank's own, one that another rank caused, its network interface is down."""

PAGE = 4096
_NOTE_BYTES, _POSTED_AT, _SLOTS_AT, _NUM_SLOTS = 1024, 1056, 1184, 40
_NOTE, _COUNT, _SLOT = struct.Struct("<qqq"), struct.Struct("<q"), struct.Struct("<qqqqq")
_NAME_BYTES = 24
_SLOT_BYTES = _NAME_BYTES + _SLOT.size
_IDLE, _RUNNING, _WAITING = 0, 1, 2


@dataclass
class Note:
    """A rank's last words."""

    kind: int
    time_ns: int
    """time.monotonic_ns(), the same clock for all processes of a machine."""
    text: str


@dataclass
class WaitingStage:
    """A stage that waits for an exchange to complete: the `number`-th of its purpose, from 0."""

    purpose: int
    number: int


@dataclass
class PageView:
    """One rank's page as it is now."""

    note: Note | None
    posted: list[int]
    running: list[str] = field(default_factory=list)
    """Stages under way that wait for nobody, in words, the one that began first leading."""
    waiting: list[str] = field(default_factory=list)
    """Stages under way that wait for an exchange."""
    waits: list[WaitingStage] = field(default_factory=list)

    def doing(self, ended: bool = False) -> str:
        """`, in gather of batch 4`, or nothing where no stage is under way. `ended`: a rank that waits no more."""
        if self.running:
            return f", in {' and '.join(self.running)}"
        waiting = "while it was waiting in" if ended else "waiting in"
        return f", {waiting} {' and '.join(self.waiting)}" if self.waiting else ""


class Board:
    """All ranks' pages; this rank writes its own.

    Args:
        memory: `size` pages, shared by the ranks of this machine; None for a board that nobody else sees.
        rank: whose page is written.
        size: number of ranks.
    """

    def __init__(self, memory: mmap.mmap | None, rank: int, size: int) -> None:
        self._memory = mmap.mmap(-1, size * PAGE) if memory is None else memory
        self._base = rank * PAGE
        self._slots: dict[str, int] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._noted = False

    # ------------------------------------------------------------------------------------------- this rank

    def begin(self, stage: str, batch: int, micro: int) -> None:
        """A stage starts on the calling thread."""
        at = self._slots.get(stage) or self._new_slot(stage)
        self._thread.slot = at
        _SLOT.pack_into(self._memory, at, _RUNNING, batch, micro, time.monotonic_ns(), 0)

    def end(self) -> None:
        """The calling thread's stage has ended."""
        _COUNT.pack_into(self._memory, self._thread.slot, _IDLE)
        self._thread.slot = 0

    def posted(self, purpose: int, count: int) -> None:
        """This rank has posted `count` exchanges of a purpose (its index in KINDS)."""
        _COUNT.pack_into(self._memory, self._base + _POSTED_AT + 8 * purpose, count)

    def begin_wait(self, purpose: int, number: int) -> None:
        """The calling thread waits for the `number`-th exchange of a purpose."""
        if not getattr(self._thread, "slot", 0):
            self.begin("exchange", -1, -1)
            self._thread.alone = True
        _, batch, micro, since, _ = _SLOT.unpack_from(self._memory, self._thread.slot)
        _SLOT.pack_into(self._memory, self._thread.slot, _WAITING + purpose, batch, micro, since, number)

    def end_wait(self) -> None:
        """The wait is over."""
        if getattr(self._thread, "alone", False):
            self._thread.alone = False
            self.end()
        else:
            _COUNT.pack_into(self._memory, self._thread.slot, _RUNNING)

    def note(self, kind: int, text: str) -> None:
        """Leave last words; the first ones stay."""
        with self._lock:
            if self._noted:
                return
            self._noted = True
            data = text.encode()[:_NOTE_BYTES]
            start = self._base + _NOTE.size
            self._memory[start : start + len(data)] = data
            _NOTE.pack_into(self._memory, self._base, kind, time.monotonic_ns(), len(data))

    def _new_slot(self, stage: str) -> int:
        with self._lock:
            if stage not in self._slots:
                k = min(len(self._slots), _NUM_SLOTS - 1)
                name = self._base + _SLOTS_AT + k * _SLOT_BYTES
                self._memory[name : name + _NAME_BYTES] = stage.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
                self._slots[stage] = name + _NAME_BYTES
            return self._slots[stage]

    # ------------------------------------------------------------------------------------------- any rank

    def view(self, rank: int) -> PageView:
        """What a rank is doing; of a rank that has ended, what it was doing then."""
        base = rank * PAGE
        page = bytes(self._memory[base : base + PAGE])
        kind, time_ns, length = _NOTE.unpack_from(page, 0)
        note = None
        if kind:
            text = page[_NOTE.size : _NOTE.size + min(max(length, 0), _NOTE_BYTES)]
            note = Note(kind, time_ns, text.decode(errors="replace"))
        view = PageView(note, [_COUNT.unpack_from(page, _POSTED_AT + 8 * k)[0] for k in range(len(KINDS))])
        found = []
        for k in range(_NUM_SLOTS):
            at = _SLOTS_AT + k * _SLOT_BYTES
            state, batch, micro, since, number = _SLOT.unpack_from(page, at + _NAME_BYTES)
            if state != _IDLE:
                found.append((since, state, page[at : at + _NAME_BYTES].rstrip(b"\0").decode(), batch, micro, number))
        for _, state, name, batch, micro, number in sorted(found):
            words = name + f" of batch {batch}" * (batch >= 0) + f", micro-batch {micro}" * (micro > 0)
            if state == _RUNNING:
                view.running.append(words)
            else:
                view.waiting.append(words)
                view.waits.append(WaitingStage(state - _WAITING, number))
        return view


def shared_memory(size: int) -> int:
    """A descriptor of nameless memory of `size` pages; -1 where the system has none."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        descriptor = os.memfd_create("nestpipe-board", os.MFD_CLOEXEC)
    except OSError:
        return -1
    try:
        os.ftruncate(descriptor, size * PAGE)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor
