"""What passes this rank's network interface, by the system's own counters."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from nestpipe_kernels.trace import Span

__all__ = ["LinkMeter", "LinkSampler"]

_COUNTERS = Path("/proc/self/net/dev")
LINK_LANE = "link (sends)"
SAMPLE_S = 0.002
BUSY_SHARE = 0.25
"""A sample in which the link sent at least this part of what it can counts as busy."""


class LinkMeter:
    """Bytes sent through one interface of this process's network namespace, headers of packets included."""

    def __init__(self, interface: str) -> None:
        self.interface = interface

    def sent_bytes(self) -> int:
        """Since the interface was made. Raises OSError where the system does not tell."""
        for line in _COUNTERS.read_text(encoding="utf-8").splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                return int(numbers.split()[8])
        raise OSError(f"link: no interface {self.interface!r} in {_COUNTERS}")


class LinkSampler:
    """Looks at the counters every SAMPLE_S seconds, on a thread of its own, for the picture; not while measuring."""

    def __init__(self, meter: LinkMeter, bits_per_second: float) -> None:
        self._meter = meter
        self._bytes_per_ns = bits_per_second / 8e9
        self._samples: list[tuple[int, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nestpipe-link-sampler", daemon=True)

    def __enter__(self) -> LinkSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._samples.append((time.perf_counter_ns(), self._meter.sent_bytes()))

    def spans(self) -> list[Span]:
        """Times in which the link was busy, as spans of a lane of their own."""
        found: list[Span] = []
        for (start, before), (end, after) in zip(self._samples, self._samples[1:]):
            if after - before < BUSY_SHARE * self._bytes_per_ns * (end - start):
                continue
            if found and found[-1].end_ns == start:
                found[-1] = found[-1]._replace(end_ns=end)
            else:
                found.append(Span(LINK_LANE, "link", 0, None, start, end, "communication", False))
        return found
