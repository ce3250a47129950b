"""Event: a point on a lane that other lanes and the caller can wait for; set once, with success or an error."""

from __future__ import annotations

import os
import time
from _thread import LockType, allocate_lock
from collections.abc import Callable

__all__ = ["Event"]


class Event:
    """Becomes set exactly once, by `set` or `set_error`; waiting sleeps, never spins.

    Everything done before `set` is visible to whoever returns from `wait` or sees `is_set()` true.

    An event is made, set and looked at far more often than waited for, so only who really waits pays: it leaves a
    locked lock with the event, which the setter unlocks. A waiter looks again after it has left its lock, and the
    setter takes the locks after it has marked the event, so one of the two always sees the other.
    """

    __slots__ = ("_error", "_is_set", "_name", "_once", "_owner_pid", "_waiting")

    def __init__(self, name: str | tuple[str, int, int] = "") -> None:
        self._name = name
        self._is_set = False
        self._error: BaseException | None = None
        self._once = allocate_lock()
        """Taken by the one who sets the event."""
        self._waiting: list[LockType] = []
        self._owner_pid = os.getpid()

    @property
    def name(self) -> str:
        """Who is waited for, in messages."""
        if isinstance(self._name, str):
            return self._name
        stage, batch, micro = self._name
        return f"{stage}({batch}, {micro})"

    def __repr__(self) -> str:
        state = "pending" if not self._is_set else ("set" if self._error is None else f"error {self._error!r}")
        return f"Event({self.name!r}, {state})"

    def set(self) -> None:
        """Mark as reached. Raises RuntimeError if already set."""
        self._set_once(None)

    def set_error(self, error: BaseException) -> None:
        """Mark as failed: every wait raises `error`. Raises RuntimeError if already set."""
        self._set_once(error)

    def try_set(self, error: BaseException | None = None) -> bool:
        """Set to success, or to `error`, unless already set; whether this call was the one that set it."""
        if not self._once.acquire(False):
            return False
        self._error = error
        self._is_set = True
        if self._waiting:
            self.poke()
        return True

    def is_set(self) -> bool:
        """Whether the outcome, success or error, is known. Does not block."""
        return self._is_set

    @property
    def error(self) -> BaseException | None:
        """The error it was set with, or None (also while pending). Does not block."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until set.

        Args:
            timeout_s: seconds to wait; 0 only looks; None waits without limit.

        Raises:
            TimeoutError: still pending after `timeout_s` seconds.
            RuntimeError: pending, and made in another process (its setter is not in this one).
            BaseException: the error it was set with.
        """
        if not self._is_set and not self.wait_unless(None, timeout_s):
            raise TimeoutError(f"event {self.name!r} was not set within {timeout_s} s")
        if self._error is not None:
            raise self._error

    def wait_unless(self, cancelled: Callable[[], bool] | None, timeout_s: float | None = None) -> bool:
        """Block until set (True), or until `cancelled()` holds after a `poke` or the time is up (False).

        Raises nothing of the event's own error; read `error`.
        """
        if self._is_set:
            return True
        if os.getpid() != self._owner_pid:
            raise RuntimeError(
                f"event {self.name!r} belongs to process {self._owner_pid} and was pending when process {os.getpid()} "
                "was forked: nothing here will set it; create lanes and events after the fork"
            )
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        gate = allocate_lock()
        gate.acquire()
        while True:
            self._waiting.append(gate)
            try:
                if self._is_set or (cancelled is not None and cancelled()):
                    return self._is_set
                left = -1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
                if not gate.acquire(True, left):
                    return self._is_set
            finally:
                self._forget(gate)

    def poke(self) -> None:
        """Make waiters look at their `cancelled` condition again."""
        while self._waiting:
            try:
                gate = self._waiting.pop()
            except IndexError:  # another thread took it
                return
            gate.release()

    def _forget(self, gate: LockType) -> None:
        try:
            self._waiting.remove(gate)
        except ValueError:  # taken by who sets or pokes; it is unlocked once for having been left once
            return

    def _set_once(self, error: BaseException | None) -> None:
        if not self.try_set(error):
            raise RuntimeError(f"event {self.name!r} is already set; an event has one outcome")
