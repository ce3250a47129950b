"""Case `checkpoint`: save, load and reshard against what the disk does with files of the same sizes in the same run."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import nestpipe_kernels as nk
from nestpipe_kernels.bench.disk import copy_files, drop_from_cache, read_files, write_files
from nestpipe_kernels.bench.lines import print_lines, spread, use_threads
from nestpipe_kernels.checkpoint.api import load, save
from nestpipe_kernels.checkpoint.tools.reshard import reshard
from nestpipe_kernels.launch.machine import facts
from nestpipe_kernels.types import SparseOptimizer

__all__ = ["run"]

INSERTED_AT_ONCE = 1 << 20
HEADROOM = 1.1
"""Free disk needed, as a multiple of the files that lie there at once."""


class _Model(torch.nn.Module):
    """One table and nothing else."""

    def __init__(self, dim: int, optimizer: str) -> None:
        super().__init__()
        rules: dict[str, SparseOptimizer] = {
            "sgd": nk.optim.SGD(0.05),
            "adagrad": nk.optim.Adagrad(0.05),
            "row_wise_adagrad": nk.optim.RowWiseAdagrad(0.05),
            "adam": nk.optim.Adam(0.05),
        }
        table = nk.EmbeddingBagConfig(nk.UNBOUNDED, dim, "t", feature_names=["f"], init=nk.init.Uniform(-0.5, 0.5))
        self.embeddings = nk.EmbeddingBagCollection([table], optimizer=rules[optimizer])


class _Times:
    """Seconds of repeated pieces of work, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}

    def add(self, name: str, work: Callable[[], Any]) -> None:
        """Time `work`, on the clock and on the cores."""
        started, cpu_started = time.perf_counter(), time.process_time()
        work()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        self.seconds.setdefault(name, []).append(seconds)
        self.cpu_seconds.setdefault(name, []).append(cpu_seconds)
        print(f"checkpoint: {name} {seconds:.2f} s, {cpu_seconds:.2f} s of cores", file=sys.stderr)

    def median(self, name: str) -> float:
        """Seconds on the clock."""
        return median(self.seconds[name])


def run(parsed: argparse.Namespace) -> int:
    """Save, load and reshard, in turn with plain files of the same sizes; print one JSON line each.

    Raises:
        ValueError: the disk has too little room.
        OSError: as the system says. Files are removed whatever happens.
    """
    threads = use_threads(parsed.threads)
    root = Path(tempfile.mkdtemp(prefix="nestpipe-bench-", dir=parsed.directory))
    try:
        times, sizes, cold = _measure(parsed, root)
    finally:
        shutil.rmtree(root)
    _print_lines(parsed, threads, times, sizes, cold)
    return 0


def _measure(parsed: argparse.Namespace, root: Path) -> tuple[_Times, list[int], bool | None]:
    model = _filled(parsed)
    times, cold = _Times(), []
    sizes: list[int] = []
    wanted = parsed.only or ("save", "load", "reshard")
    saved, plain, other = (root / name for name in ("saved", "plain", "other"))
    for number in range(parsed.repeat):
        if number == 0 or "save" in wanted:
            shutil.rmtree(saved, ignore_errors=True)
            times.add("save", partial(save, saved, model=model))
        files = sorted(path for path in saved.iterdir() if path.stat().st_size)
        sizes = [path.stat().st_size for path in files]
        _check_room(root, sum(sizes))
        plain.mkdir()
        times.add("write", partial(write_files, plain, sizes))
        plains = sorted(plain.iterdir())
        if "load" in wanted:
            cold.append(_forget([*files, *plains]))
            times.add("read", partial(read_files, plains))
            target = _Model(parsed.dim, parsed.optimizer)
            times.add("load", partial(load, saved, model=target))
            del target
        shutil.rmtree(plain)
        if "reshard" in wanted:
            cold.append(_forget(files))
            other.mkdir()
            times.add("copy", partial(copy_files, files, other))
            shutil.rmtree(other)
            cold.append(_forget(files))
            times.add("reshard", partial(reshard, saved, parsed.ranks, other))
            shutil.rmtree(other)
    return times, sizes, False if False in cold else (None if None in cold else True)


def _forget(files: list[Path]) -> bool | None:
    """drop_from_cache, with a line that says what came of it."""
    cold = drop_from_cache(files)
    answer = {True: "yes", False: "NO, the next times are of reading memory", None: "unknown"}[cold]
    print(f"checkpoint: cache dropped: {answer}", file=sys.stderr)
    return cold


def _filled(parsed: argparse.Namespace) -> _Model:
    model = _Model(parsed.dim, parsed.optimizer)
    store = model.embeddings.row_stores()[0]
    generator = torch.Generator().manual_seed(parsed.seed)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    while (missing := parsed.rows - store.size("t")) > 0:  # type: ignore[attr-defined]
        keys = torch.randint(low, high, (min(missing, INSERTED_AT_ONCE),), generator=generator).unique()  # type: ignore[no-untyped-call]
        store.retrieve(keys, torch.zeros(keys.numel(), dtype=torch.int32), torch.ones_like(keys), 0)
    return model


def _check_room(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < HEADROOM * needed:
        raise ValueError(
            f"bench checkpoint: needs {HEADROOM * needed / 1e9:.1f} GB free in {root.parent}, got {free / 1e9:.1f} GB; "
            "give fewer --rows or another --directory"
        )


def _print_lines(parsed: argparse.Namespace, threads: int, times: _Times, sizes: list[int], cold: bool | None) -> None:
    shape = {
        "rows": parsed.rows,
        "dim": parsed.dim,
        "optimizer": parsed.optimizer,
        "bytes": sum(sizes),
        "ranks": parsed.ranks,
        "cache_was_dropped": cold,
    }
    against = {"save": "write", "load": "read", "reshard": "copy"}
    lines = []
    for name, seconds in times.seconds.items():
        line: dict[str, Any] = {
            "case": "checkpoint",
            "shape": shape,
            "impl": f"nestpipe {name}" if name in against else f"disk {name}",
            "dtype": "float32",
            "threads": threads,
            **spread(seconds, 1e3, 2),
            "cpu_ms": round(median(times.cpu_seconds[name]) * 1e3, 2),
            "gb_per_s": round(sum(sizes) / median(seconds) / 1e9, 3),
        }
        if against.get(name) in times.seconds:
            ratio = times.median(against[name]) / median(seconds)
            line["fraction_of_disk" if name != "reshard" else "times_copy"] = round(
                ratio if name != "reshard" else 1 / ratio, 3
            )
        lines.append({**line, **facts()})
    print_lines(parsed, lines)
