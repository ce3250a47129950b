"""Case `convert`: a training step of embedding modules after nk.convert, without a pipeline, beside the same modules
with sparse gradients and torch.optim.SparseAdam."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import nestpipe_kernels as nk
from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.bench.machine_floor import lines_of
from nestpipe_kernels.bench.zipf import draw_spread, spread_places, zipf_cdf
from nestpipe_kernels.config import non_negative, positive

__all__ = ["SHAPES", "Tables", "add_options", "setups"]

SHAPES = {"bags": (4, 20), "single": (16, 1), "criteo": (26, 1)}
"""Number of tables, ids of a sample in each."""
NUM_BATCHES = 4
CHECKED_STEPS = 3
LEARNING_RATE = 1e-3
TOLERANCE = 2e-5
"""Largest difference of an output or a row after a few steps, on values of size 1."""


class Tables(nn.Module):
    """Modules as a user has them: bags of several ids pooled by sum, or a row for each sample; outputs side by side."""

    def __init__(self, tables: int, rows: int, dim: int, bag: int) -> None:
        super().__init__()
        make: Any = nn.Embedding if bag == 1 else partial(nn.EmbeddingBag, mode="sum")
        self.tables = nn.ModuleList(make(rows, dim, sparse=True) for _ in range(tables))

    def forward(self, ids: list[Tensor]) -> Tensor:
        """Ids of each table int64 [B] or [B, bag]: float32 [B, tables * dim]."""
        return torch.cat([table(one) for table, one in zip(self.tables, ids)], 1)


class _Loop:
    """A loop's step: forward, backward from a given gradient, and torch's optimizer where the tables need one."""

    def __init__(self, name: str, model: Tables, optimizer: torch.optim.Optimizer | None) -> None:
        self.name, self.model, self._optimizer = name, model, optimizer

    def step(self, ids: list[Tensor], grad: Tensor) -> Tensor:
        """The output, float32 as `grad`."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        out: Tensor = self.model(ids)
        out.backward(grad)  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.step()
        return out.detach()

    def rows(self) -> dict[str, Tensor]:
        """All rows by name."""
        state: dict[str, Tensor] = self.model.state_dict()
        return state


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.add_argument("--rows", type=positive, default=100_000, help="rows of a table")
    parser.add_argument("--dim", type=positive, default=64, help="size of an embedding")
    parser.add_argument("--batch", type=positive, default=2048, help="samples of a step")
    parser.add_argument("--zipf", type=non_negative, default=1.05, help="skew of the ids; 0 is uniform")
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), metavar="SHAPE",
        help="bags: 4 tables, 20 ids each; single, criteo: 16 and 26 tables, one id each",
    )  # fmt: skip


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """The shapes of the options. Their check raises ValueError where outputs or rows differ."""
    for name in dict.fromkeys(parsed.shapes):
        yield _setup(parsed, name, *SHAPES[name])


def _setup(parsed: argparse.Namespace, name: str, tables: int, bag: int) -> Setup:
    torch.manual_seed(parsed.seed)
    plain = Tables(tables, parsed.rows, parsed.dim, bag)
    converted = copy.deepcopy(plain)
    nk.convert(converted, nk.optim.Adam(lr=LEARNING_RATE))
    loops = [_Loop("nestpipe", converted, None)]
    if parsed.peers:
        optimizer = torch.optim.SparseAdam(list(plain.parameters()), lr=LEARNING_RATE)
        loops.append(_Loop("torch.nn sparse + SparseAdam", plain, optimizer))
    batches = _batches(parsed, tables, bag)
    grad = torch.randn(parsed.batch, tables * parsed.dim, generator=torch.Generator().manual_seed(parsed.seed))
    distinct = sum(len(np.unique(one.numpy())) for one in batches[0])
    keys, bags, row_bytes = tables * parsed.batch * bag, tables * parsed.batch, 4 * parsed.dim
    return Setup(
        shape={
            "name": name, "tables": tables, "rows": parsed.rows, "dim": parsed.dim, "batch": parsed.batch, "bag": bag,
            "zipf": parsed.zipf, "distinct_rows": distinct,
        },
        implementations=[Implementation(one.name, partial(_step, one, batches, grad)) for one in loops],
        # Keys; outputs and their gradients; rows with moments written. Read: rows in forward, with moments after it.
        bytes_streamed=8 * keys + 2 * bags * row_bytes + 3 * distinct * row_bytes,
        random_lines=distinct * (lines_of(row_bytes) + lines_of(3 * row_bytes)),
        adjacent_lines=lines_of(row_bytes),
        check=partial(_check_equal, loops, batches, grad),
    )  # fmt: skip


def _batches(parsed: argparse.Namespace, tables: int, bag: int) -> list[list[Tensor]]:
    """Distinct batches, used in turn, of Zipf ids: for each table int64 [B] or [B, bag]."""
    generator = np.random.default_rng(parsed.seed)
    cdf, places = zipf_cdf(parsed.rows, parsed.zipf), spread_places(generator, tables, parsed.rows)
    shape = (parsed.batch,) if bag == 1 else (parsed.batch, bag)
    return [
        [torch.from_numpy(one.reshape(shape)) for one in draw_spread(cdf, places, generator, parsed.batch * bag)]
        for _ in range(NUM_BATCHES)
    ]


def _step(one: _Loop, batches: list[list[Tensor]], grad: Tensor, k: int) -> None:
    one.step(batches[k % len(batches)], grad)


def _check_equal(loops: list[_Loop], batches: list[list[Tensor]], grad: Tensor) -> None:
    ours, *peers = loops
    outputs = [ours.step(ids, grad) for ids in batches[:CHECKED_STEPS]]
    rows = ours.rows()
    for peer in peers:
        worst = max(float((peer.step(ids, grad) - out).abs().max()) for ids, out in zip(batches, outputs))
        apart = max(float((value - rows[name]).abs().max()) for name, value in peer.rows().items())
        if not max(worst, apart) <= TOLERANCE * max(1.0, *(float(out.abs().max()) for out in outputs)):
            raise ValueError(
                f"bench convert: {peer.name} differs from nestpipe by {worst:.3g} in outputs and {apart:.3g} in rows; "
                "nothing was timed"
            )
