"""Case `growth`: a table that grows from nothing, call by call; the time of every call, and what its index takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels import optim
from nestpipe_kernels._native import core
from nestpipe_kernels.bench.absl_peer import AbslPeer, load
from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.bench.find_or_insert import far_keys
from nestpipe_kernels.bench.machine_floor import lines_of
from nestpipe_kernels.config import positive
from nestpipe_kernels.init import Constant
from nestpipe_kernels.store import EmbeddingStore

__all__ = ["add_options", "setups"]

START = 0.25


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shapes."""
    parser.add_argument("--keys", type=positive, default=20_000_000, help="keys of the table in the end")
    parser.add_argument("--batch", type=positive, default=100_000, help="keys of a call")
    parser.add_argument("--dim", type=positive, default=16, help="floats of a row")


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """Calls of new keys only, as many as it takes, whatever --repeat says; the table is made anew before the first."""
    calls = -(-parsed.keys // parsed.batch)
    threads = core().num_threads()
    missing: list[str] = []
    out = torch.zeros(parsed.batch, parsed.dim)
    tables = [_Growing("nestpipe", parsed, lambda: _Ours(parsed.dim))]
    if parsed.peers:
        library, reason = load()
        missing = [] if library is not None else [reason]
        rows = parsed.keys // threads + parsed.keys // 50 + parsed.batch
        for tuned in (False, True) if library is not None else ():

            def make(tuned: bool = tuned) -> AbslPeer:
                return AbslPeer(library, parsed.dim, rows, threads, tuned=tuned, initial=START)

            tables.append(_Growing(make().name, parsed, make))
    yield Setup(
        shape={"keys": parsed.keys, "batch": parsed.batch, "dim": parsed.dim},
        implementations=[Implementation(x.name, x.step(out), x.prepare) for x in tables],
        bytes_streamed=(8 + 1 + 4 * parsed.dim + 4 * parsed.dim) * parsed.batch,
        random_lines=parsed.batch,
        adjacent_lines=lines_of(4 * parsed.dim),
        missing=missing,
        rounds=calls,
        further={x.name: x.further for x in tables},
    )


class _Ours:
    """An EmbeddingStore with the calls of AbslPeer."""

    def __init__(self, dim: int) -> None:
        self._store = EmbeddingStore(dim=dim, optimizer=optim.SGD(0.1), name="item", init=Constant(START))

    def find_or_insert(self, keys: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        return self._store.find_or_insert(keys, out=out)

    def index_bytes(self) -> int:
        """With all it retains."""
        return self._store.memory()["index"]


class _Growing:
    """A table that is made anew before call 0; the calls before that warm up with another one."""

    def __init__(self, name: str, parsed: argparse.Namespace, make: Callable[[], Any]) -> None:
        self.name, self._parsed, self._make = name, parsed, make
        self._table: Any = None
        self._inserted = 0
        self._keys = torch.empty(0, dtype=torch.int64)

    def prepare(self, k: int) -> None:
        if self._table is None or k == 0:
            self._table, self._inserted = None, 0
            self._table = self._make()
        end = min(self._inserted + self._parsed.batch, self._parsed.keys)
        self._keys = far_keys(torch.arange(self._inserted, max(end, self._inserted + 1)))
        self._inserted += len(self._keys)

    def step(self, out: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
        return lambda k: self._table.find_or_insert(self._keys, out[: len(self._keys)])

    def further(self, milliseconds: Sequence[float]) -> dict[str, float]:
        """Fields of its line: the slowest call, that over the median, and bytes of the index for each key."""
        slowest = max(milliseconds)
        found = {
            "max_ms": round(slowest, 4),
            "max_over_median": round(slowest / median(milliseconds), 3),
            "index_bytes_per_key": round(self._table.index_bytes() / self._inserted, 2),
        }
        self._table = None  # It may be large.
        return found
