"""The frame of the cases on an accelerator: what a case says, how it is timed, and its JSON lines.

The floor of a case is the least that it has to move over the rate of a large copy on the device, measured in the same
run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nestpipe_kernels.bench.lines import print_lines, spread
from nestpipe_kernels.device import DeviceBackend, backend_for
from nestpipe_kernels.launch.machine import facts

__all__ = ["Candidate", "Work", "copy_rate", "free_memory", "link_rate", "run", "scaled"]

WARM_UP_ROUNDS = 2
COPY_BYTES = 1 << 30


@dataclass
class Candidate:
    """One way to do the work: `step(k)`; `prepare(k)`, where given, goes before it and is not timed."""

    name: str
    step: Callable[[int], Any]
    prepare: Callable[[int], Any] | None = None


@dataclass
class Work:
    """One shape of a case, ready to run: candidates, ours first."""

    shape: dict[str, Any]
    candidates: list[Candidate]
    bytes_moved: float
    dtype: str = "float32"
    rate: float | None = None
    """Bytes per second that bound it; None: those of a copy on the device."""
    keys: int = 0
    """If given, lines tell keys per second."""
    inner: int = 5
    """Steps between two looks at the clock."""
    check: Callable[[], None] | None = None
    """Raises ValueError where results differ; called before anything is timed."""
    missing: list[str] = field(default_factory=list)
    """Peers that cannot run here, each with its reason."""


def run(parsed: argparse.Namespace) -> int:
    """Measure the cases one after the other. A case that cannot be run is told, and the others go on: exit code 1.

    Raises:
        ValueError: the device is none, is not here, or is the CPU.
    """
    try:
        backend = backend_for(parsed.device)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if not backend.has_streams:
        raise ValueError(f"on {parsed.device} a case is named, as in: nestpipe bench dedup")
    failed = []
    for name in parsed.only:
        try:
            case = importlib.import_module(f"nestpipe_kernels.bench.on_device.{name}")
            for work in case.works(parsed, backend):
                _measure_and_print(parsed, backend, name, work)
                del work
                free_memory(backend)
        except Exception as error:
            failed.append(name)
            print(f"bench: case {name} failed: {type(error).__name__}: {error}", file=sys.stderr)
            free_memory(backend)
    if failed:
        print(f"bench: {len(failed)} of {len(parsed.only)} cases failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def scaled(parsed: argparse.Namespace, size: int, least: int = 1) -> int:
    """A size of the case at the scale of the command."""
    return max(int(size * parsed.scale), least)


def free_memory(backend: DeviceBackend) -> None:
    """Give back what the allocator keeps, so that one case's memory does not stand in another's way."""
    import gc

    gc.collect()
    empty = getattr(torch.get_device_module(backend.device), "empty_cache", None)
    if empty is not None:
        empty()


def copy_rate(backend: DeviceBackend, scale: float = 1.0) -> float:
    """Bytes per second, read and written, of a large copy on the device: the best of a few."""
    size = max(int(COPY_BYTES * scale), 1 << 10)
    source = torch.ones(size, dtype=torch.uint8, device=backend.device)
    target = torch.ones_like(source)
    times = _time(backend, [Candidate("copy", lambda k: target.copy_(source))], rounds=5, inner=5)["copy"]
    return 2 * size / min(times)


def link_rate(backend: DeviceBackend, copy: Callable[[int], Any], size: int) -> float:
    """Bytes per second of `copy(0)`, which moves `size` bytes between host and device: the best of a few."""
    times = _time(backend, [Candidate("copy", copy)], rounds=5, inner=1)["copy"]
    return size / min(times)


def _measure_and_print(parsed: argparse.Namespace, backend: DeviceBackend, name: str, work: Work) -> None:
    for text in work.missing:
        print(f"left out: {text}", file=sys.stderr)
    if work.check is not None:
        work.check()
        print(f"{name}: results of {', '.join(c.name for c in work.candidates)} agree", file=sys.stderr)
    times = _time(backend, work.candidates, parsed.repeat, work.inner)
    rate = work.rate if work.rate is not None else copy_rate(backend, parsed.scale)
    made = []
    for candidate, seconds in times.items():
        found = spread(seconds, 1e3, 6)
        floor_ms = work.bytes_moved / rate * 1e3
        line: dict[str, Any] = {
            "case": name, "shape": work.shape, "impl": candidate, "dtype": work.dtype, "device": _name(backend),
            **found,
            "gb_per_s": _digits(work.bytes_moved / found["median_ms"] / 1e6),
            "floor_ms": _digits(floor_ms),
            "fraction_of_floor": _digits(floor_ms / found["median_ms"]),
        }  # fmt: skip
        if work.keys:
            line["keys_per_s"] = _digits(work.keys / found["median_ms"] * 1e3)
        made.append({**line, **facts()})
    print_lines(parsed, made)


def _time(backend: DeviceBackend, candidates: Sequence[Candidate], rounds: int, inner: int) -> dict[str, list[float]]:
    """Seconds of a step, the mean of `inner` in a row, for each round; candidates take turns."""
    times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for k in range(-WARM_UP_ROUNDS, rounds):
        for candidate in candidates:
            took = 0.0
            steps = range(inner) if candidate.prepare is None else range(1)
            if candidate.prepare is not None:
                candidate.prepare(k)
            backend.synchronize()
            start = time.perf_counter()
            for step in steps:
                candidate.step(k * inner + step)
            backend.synchronize()
            took = time.perf_counter() - start
            if k >= 0:
                times[candidate.name].append(took / len(steps))
    return times


def _name(backend: DeviceBackend) -> str:
    module: Any = torch.get_device_module(backend.device)
    return f"{module.get_device_name(backend.device)} ({backend.device})"


def _digits(value: float) -> float:
    """Four that say something."""
    return float(f"{value:.4g}")
