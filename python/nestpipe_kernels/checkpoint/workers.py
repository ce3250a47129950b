"""A few threads for work that lets go of the interpreter's lock: hashing, reading, writing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["NUM_WORKERS", "OrderedWorkers"]

NUM_WORKERS = 2


class OrderedWorkers:
    """Runs tasks beside the caller; tasks of one lane one after another in the order given, lanes in parallel.

    Args:
        limit_bytes: what waiting and running tasks may hold together; a larger single task runs alone.
        name: of the threads.
    """

    def __init__(self, limit_bytes: int, name: str) -> None:
        self._limit = limit_bytes
        self._name = name
        self._changed = threading.Condition()
        self._lanes: dict[Hashable, deque[tuple[Callable[[], Any], int]]] = {}
        self._ready: deque[Hashable] = deque()
        self._held = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def put(self, lane: Hashable, task: Callable[[], Any], size: int) -> None:
        """Queue a task that holds `size` bytes; blocks while too many are held. Raises a task's earlier failure."""
        with self._changed:
            while self._held and self._held + size > self._limit and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            self._held += size
            waiting = self._lanes.get(lane)
            if waiting is None:
                self._lanes[lane] = deque([(task, size)])
                self._ready.append(lane)
                self._changed.notify_all()
            else:
                waiting.append((task, size))
        while len(self._threads) < NUM_WORKERS:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self) -> None:
        """Wait for all tasks and end the threads. Raises the first failure; tasks after it did not run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """Drop what waits, and end the threads."""
        with self._changed:
            self._failure = self._failure or RuntimeError("cancelled")
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                # A lane that a thread works on is not ready, and comes back if more was queued for it.
                while not self._ready and not (self._closed and not self._lanes):
                    self._changed.wait()
                if not self._ready:
                    return
                lane = self._ready.popleft()
                task, size = self._lanes[lane].popleft()
                skip = self._failure is not None
            try:
                if not skip:
                    task()
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or error
            del task
            with self._changed:
                self._held -= size
                if self._lanes[lane]:
                    self._ready.append(lane)
                else:
                    del self._lanes[lane]
                self._changed.notify_all()
