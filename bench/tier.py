"""Case `tier`: training with rows in a file of which a quarter fits into memory, beside the same with all in memory."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import nestpipe_kernels as nk
from nestpipe_kernels._native import core
from nestpipe_kernels.bench.disk import drop_from_cache, random_reads, write_files
from nestpipe_kernels.bench.lines import print_lines, spread
from nestpipe_kernels.bench.memory_limit import MemoryLimit, make_memory_limit
from nestpipe_kernels.bench.tier_worker import Settings, serve
from nestpipe_kernels.config import default_threads
from nestpipe_kernels.launch.machine import facts

__all__ = ["Worker", "run"]

BLOCK = 5
"""Steps of one turn."""
MARGIN = 64 << 20
"""Bytes of the control group beside anonymous memory and the tier's: kernel memory, code, what a batch adds."""
MEMORY, TIER = "in memory", "file tier"


class Worker:
    """A process that trains when it is told to."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Result of a method of the worker. Raises RuntimeError with its error, or if it has gone."""
        self.connection.send((name, *arguments))
        try:
            word, result = self.connection.recv()
        except EOFError:
            self.process.join(10)
            raise RuntimeError(
                f"bench tier: a measuring process ended (exit code {self.process.exitcode}); with -9 the memory limit "
                "was too small for it"
            ) from None
        if word == "failed":
            raise RuntimeError(f"bench tier: {result}")
        return result

    def end(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def run(parsed: argparse.Namespace) -> int:
    """Fill both tables, let them take turns, print one JSON line each."""
    directory = Path(parsed.directory or tempfile.gettempdir())
    threads = parsed.threads or default_threads()
    warm_up = -(-parsed.warm_up // BLOCK) * BLOCK
    repeat = -(-parsed.repeat // BLOCK) * BLOCK
    row_bytes = 4 * core().row_floats(parsed.dim, 1)
    emulated = parsed.dense == "emulated"
    plain = Settings(
        tables=parsed.tables, rows=int(parsed.times * parsed.memory * (1 << 20)) // row_bytes // parsed.tables,
        dim=parsed.dim, batch=parsed.batch, bag=parsed.bag, zipf=parsed.zipf, hidden=16 if emulated else parsed.hidden,
        compute_ms=parsed.compute_ms if emulated else 0.0, micro_batches=parsed.micro_batches, seed=parsed.seed,
        threads=threads, steps=warm_up + repeat, tier=None,
    )  # fmt: skip
    tiered = replace(plain, tier=nk.FileTier(directory, parsed.memory << 20))
    with ExitStack() as stack:
        yardstick = stack.enter_context(_yardstick(directory, plain.rows * plain.tables * row_bytes))
        limit = make_memory_limit("nestpipe-bench-tier")
        if limit is not None:
            stack.callback(limit.remove)
        workers = {MEMORY: Worker(plain), TIER: Worker(tiered)}
        for worker in workers.values():
            stack.callback(worker.end)
        _fill(workers, limit)
        limit_bytes = _warm_up(workers, limit, tiered, warm_up)
        found = _measure(workers, yardstick, repeat)
        if workers[MEMORY].ask("digest") != workers[TIER].ask("digest"):
            raise RuntimeError("bench tier: the rows of the two differ after the same steps")
        shape = {
            **asdict(plain),
            "dense": parsed.dense,
            "distinct_rows": workers[MEMORY].ask("distinct"),
            "directory": str(directory),
        }
        held = None if limit is None else limit.usage()
        for worker in workers.values():
            worker.ask("close")
    shape.pop("tier")
    limits = {
        "store_bytes": plain.rows * plain.tables * row_bytes, "memory_bytes": parsed.memory << 20,
        "limit": "the tier's own account" if limit is None else limit.kind, "limit_bytes": limit_bytes,
        "held_bytes": held,
    }  # fmt: skip
    _print_lines(parsed, {**shape, **limits}, threads, found)
    return 0


@contextmanager
def _yardstick(directory: Path, size: int) -> Iterator[Path]:
    """A file as large as the store, for plain random reads."""
    with tempfile.TemporaryDirectory(prefix="nestpipe-bench-", dir=directory) as folder:
        write_files(Path(folder), [size])
        yield next(Path(folder).iterdir())


def _fill(workers: dict[str, Worker], limit: MemoryLimit | None) -> None:
    """Rows for all keys. The process with the tier counts in the control group from the beginning."""
    if limit is not None:
        pid = workers[TIER].process.pid
        assert pid is not None
        limit.add(pid)
    for name, worker in workers.items():
        print(f"tier: {name}: filling the tables", file=sys.stderr)
        worker.ask("make")
        worker.ask("fill")


def _warm_up(workers: dict[str, Worker], limit: MemoryLimit | None, tiered: Settings, steps: int) -> int:
    """Train; half-way the limit is set: what the process has by itself, and the tier's memory. Returns the limit."""
    assert tiered.tier is not None
    limit_bytes = 0
    for block in range(steps // BLOCK):
        for worker in workers.values():
            worker.ask("steps", BLOCK)
        if block == steps // BLOCK // 2:
            limit_bytes = workers[TIER].ask("anonymous_bytes") + tiered.tier.memory_bytes + MARGIN
            if limit is not None:
                limit.set(limit_bytes)
    return limit_bytes


def _measure(workers: dict[str, Worker], yardstick: Path, repeat: int) -> dict[str, list[float]]:
    """Milliseconds of the steps, pages read and written in each block of the tier, and plain reads per second."""
    found: dict[str, list[float]] = {MEMORY: [], TIER: [], "read": [], "written": [], "rate": []}
    for block in range(repeat // BLOCK):
        before = workers[TIER].ask("counters")
        for name in (MEMORY, TIER) if block % 2 else (TIER, MEMORY):
            found[name] += workers[name].ask("steps", BLOCK)
        after = workers[TIER].ask("counters")
        for kind in ("read", "written"):
            found[kind].append((after[kind] - before[kind]) / BLOCK)
        found["rate"].append(_read_rate(yardstick, max(1, round(found["read"][-1])), block))
        print(f"tier: {(block + 1) * BLOCK} of {repeat} steps", file=sys.stderr)
    return found


def _read_rate(path: Path, pages: int, seed: int) -> float:
    """Random reads per second of as many pages as a step has, asked for in the same way."""
    if drop_from_cache([path]) is False:
        print("tier: the system kept the yardstick's pages; its rate is too high", file=sys.stderr)
    pages = max(256, min(pages, path.stat().st_size // os.sysconf("SC_PAGESIZE") // 4))
    return pages / random_reads(path, pages, seed)


def _print_lines(
    parsed: argparse.Namespace, shape: dict[str, Any], threads: int, found: dict[str, list[float]]
) -> None:
    rate = median(found["rate"])
    disk_ms = mean(found["read"]) / rate * 1e3
    bound = max(median(found[MEMORY]), disk_ms)
    more: dict[str, dict[str, Any]] = {
        MEMORY: {},
        TIER: {
            "cold_pages": round(mean(found["read"])),
            "written_pages": round(mean(found["written"])),
            "random_reads_per_s": round(rate),
            "disk_ms": round(disk_ms, 4),
            "bound_ms": round(bound, 4),
            "over_bound": round(median(found[TIER]) / bound, 4),
            "over_memory": round(median(found[TIER]) / median(found[MEMORY]), 4),
        },
    }
    lines = []
    for name, extra in more.items():
        facts_of_case = {"case": "tier", "shape": shape, "impl": name, "dtype": "float32", "threads": threads}
        lines.append({**facts_of_case, **spread(found[name]), **extra, **facts()})
    print_lines(parsed, lines)
