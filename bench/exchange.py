"""Case `exchange`: rows between two processes on loopback over gloo, ours and all_to_all_single."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.comm.gloo import GlooCommunicator
from nestpipe_kernels.config import positive

__all__ = ["add_options", "setups"]

RANKS = 2
TIMEOUT_S = 60


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shapes."""
    parser.add_argument("--rows", type=positive, nargs="+", default=[100, 10_000, 50_000], help="rows to either rank")
    parser.add_argument("--dim", type=positive, default=64, help="floats of a row")


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """Every step is one exchange in which this rank takes part; the other process does what it is told to.

    Raises:
        RuntimeError: the other process did not come up, or has gone.
    """
    for rows in parsed.rows:
        with tempfile.TemporaryDirectory(prefix="nestpipe-exchange-") as folder:
            context = multiprocessing.get_context("spawn")
            here, there = context.Pipe()
            other = context.Process(
                target=_other_rank, args=(folder, rows, parsed.dim, parsed.seed, there), daemon=True
            )
            other.start()
            there.close()
            rank = None
            try:
                rank = _Rank(0, folder, rows, parsed.dim, parsed.seed)
                yield _setup(parsed, rows, rank, here)
            finally:
                here.close()  # the other rank ends
                if rank is not None:
                    rank.close()
                other.join(TIMEOUT_S)
                if other.is_alive():
                    other.kill()
                    print("exchange: the other process had to be ended", file=sys.stderr)


def _setup(parsed: argparse.Namespace, rows: int, rank: _Rank, other: Any) -> Setup:
    def both(name: str) -> Implementation:
        def step(k: int) -> Tensor:
            other.send(name)
            return rank.step(name)

        return Implementation(NAMES[name], step)

    moved = rows * parsed.dim * 4
    # What a rank keeps is copied once (read and written); what it sends goes from user memory to the kernel's and from
    # there to the peer's, in both directions.
    return Setup(
        shape={"rows_to_each": rows, "dim": parsed.dim, "ranks": RANKS, "bytes_sent": moved},
        implementations=[both("ours"), *([both("torch")] if parsed.peers else [])],
        bytes_streamed=2 * moved + 2 * 4 * moved,
    )


NAMES = {"ours": "nestpipe", "torch": "torch.distributed.all_to_all_single (gloo)"}


class _Rank:
    """One rank of the pair, its rows and groups."""

    def __init__(self, rank: int, folder: str, rows: int, dim: int, seed: int) -> None:
        self._counts = [rows] * RANKS
        limit = timedelta(seconds=TIMEOUT_S)
        meet = f"file://{Path(folder) / 'ranks'}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS, timeout=limit)
        self._communicator = GlooCommunicator(timeout_s=TIMEOUT_S)
        self._group = self._communicator.group("rows")
        self._rows = torch.randn(RANKS * rows, dim, generator=torch.Generator().manual_seed(seed + rank))
        self._out = torch.empty_like(self._rows)

    def step(self, name: str) -> Tensor:
        if name == "ours":
            self._group.all_to_all(self._rows, self._counts, self._counts, "rows", self._out).wait()
        else:
            dist.all_to_all_single(self._out, self._rows)
        return self._out

    def close(self) -> None:
        self._communicator.close()
        dist.destroy_process_group()


def _other_rank(folder: str, rows: int, dim: int, seed: int, orders: Any) -> None:
    torch.set_num_threads(1)
    rank = _Rank(1, folder, rows, dim, seed)
    while True:
        try:
            name = orders.recv()
        except EOFError:
            break
        rank.step(name)
    rank.close()
