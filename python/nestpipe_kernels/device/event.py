"""Event: a point on a lane that other lanes and the caller can wait for; set once, with success or an error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ["Event"]


class Event:
    """Becomes set exactly once, by `set` or `set_error`; waiting sleeps on a condition, never spins.

    Everything done before `set` is visible to whoever returns from `wait` or sees `is_set()` true.
    """

    __slots__ = ("_condition", "_error", "_is_set", "_owner_pid", "name")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._condition = threading.Condition(threading.Lock())
        self._is_set = False
        self._error: BaseException | None = None
        self._owner_pid = os.getpid()

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
        with self._condition:
            if self._is_set:
                return False
            self._error = error
            self._is_set = True
            self._condition.notify_all()
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
        if not self.wait_unless(None, timeout_s):
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
        with self._condition:
            self._condition.wait_for(lambda: self._is_set or (cancelled is not None and cancelled()), timeout_s)
            return self._is_set

    def poke(self) -> None:
        """Make waiters look at their `cancelled` condition again."""
        with self._condition:
            self._condition.notify_all()

    def _set_once(self, error: BaseException | None) -> None:
        if not self.try_set(error):
            raise RuntimeError(f"event {self.name!r} is already set; an event has one outcome")
