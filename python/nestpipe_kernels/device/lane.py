"""Lanes: ordered queues of work. On CPU a lane is a worker thread.

Model. A lane runs its items one after another in the order of submission. An item first waits for its events, in the
order given, then runs, then sets its own event. Lanes run beside each other; events are the only order between them.

Ownership. The lane owns an item's closure until the item has run, so tensors that the closure uses live at least that
long, and are released before the next item starts. What outlives the item (results) is the submitter's to keep.

Memory order. Everything an item wrote happens before its event is set, and the set happens before any wait on that
event returns (the event's locks order both). Data handed over by an event therefore needs no further lock.

Errors. An item that raises sets its event to the exception. An item that waits for a failed event does not run and
passes the *same* exception object on, so the first cause reaches whoever waits last. The lane goes on with its next
item: items that do not depend on the failed one are unaffected.

Time limits. A lane waits for events without limit: each wait that involves another process has its own time-out in
`comm` and ends in an error, which then travels along the events. `synchronize` and `Event.wait` take limits.

Autograd. Lane threads run with gradients disabled: stages move and update rows, they never build a graph.

Cores. Torch operations of a lane use one thread; native bulk calls share the extension's pool.

Forks. Threads do not survive a fork; a lane that is used in a forked child raises instead of waiting for a thread that
does not exist.

Accelerators. A StreamLane is such a thread with a stream of a device. An item's work *issues* work to that stream, and
its event (a DeviceEvent) is set when that is done, with the stream's point at which the work will be. Who waits for it
sleeps until it is issued and makes its own stream wait for the point. So threads run ahead of the device, and the host
waits for the device only where an item reads a result. The rules above hold, "happens before" being the device's order.
"""

from __future__ import annotations

import os
import threading
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from nestpipe_kernels.device.backend import CpuBackend, DeviceBackend, DeviceEvent, backend_for
from nestpipe_kernels.device.event import Event
from nestpipe_kernels.trace import Timeline

__all__ = ["Item", "Lane", "StreamLane", "ThreadLane", "create_lane"]


