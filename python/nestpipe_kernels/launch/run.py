"""run_ranks: N processes of one command on this machine, with a rendezvous that outlives any of them.

The launcher hosts the store, so the death of rank 0 is no different from that of another rank. Each rank leads a
process group of its own: the launcher ends exactly what it started, and Ctrl-C reaches the ranks through it alone. If
the launcher itself is killed, ranks that have called `init_rank` notice by a pipe that closes, and end.

Who failed first. Ranks that lose a peer fail too, and a rank that fails by itself may take longer to end than those
that it drags along. So the report prefers, in this order: ranks ended by a signal or with an error of their own, then
ranks whose last line of stderr is about another rank (CommunicationError, RemoteRankError); each by time of ending. Of
a rank that was killed the report also gives another rank's last line about it.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from nestpipe_kernels.config import default_threads, process_environment
from nestpipe_kernels.launch.child import Child
from nestpipe_kernels.launch.network import Network

__all__ = ["run_ranks"]

GRACE_S = 5.0
INTERRUPTED = 130
_ABORT_LINES = 3
"""The end of stderr of a rank that aborts after its error: the error is among these lines."""
SECONDARY = ("CommunicationError", "RemoteRankError")


def run_ranks(
    command: Sequence[str],
    nproc: int,
    *,
    timeout_s: float = 300.0,
    env: Mapping[str, str] | None = None,
    network: Network | None = None,
) -> int:
    """Run `command` as `nproc` ranks and wait for all of them.

    Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (loopback, or the bridge of
    `network`), which `init_rank` and torch.distributed's `env://` understand. Rank 0's output is passed on. When a rank
    fails, the others have `timeout_s` + 5 s to end by themselves; then they are terminated, and killed 5 s later. One
    line on stderr names the rank that failed first and how. Ctrl-C and SIGTERM are passed on as SIGINT; a second one
    kills.

    Args:
        command: program and arguments.
        nproc: number of ranks, >= 1.
        timeout_s: the ranks' own limit for waiting for each other, seconds.
        env: variables on top of this process's environment.
        network: where the ranks live, each in its own namespace, and meet; None for the loopback address.

    Returns:
        0 if all ranks exited with 0; 130 after Ctrl-C or SIGTERM; else the exit code of the rank that failed first,
        128 + signal if a signal ended it.

    Raises:
        ValueError: `nproc` < 1, an empty command, or a network with too few namespaces.
        OSError: the command cannot be started.
    """
    if nproc < 1:
        raise ValueError(f"launch: nproc must be >= 1, got {nproc}")
    if not command:
        raise ValueError("launch: command is empty; pass the program and its arguments")
    if network is not None and network.ranks < nproc:
        raise ValueError(f"launch: nproc is {nproc}, but the network has {network.ranks} namespaces")
    address = "127.0.0.1" if network is None else network.address
    if network is None:
        store, port = _host_store(address, timeout_s)
    else:
        store, port = network.run_in(None, lambda: _host_store(address, timeout_s))
    launcher = _Launcher(network)
    try:
        with _signals(launcher.interrupt):
            launcher.start(command, nproc, _environment(nproc, (address, port), env, network))
            return launcher.supervise(timeout_s)
    finally:
        launcher.kill_all()
        del store  # the ranks' rendezvous, held until the last of them has ended


def _host_store(address: str, timeout_s: float) -> tuple[Any, int]:
    """A TCPStore that listens on this address only, and its port."""
    import torch.distributed as dist

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(128)
    port: int = listener.getsockname()[1]

    def listen_on(**backend: bool) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.fileno(),
            **backend,
        )

    try:
        store = listen_on()
    except NotImplementedError:  # torch 2.6: only its other backend takes a socket that listens already
        store = listen_on(use_libuv=False)
    listener.detach()  # the store owns the descriptor now
    return store, port


def _environment(
    nproc: int, meeting: tuple[str, int], extra: Mapping[str, str] | None, network: Network | None
) -> dict[str, str]:
    """What all ranks share. Threads are divided among the ranks, and sleep when idle, unless the caller has decided."""
    environment = process_environment()
    threads = str(max(1, default_threads() // nproc))
    environment.setdefault("OMP_NUM_THREADS", threads)
    environment.setdefault("NESTPIPE_THREADS", threads)
    # Idle OpenMP threads of torch otherwise spin, on the cores that exchanges and lookups of all ranks need.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if network is not None:
        environment["GLOO_SOCKET_IFNAME"] = network.interface
        # Addresses there have no names, which torch would remark on for every connection.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    elif sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.update(
        {
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": meeting[0],
            "MASTER_PORT": str(meeting[1]),
            # torch's words for "the launcher hosts the store": rank 0 connects like the others.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    )
    environment.update(extra or {})
    return environment


@contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `handler` while inside; left alone outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: handler()) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before):
            signal.signal(number, old)


class _Launcher:
    """The children and the rules for ending them."""

    def __init__(self, network: Network | None = None) -> None:
        self._network = network
        self._children: list[Child] = []
        # The exits, and None for an interrupt: a SimpleQueue may be filled from a signal handler.
        self._news: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
        self._interrupts = 0
        self._pipe = os.pipe()
        """The ranks hold the reading end: it closes when this process ends, however it ends."""

    def start(self, command: Sequence[str], nproc: int, environment: dict[str, str]) -> None:
        for rank in range(nproc):
            own = {
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NESTPIPE_LAUNCHER_PIPE": str(self._pipe[0]),
            }
            start = partial(Child, rank, command, own, self._pipe[0], self._news.put)
            self._children.append(start() if self._network is None else self._network.run_in(rank, start))

    def interrupt(self) -> None:
        """Called by the signal handler."""
        self._interrupts += 1
        self._news.put(None)

    def supervise(self, timeout_s: float) -> int:
        """Wait for all children, end those that do not end, report; the launcher's exit code."""
        deadline: float | None = None
        last_signal = 0
        while self._running():
            child, timed_out = self._next_news(deadline)
            if timed_out:
                last_signal = signal.SIGKILL if last_signal else signal.SIGTERM
                self._signal_all(last_signal)
                deadline = time.monotonic() + GRACE_S
            elif child is None:
                last_signal = signal.SIGINT if self._interrupts == 1 else signal.SIGKILL
                self._signal_all(last_signal)
                deadline = time.monotonic() + GRACE_S
            elif child.code and deadline is None and self._running():
                limit_s = timeout_s + GRACE_S
                deadline = time.monotonic() + limit_s
                _say(f"rank {child.rank} {_was(child)}; the other ranks have {limit_s:g} s to end")
        if self._interrupts:
            _say("interrupted; all ranks have ended")
            return INTERRUPTED
        return self._report()

    def kill_all(self) -> None:
        """Leave nothing behind, however the launcher ends."""
        self._signal_all(signal.SIGKILL)
        deadline = time.monotonic() + GRACE_S
        while self._running() and time.monotonic() < deadline:
            self._next_news(deadline)
        for descriptor in self._pipe:
            os.close(descriptor)

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.code is None]

    def _signal_all(self, number: int) -> None:
        for child in self._running():
            child.signal(number)

    def _next_news(self, deadline: float | None) -> tuple[Child | None, bool]:
        """(child that ended, or None for an interrupt; whether the deadline passed first)."""
        timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            return self._news.get(timeout=timeout), False
        except queue.Empty:
            return None, True

    def _pass_on(self, dead: Child) -> None:
        """A killed rank says nothing: what another one has seen of it (in which stage it was, for one). Rank 0's words
        have been passed on already."""
        for child in self._children:
            words = [line for line in child.tail[-_ABORT_LINES:] if any(word in line for word in SECONDARY)]
            if child is not dead and words and f"rank {dead.rank} " in words[-1]:
                if child.rank != 0:
                    _say(f"rank {child.rank} said: {words[-1]}")
                return

    def _report(self) -> int:
        failed = [child for child in self._children if child.code]
        if not failed:
            return 0
        first = min(failed, key=lambda child: (_is_secondary(child), child.ended_at))
        left = [c.rank for c in self._children if c.code == 0 and c.ended_at < first.ended_at]
        note = ""
        if left and _is_secondary(first):
            note = f" (rank {', '.join(map(str, left))} had already exited with code 0)"
        if first.rank != 0:  # rank 0's has been seen already
            for line in first.tail:
                print(f"[rank {first.rank}] {line}", file=sys.stderr)
        if first.code is not None and first.code < 0:
            self._pass_on(first)
        _say(f"rank {first.rank} failed first: {first.describe()}{note}")
        assert first.code is not None
        return first.code if first.code > 0 else 128 - first.code


def _is_secondary(child: Child) -> bool:
    """Whether a rank ended because of another one, as far as its last words say. A rank that fails may still abort on
    its way out."""
    assert child.code is not None
    if child.code < 0 and child.code != -signal.SIGABRT:
        return False
    last = child.tail[-1:] if child.code > 0 else child.tail[-_ABORT_LINES:]
    return any(word in line for line in last for word in SECONDARY)


def _was(child: Child) -> str:
    description = child.describe()
    return f"was {description}" if description.startswith("killed") else description


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
