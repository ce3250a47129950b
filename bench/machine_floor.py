"""What this machine can do at most: bytes copied in order, and lines of memory read at random places, per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from nestpipe_kernels._native import core
from nestpipe_kernels.ops.gather_rows import gather_rows

__all__ = ["LINE_BYTES", "MachineFloor", "floor_ms", "lines_of", "machine_floor"]

LINE_BYTES = 64
COPY_FLOATS = 1 << 25
"""128 MiB each way: far more than the caches hold."""
RANDOM_LINES = 1 << 22
"""256 MiB in lines."""
ATTEMPTS = 5


@dataclass(frozen=True)
class MachineFloor:
    """Rates with so many threads, the best of a few attempts."""

    threads: int
    bytes_per_s: float
    lines_per_s: float


@cache
def machine_floor(threads: int, adjacent_lines: int = 1) -> MachineFloor:
    """Measure the rates once in this process; it takes about a second.

    `bytes_per_s` counts bytes read and bytes written of a large copy. `lines_per_s` are reads of 64-byte lines,
    `adjacent_lines` side by side at each random place and several places under way at a time: rows gathered (by
    torch.index_select or gather_rows, whichever is faster), less the time that their numbers and the result, which are
    read and written in order, take at the first rate.
    """
    before = core().num_threads(), torch.get_num_threads()
    core().set_num_threads(threads)
    torch.set_num_threads(threads)
    try:
        bytes_per_s = _copy_rate(threads)
        dim = adjacent_lines * LINE_BYTES // 4
        rows = torch.ones(max(1, RANDOM_LINES // adjacent_lines), dim)
        count = max(1, len(rows) // 4)
        index = torch.randint(len(rows), (count,), generator=torch.Generator().manual_seed(0))
        out = torch.ones(count, dim)
        seconds = min(
            _best_seconds(lambda: torch.index_select(rows, 0, index, out=out)),
            _best_seconds(lambda: gather_rows(rows, index, dim, out)),
        )
        in_order = (8 * count + 4 * dim * count) / bytes_per_s
        return MachineFloor(threads, bytes_per_s, adjacent_lines * count / max(seconds - in_order, seconds / 4))
    finally:
        core().set_num_threads(before[0])
        torch.set_num_threads(before[1])


@cache
def _copy_rate(threads: int) -> float:
    source, target = torch.ones(COPY_FLOATS), torch.ones(COPY_FLOATS)
    return 2 * 4 * COPY_FLOATS / _best_seconds(lambda: target.copy_(source))


def _best_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ATTEMPTS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def lines_of(row_bytes: int) -> int:
    """Lines that a row of so many bytes fills."""
    return -(-row_bytes // LINE_BYTES)


def floor_ms(bytes_streamed: float, random_lines: float, machine: MachineFloor) -> float:
    """Milliseconds for bytes read or written in order and then lines read at random places, at the machine's rates."""
    return (bytes_streamed / machine.bytes_per_s + random_lines / machine.lines_per_s) * 1e3