class Lane(Protocol):
    """An ordered queue of work on a device."""

    name: str

    def submit(self, work: Callable[[], None], waits: Sequence[Event], done: Event, label: str) -> None:
        """Enqueue `work` behind everything submitted before, after `waits`; sets `done`. Never blocks."""
        ...

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until everything submitted so far has ended (errors stay in the events). Raises TimeoutError."""
        ...

    def close(self, cancel: bool = False) -> None:
        """Finish the queue, or with `cancel` drop what has not started; then stop. Idempotent."""
        ...


class Item(NamedTuple):
    """One piece of work for a lane; fields as the arguments of `ThreadLane.submit`."""

    work: Callable[[], None]
    waits: Sequence[Event]
    done: Event
    label: str
    batch: int = -1
    micro: int | None = None
    kind: str = "other"


class ThreadLane:
    """A lane on the CPU: one daemon thread with a first-in-first-out queue.

    Args:
        name: the lane's row in the timeline; the thread is called `nestpipe-<name>`.
        timeline: where to record the items that carry a batch index, or None.
    """

    def __init__(self, name: str, timeline: Timeline | None = None) -> None:
        self.name = name
        self._timeline = timeline
        self._queue: deque[Item] = deque()
        self._lock = allocate_lock()
        """Guards the four fields around it."""
        self._gate = allocate_lock()
        """Locked while the thread sleeps for want of items; who gives it some unlocks it."""
        self._gate.acquire()
        self._idle = False
        self._closing = False
        self._cancelled = False
        self._waiting_for: Event | None = None
        self._owner_pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"nestpipe-{name}", daemon=True)
        threads = torch.get_num_threads()
        started = threading.Event()
        self._started = started
        self._thread.start()
        started.wait()
        torch.set_num_threads(threads)  # the lane's choice below became the default of threads made later: undo that

    def __repr__(self) -> str:
        return f"ThreadLane({self.name!r}{', closed' if self._closing else ''})"

    def submit(
        self,
        work: Callable[[], None],
        waits: Sequence[Event],
        done: Event,
        label: str,
        *,
        batch: int = -1,
        micro: int | None = None,
        kind: str = "other",
    ) -> None:
        """Enqueue `work`, to run after all earlier work of this lane and after `waits`. Never blocks.

        Args:
            work: called once on the lane's thread, with gradients disabled.
            waits: events to wait for, in this order; one that failed fails `done` with the same error.
            done: a pending event; set when `work` has returned, or to the exception.
            label: the stage's name, for the timeline and errors.
            batch, micro, kind: recorded in the timeline with the label; a batch of -1 is not recorded.

        Raises:
            RuntimeError: the lane is closed, or belongs to the process that forked this one.
            ValueError: `done` is already set.
        """
        self.submit_all((Item(work, tuple(waits), done, label, batch, micro, kind),))

    def submit_all(self, items: Sequence[Item]) -> None:
        """`submit` for several items in their order, which wakes the lane's thread once. Queues all or none.

        Raises as `submit`.
        """
        self._check_process("submit")
        for item in items:
            if item.done.is_set():
                raise ValueError(f"lane {self.name!r}: the event for {item.label!r} is already set; pass a new Event")
        with self._lock:
            if self._closing:
                raise RuntimeError(f"lane {self.name!r} is closed; {items[0].label!r} was not queued")
            self._queue.extend(items)
            self._wake()

    def _wake(self) -> None:
        """Let the thread look at the queue; the lock is held."""
        if self._idle:
            self._idle = False
            self._gate.release()

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until everything submitted so far has ended; errors stay in the items' events.

        Raises:
            TimeoutError: the queue is not through after `timeout_s` seconds.
            RuntimeError: called on the lane's own thread, or in a forked child.
        """
        self._check_process("synchronize")
        self._check_not_own_thread("synchronize")
        if self._closing:
            self._join(timeout_s)
            return
        reached = Event(f"synchronize {self.name}")
        self.submit(_nothing, (), reached, "synchronize")
        if not reached.wait_unless(None, timeout_s):
            raise TimeoutError(f"lane {self.name!r} was not done within {timeout_s} s")

    def close(self, cancel: bool = False, timeout_s: float | None = None) -> None:
        """Stop the lane. Idempotent; does nothing in a forked child.

        Args:
            cancel: drop the items that have not started; their events fail with a RuntimeError. Without it the queue
                is finished first.
            timeout_s: limit for the thread to end, seconds; None waits for the work under way.

        Raises:
            TimeoutError: the thread has not ended in time.
        """
        if os.getpid() != self._owner_pid:
            return
        self._check_not_own_thread("close")
        with self._lock:
            self._closing = True
            self._cancelled = self._cancelled or cancel
            self._wake()
        awaited = self._waiting_for
        if cancel and awaited is not None:
            awaited.poke()
        self._join(timeout_s)

    def _join(self, timeout_s: float | None) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"lane {self.name!r} has not ended within {timeout_s} s")

    def _check_process(self, call: str) -> None:
        if os.getpid() != self._owner_pid:
            raise RuntimeError(
                f"lane {self.name!r}: {call}() in process {os.getpid()}, but the lane's thread lives in process "
                f"{self._owner_pid} that forked it; create lanes (and pipelines) after the fork, or use spawn"
            )

    def _check_not_own_thread(self, call: str) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"lane {self.name!r}: {call}() on the lane's own thread would wait for itself")

    # ------------------------------------------------------------------------------------------- lane thread

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        # Stages' torch operations are small; a second OpenMP team beside the compute lane's would fight for its cores.
        torch.get_num_threads()  # a thread takes the process's default at its first look: look before choosing
        torch.set_num_threads(1)
        self._started.set()
        while (item := self._next()) is not None:
            self._run_item(item)
            del item  # frees the closure's tensors before the lane goes to sleep

    def _next(self) -> Item | None:
        while True:
            with self._lock:
                if self._queue:
                    return self._queue.popleft()
                if self._closing:
                    return None
                self._idle = True
            self._gate.acquire()

    def _run_item(self, item: Item) -> None:
        error = self._wait_for_events(item)
        if error is None:
            start_ns = time.perf_counter_ns()
            try:
                item.work()
            except BaseException as raised:
                error = raised
            if self._timeline is not None and item.batch >= 0:
                end_ns = time.perf_counter_ns()
                self._timeline.record(self.name, item.label, item.batch, item.micro, start_ns, end_ns, item.kind)
        item.done.try_set(error)

    def _wait_for_events(self, item: Item) -> BaseException | None:
        """Wait for all events of an item; what keeps it from running, or None."""
        for event in item.waits:
            if not event.is_set():
                self._waiting_for = event
                try:
                    event.wait_unless(self._is_cancelled)
                except RuntimeError as error:
                    return error
                finally:
                    self._waiting_for = None
            if event.error is not None:
                return event.error
        if self._cancelled:
            return RuntimeError(f"lane {self.name!r} was closed; {item.label!r} did not run")
        return None

    def _is_cancelled(self) -> bool:
        return self._cancelled


def _nothing() -> None:
    pass


class StreamLane(ThreadLane):
    """A lane on a device with streams: a thread that issues to a stream of its own.

    Args:
        backend: the device.
        name, timeline: as `ThreadLane`; spans are those of issuing, and of waiting for results on the host.
    """

    def __init__(self, backend: DeviceBackend, name: str, timeline: Timeline | None = None) -> None:
        self.backend = backend
        self.stream = backend.new_stream()
        super().__init__(name, timeline)

    def __repr__(self) -> str:
        return f"StreamLane({self.name!r} on {self.backend.device}{', closed' if self._closing else ''})"

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until everything submitted so far has been issued (errors as `ThreadLane.synchronize`) and is done."""
        super().synchronize(timeout_s)
        self.backend.synchronize(self.stream)

    def close(self, cancel: bool = False, timeout_s: float | None = None) -> None:
        """As `ThreadLane.close`; without `cancel` what was issued is done."""
        super().close(cancel, timeout_s)
        if not cancel and os.getpid() == self._owner_pid:
            self.backend.synchronize(self.stream)

    def _run(self) -> None:
        with self.backend.using(self.stream):
            super()._run()

    def _wait_for_events(self, item: Item) -> BaseException | None:
        error = super()._wait_for_events(item)
        if error is None:
            for event in item.waits:
                if isinstance(event, DeviceEvent):
                    event.order()
        return error


def create_lane(device: str | torch.device | DeviceBackend, name: str, timeline: Timeline | None = None) -> ThreadLane:
    """A lane on `device`.

    Args:
        device: "cpu", "npu" or a backend.
        name: the lane's name in threads, errors and the timeline.

    Raises:
        NotImplementedError, RuntimeError, ValueError: as `backend_for`.
    """
    backend = device if isinstance(device, CpuBackend) else backend_for(device)
    return StreamLane(backend, name, timeline) if backend.has_streams else ThreadLane(name, timeline)
