"""Case `capacity`: a step (rows out, gradients in) of a very large table beside that of a small one, and memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels import optim
from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.bench.find_or_insert import far_keys
from nestpipe_kernels.bench.machine_floor import lines_of
from nestpipe_kernels.config import positive
from nestpipe_kernels.init import Constant
from nestpipe_kernels.store import EmbeddingStore

__all__ = ["add_options", "setups"]

START = 0.25
RECORD_BYTES = 32
"""Behind each row: its key, and when and how often it was used."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shapes."""
    parser.add_argument("--keys", type=positive, default=100_000_000, help="keys of the large table")
    parser.add_argument("--small", type=positive, default=1_000_000, help="keys of the one beside it")
    parser.add_argument("--batch", type=positive, default=100_000, help="keys of a step")
    parser.add_argument("--fill", type=positive, default=1_000_000, help="keys of a call that fills a table")
    parser.add_argument("--dim", type=positive, default=16, help="floats of a row")


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """Keys drawn uniformly from those of a table; each step finds their rows and updates them."""
    small = min(parsed.small, parsed.keys)
    tables = [_Table(size, parsed) for size in dict.fromkeys((small, parsed.keys))]
    grads = torch.randn(parsed.batch, parsed.dim, generator=torch.Generator().manual_seed(parsed.seed))

    def check() -> None:
        keys = far_keys(torch.arange(small))[: parsed.batch]
        rows = [table.store.find(keys)[0] for table in tables]
        if not all(torch.equal(rows[0], other) for other in rows):
            raise ValueError("bench capacity: the tables' rows differ; nothing was timed")

    yield Setup(
        shape={"keys": parsed.keys, "batch": parsed.batch, "dim": parsed.dim},
        implementations=[Implementation(x.name, x.step(grads), x.prepare) for x in tables],
        # Keys in, twice; rows and status out; gradients in.
        bytes_streamed=(2 * 8 + 1 + 2 * 4 * parsed.dim) * parsed.batch,
        random_lines=parsed.batch * (1 + lines_of(4 * (parsed.dim + 2) + RECORD_BYTES)),
        adjacent_lines=lines_of(4 * (parsed.dim + 2) + RECORD_BYTES),
        further={x.name: _further(x, tables[0], parsed.batch) for x in tables},
        check=check,
        warmed=True,
    )


class _Table:
    """A store with keys 0 to `size` - 1, as `far_keys` makes them, and what the process grew by for it."""

    def __init__(self, size: int, parsed: argparse.Namespace) -> None:
        self.name, self.size, self._batch = f"nestpipe, {size} keys", size, parsed.batch
        self._generator = torch.Generator().manual_seed(parsed.seed)
        self._keys = torch.empty(0, dtype=torch.int64)
        out = torch.zeros(min(parsed.fill, size), parsed.dim)
        before = _resident_bytes()
        self.store = EmbeddingStore(
            dim=parsed.dim, optimizer=optim.RowWiseAdagrad(0.05), name="item", init=Constant(START)
        )
        for begin in range(0, size, parsed.fill):
            keys = far_keys(torch.arange(begin, min(size, begin + parsed.fill)))
            self.store.find_or_insert(keys, out=out[: len(keys)])
        self.process_bytes = None if before is None else (_resident_bytes() or 0) - before
        self.milliseconds = 0.0

    def prepare(self, k: int) -> None:
        self._keys = far_keys(torch.randint(self.size, (self._batch,), generator=self._generator))

    def step(self, grads: Tensor) -> Callable[[int], Any]:
        out = torch.zeros(self._batch, grads.shape[1])

        def work(k: int) -> Tensor:
            self.store.find_or_insert(self._keys, out=out)
            return self.store.apply_gradients(self._keys, grads, step=1)

        return work


def _further(table: _Table, small: _Table, batch: int) -> Callable[[Sequence[float]], dict[str, Any]]:
    """Fields of a line: time of a key, that over the small table's, and bytes as process and store count them."""

    def fields(milliseconds: Sequence[float]) -> dict[str, Any]:
        table.milliseconds = median(milliseconds)
        memory = table.store.memory()
        stored = sum(memory[part] for part in ("index", "slabs", "metadata", "admission"))
        return {
            "ns_per_key": round(table.milliseconds * 1e6 / batch, 1),
            "over_small": round(table.milliseconds / small.milliseconds, 3),
            "process_bytes": table.process_bytes,
            "store_bytes": stored,
            "untouched_bytes": memory["untouched"],
            "bytes_per_key": round(stored / table.size, 2),
        }

    return fields


def _resident_bytes() -> int | None:
    """Of this process, where the system says so."""
    if not sys.platform.startswith("linux"):
        return None
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10
