"""Case `find_or_insert`: rows of keys, made where there are none, out of a large table; ours and by absl's map."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels import optim
from nestpipe_kernels._native import core
from nestpipe_kernels.bench.absl_peer import AbslPeer, load
from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.bench.machine_floor import lines_of
from nestpipe_kernels.config import positive
from nestpipe_kernels.init import Constant
from nestpipe_kernels.store import EmbeddingStore

__all__ = ["add_options", "far_keys", "setups"]

MIXES = {"hits": 0.0, "misses": 1.0, "half": 0.5}
"""Part of a call's keys that are new."""
START = 0.25
"""What a new row is filled with: drawing random values is not what this case measures."""
CHUNK = 500_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shapes."""
    parser.add_argument("--keys", type=positive, default=10_000_000, help="keys of the table")
    parser.add_argument("--batch", type=positive, default=1_000_000, help="keys of a call")
    parser.add_argument("--dim", type=positive, default=64, help="floats of a row")
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=list(MIXES), help="calls to measure")


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """Calls of distinct keys in no order, of which none, all or half are new; the new ones are erased between calls."""
    size = min(parsed.batch, parsed.keys)
    threads = core().num_threads()
    missing: list[str] = []
    store = EmbeddingStore(dim=parsed.dim, optimizer=optim.SGD(0.1), name="item", init=Constant(START))
    peers = _peers(parsed, size, threads, missing) if parsed.peers else []
    generator = torch.Generator().manual_seed(parsed.seed)
    order = torch.randperm(parsed.keys, generator=generator)
    for begin in range(0, parsed.keys, CHUNK):
        numbers = order[begin : begin + CHUNK]
        keys, values = far_keys(numbers), (numbers % 1009).float()[:, None] + torch.arange(parsed.dim) * 0.5
        store.write_embeddings(
            store.retrieve(keys, torch.zeros(len(keys), dtype=torch.int32), None, -1).handles, values
        )
        for peer in peers:
            peer.fill(keys, values)
    order = torch.randperm(parsed.keys, generator=generator)
    out = torch.zeros(size, parsed.dim)
    for mix in parsed.mix:
        num_new = int(size * MIXES[mix])
        new = far_keys(torch.arange(parsed.keys, parsed.keys + num_new))
        calls = [
            torch.cat([far_keys(order[begin : begin + size - num_new]), new])[torch.randperm(size, generator=generator)]
            for begin in range(0, parsed.keys - size + 1, size)
        ]
        ours = Implementation("nestpipe", partial(_ours, store, calls, out), _eraser(store.erase, new))
        others = [Implementation(x.name, partial(_theirs, x, calls, out), _eraser(x.erase, new)) for x in peers]
        # Keys in, rows and status out; new rows are written. A line of the index for each key, and the rows found.
        yield Setup(
            shape={"keys": parsed.keys, "batch": size, "dim": parsed.dim, "mix": mix},
            implementations=[ours, *others],
            bytes_streamed=(8 + 1 + 4 * parsed.dim) * size + 4 * parsed.dim * num_new,
            random_lines=size + (size - num_new) * lines_of(4 * parsed.dim),
            adjacent_lines=lines_of(4 * parsed.dim),
            missing=missing,
        )


def far_keys(numbers: Tensor) -> Tensor:
    """int64 [n]: different numbers become different keys, anywhere between the least int64 and the largest."""
    keys = numbers * -7046029254386353131
    return keys ^ (keys >> 29)


def _peers(parsed: argparse.Namespace, size: int, threads: int, missing: list[str]) -> list[AbslPeer]:
    library, reason = load()
    if library is None:
        missing.append(reason)
        return []
    rows = parsed.keys + size
    per_thread = rows // threads + rows // 50 + 1000
    return [AbslPeer(library, parsed.dim, per_thread, threads, tuned=tuned, initial=START) for tuned in (False, True)]


def _ours(store: EmbeddingStore, calls: list[Tensor], out: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return store.find_or_insert(calls[k % len(calls)], out=out)


def _theirs(peer: AbslPeer, calls: list[Tensor], out: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return peer.find_or_insert(calls[k % len(calls)], out)


def _eraser(erase: Callable[[Tensor], Any], new: Tensor) -> Callable[[int], None]:
    def prepare(k: int) -> None:
        if len(new):
            erase(new)

    return prepare
