"""Case `find_or_insert_evict`: find_or_insert into a full table that evicts, beside one with room for everything."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nestpipe_kernels as nk
from nestpipe_kernels.bench.lines import print_lines, spread, use_threads
from nestpipe_kernels.bench.zipf import draw_ranks, far_ids, zipf_cdf
from nestpipe_kernels.launch.machine import facts
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import KeyStatus

__all__ = ["Table", "miss_stream", "run", "zipf_stream"]

ROOM = "room for everything"
SAME_MISSES = "room for everything, as many inserts"
EVICTING = "at capacity, LRU"
FIRST_ALIAS = 1 << 41
"""Above all keys of the streams."""


@dataclass
class Table:
    """A store under measurement, and what each timed call took (ms): of the clock, and of the processors."""

    name: str
    store: EmbeddingStore
    batches: list[Tensor]
    times: list[float] = field(default_factory=list)
    cpu_times: list[float] = field(default_factory=list)
    inserted_before: int = 0

    def call(self, batch: int, timed: bool) -> None:
        """One find_or_insert; embeddings are read, too."""
        start, cpu_start = time.perf_counter(), time.process_time()
        self.store.find_or_insert(self.batches[batch], batch=batch)
        if timed:
            self.times.append((time.perf_counter() - start) * 1e3)
            self.cpu_times.append((time.process_time() - cpu_start) * 1e3)


def zipf_stream(parsed: argparse.Namespace, num_batches: int) -> list[Tensor]:
    """int64 [batch] each: ids of a Zipf distribution over `keys` ids, hot ones spread over the range."""
    generator = np.random.default_rng(parsed.seed)
    cdf = zipf_cdf(parsed.keys, parsed.zipf)
    return [torch.from_numpy(far_ids(draw_ranks(cdf, generator, parsed.batch))) for _ in range(num_batches)]


def miss_stream(parsed: argparse.Namespace, num_batches: int) -> list[Tensor]:
    """int64 [batch] each: no id ever comes again."""
    return [torch.arange(b * parsed.batch, (b + 1) * parsed.batch) * 7919 for b in range(num_batches)]


def run(parsed: argparse.Namespace) -> int:
    """Measure the streams in turn; one JSON line for each table and stream."""
    threads = use_threads(parsed.threads)
    streams: dict[str, Callable[[argparse.Namespace, int], list[Tensor]]] = {"zipf": zipf_stream, "misses": miss_stream}
    lines = []
    for name, make in streams.items():
        lines += _lines(parsed, name, threads, _measure(parsed, name, make))
    print_lines(parsed, lines)
    return 0


def _measure(
    parsed: argparse.Namespace, name: str, make: Callable[[argparse.Namespace, int], list[Tensor]]
) -> list[Table]:
    """The tables after the stream; they take turns, and which one is first alternates."""
    settings: dict[str, Any] = {"dim": parsed.dim, "optimizer": nk.optim.RowWiseAdagrad(0.05), "name": "item"}

    def evicting() -> EmbeddingStore:
        return EmbeddingStore(**settings, capacity=parsed.rows, eviction=nk.policy.LRU(parsed.slack))

    warm_up = _batches_to_fill(make, parsed)
    batches = make(parsed, warm_up + parsed.repeat)
    tables = [Table(ROOM, EmbeddingStore(**settings), batches), Table(EVICTING, evicting(), batches)]
    if name == "zipf":
        tables.insert(1, Table(SAME_MISSES, EmbeddingStore(**settings), _with_aliases(evicting(), batches)))
    # Memory that was written before: what the system takes to hand out fresh pages is not a cost of insertion.
    for table in tables[:-1]:
        for keys in table.batches:
            table.store.find_or_insert(keys, batch=0)
        table.store.clear()
    for b in range(len(batches)):
        if b == warm_up:
            for table in tables:
                table.inserted_before = table.store.counters()["inserted"]
        for table in tables if b % 2 else reversed(tables):
            table.call(b, b >= warm_up)
    if not tables[-1].store.counters()["evicted"]:
        raise ValueError(f"bench evict: the stream {name} evicts nothing; give fewer --rows, more --keys or --repeat")
    print(f"find_or_insert_evict: {name}, {warm_up} batches to fill the table, {parsed.repeat} timed", file=sys.stderr)
    return tables


def _with_aliases(store: EmbeddingStore, batches: list[Tensor]) -> list[Tensor]:
    """The batches with another id for a key each time that `store`, which evicts, has to insert it again.

    A table with room for everything then inserts as often as the one that evicts.
    """
    distinct = torch.cat(batches).unique()  # type: ignore[no-untyped-call]
    alias, fresh, aliased = distinct.clone(), FIRST_ALIAS, []
    for b, keys in enumerate(batches):
        _, status = store.find_or_insert(keys, batch=b)
        place = torch.searchsorted(distinct, keys)
        inserted = place[status == KeyStatus.INSERTED.value]
        alias[inserted] = torch.arange(fresh, fresh + inserted.numel())
        fresh += inserted.numel()
        aliased.append(alias[place])
    return aliased


def _batches_to_fill(make: Callable[[argparse.Namespace, int], list[Tensor]], parsed: argparse.Namespace) -> int:
    """How many batches it takes to bring 1.2 times as many keys as the table has rows."""
    count = 8
    while True:
        distinct = torch.cat(make(parsed, count)).unique().numel()  # type: ignore[no-untyped-call]
        if distinct >= 1.2 * parsed.rows:
            return count
        if count >= 4096:
            raise ValueError(f"bench evict: {count} batches hold {distinct} keys, too few for {parsed.rows} rows")
        count *= 2


def _lines(parsed: argparse.Namespace, stream: str, threads: int, tables: list[Table]) -> list[dict[str, Any]]:
    lines = []
    room = tables[0]
    for table in tables:
        counters = table.store.counters()
        shape = {
            "stream": stream, "rows": parsed.rows, "dim": parsed.dim, "batch": parsed.batch, "slack": parsed.slack,
            "keys": parsed.keys, "zipf": parsed.zipf,
        }  # fmt: skip
        lines.append(
            {
                "case": "find_or_insert_evict",
                "shape": shape,
                "impl": table.name,
                "dtype": "float32",
                "threads": threads,
                **spread(table.times),
                "mean_ms": round(mean(table.times), 4),
                "cpu_ms": round(mean(table.cpu_times), 4),
                "mean_over_room": round(mean(table.times) / mean(room.times), 4),
                "cpu_over_room": round(mean(table.cpu_times) / mean(room.cpu_times), 4),
                "inserted": counters["inserted"] - table.inserted_before,
                "evicted": counters["evicted"],
                **facts(),
            }
        )
    return lines
