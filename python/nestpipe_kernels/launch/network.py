"""A small network inside this machine: a namespace for each rank, joined by a bridge through rate-limited links.

Namespaces have no names: this process holds them open, and the kernel removes them, with the bridge and the links, when
it and the last process inside have ended, however they end. The bridge lives in a namespace of its own, so that the
machine's interfaces, addresses and firewall rules neither matter nor change.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

__all__ = ["Network", "bits_per_second", "why_no_network"]

_T = TypeVar("_T")
_CLONE_NEWNET = 0x40000000
_SUBNET = "10.201.77"
_MOST_RANKS = 200
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BURST_BYTES = 80_000
"""More than the largest packet that the system hands over at once (64 KB), which would be cut up otherwise."""
_QUEUE_S = 0.05


def bits_per_second(rate: str) -> float:
    """The number that a rate such as `1gbit`, `500mbit` or `2.5gbit` stands for.

    Raises:
        ValueError: something else.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", rate)
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if value < 1e5:
        raise ValueError(f"network: a rate is a number with kbit, mbit or gbit, at least 100kbit; got {rate!r}")
    return value


def why_no_network() -> str:
    """What this machine or user lacks for a Network, in words; empty if nothing."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)"
    try:
        os.close(_in_thread(_new_namespace))
    except OSError as error:
        return f"making network namespaces needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN): {error.strerror}"
    return ""


class Network:
    """Namespaces for `ranks` ranks. Rank r has the interface `Network.interface` with an address of its own; the bridge
    has `address`, where a launcher can listen (`run_in(None, ...)`). Nothing outside is reachable.

    Args:
        ranks: how many.
        rate: of every link, in either direction (`1gbit`); None for no limit.

    Raises:
        ValueError: a number of ranks or a rate that makes no sense.
        OSError: no root, no iproute2, or a system that refuses; says what to do. Nothing is left behind.
    """

    interface = "np"
    address = f"{_SUBNET}.254"

    def __init__(self, ranks: int, rate: str | None = None) -> None:
        if not 1 <= ranks <= _MOST_RANKS:
            raise ValueError(f"network: ranks must be in 1 .. {_MOST_RANKS}, got {ranks}")
        self.ranks = ranks
        self.rate = rate
        self.bits_per_second = None if rate is None else bits_per_second(rate)
        reason = why_no_network()
        if reason:
            raise OSError(f"network: {reason}")
        self._hub: int | None = None
        self._namespaces: list[int] = []
        try:
            self._hub = _in_thread(_new_namespace)
            self._namespaces += [_in_thread(_new_namespace) for _ in range(ranks)]
            self._build()
        except BaseException:
            self.close()
            raise

    def run_in(self, rank: int | None, function: Callable[[], _T]) -> _T:
        """Call `function` on a thread inside the namespace of a rank (None: the bridge's).

        Processes that it starts and sockets that it opens stay there.
        """
        namespace = self._hub if rank is None else self._namespaces[rank]
        if namespace is None:
            raise RuntimeError("network: this network is closed")
        descriptor = namespace

        def inside() -> _T:
            _enter(descriptor)
            return function()

        return _in_thread(inside)

    def cut(self, rank: int) -> None:
        """Take a rank's link down: what it sends and what is sent to it is lost."""
        self._command(None, f"ip link set rank{rank} down")

    def mend(self, rank: int) -> None:
        """Take a rank's link up again."""
        self._command(None, f"ip link set rank{rank} up")

    def identities(self) -> list[int]:
        """Numbers of the namespaces, the bridge's first, as `/proc/PID/ns/net` shows them."""
        held = [fd for fd in (self._hub, *self._namespaces) if fd is not None]
        return [os.fstat(descriptor).st_ino for descriptor in held]

    def close(self) -> None:
        """Let go of the namespaces: each goes with the last process inside. Idempotent."""
        hub, self._hub = self._hub, None
        held, self._namespaces = self._namespaces, []
        for descriptor in [*([] if hub is None else [hub]), *held]:
            os.close(descriptor)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self) -> None:
        self._command(None, "ip link add bridge0 type bridge")
        self._command(None, f"ip addr add {self.address}/24 dev bridge0")
        self._command(None, "ip link set lo up")
        self._command(None, "ip link set bridge0 up")
        for rank, namespace in enumerate(self._namespaces):
            other = f"/proc/{os.getpid()}/fd/{namespace}"
            self._command(None, f"ip link add rank{rank} type veth peer name {self.interface} netns {other}")
            self._command(None, f"ip link set rank{rank} master bridge0 up")
            self._command(rank, f"ip addr add {_SUBNET}.{rank + 1}/24 dev {self.interface}")
            self._command(rank, "ip link set lo up")
            self._command(rank, f"ip link set {self.interface} up")
            if self.bits_per_second is not None:
                queue = int(max(self.bits_per_second / 8 * _QUEUE_S, 4 * _BURST_BYTES))
                limit = f"tbf rate {self.rate} burst {_BURST_BYTES} limit {queue}"
                self._command(rank, f"tc qdisc add dev {self.interface} root {limit}")
                self._command(None, f"tc qdisc add dev rank{rank} root {limit}")

    def _command(self, rank: int | None, line: str) -> None:
        done = self.run_in(rank, lambda: _run(line.split()))
        if done.returncode:
            reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise OSError(f"network: `{line}` failed: {reason}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _in_thread(function: Callable[[], _T]) -> _T:
    """Call on a fresh thread: it alone changes its namespace, and ends."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="nestpipe-network")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _new_namespace() -> int:
    """Move this thread into a new namespace; a descriptor that holds it (closed in child programs)."""
    _system_call("unshare", _CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(descriptor: int) -> None:
    _system_call("setns", descriptor, _CLONE_NEWNET)


def _system_call(name: str, *arguments: int) -> None:
    # os.unshare and os.setns came with Python 3.12.
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
