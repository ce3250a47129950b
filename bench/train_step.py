"""Case `train_step`: lookup and pooling, backward and row update of one step, ours and its peers', on one process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

import nestpipe_kernels as nk
from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.bench.machine_floor import lines_of
from nestpipe_kernels.bench.peers import Peer, Shape, available_peers
from nestpipe_kernels.bench.zipf import draw_spread, spread_places, zipf_cdf
from nestpipe_kernels.config import non_negative, positive
from nestpipe_kernels.types import SparseOptimizer

__all__ = ["Ours", "add_options", "make_batches", "setups"]

MEASURED_RULES = ("sgd", "adagrad", "row_wise_adagrad", "adam")
"""Update rules that a peer has, too."""
NUM_BATCHES = 4
"""Distinct batches, used in turn: rows of one do not stay in the caches until it comes again."""
LEARNING_RATE = 0.05
TOLERANCE = 2e-5
"""Largest difference of an output or a row from a peer's, after NUM_BATCHES steps on values of size 1."""


class Ours(Peer):
    """EmbeddingBagCollection without a pipeline: rows in forward, the update at the end of backward."""

    name = "nestpipe"

    def __init__(self, shape: Shape, optimizer: str) -> None:
        rules: dict[str, SparseOptimizer] = {
            "sgd": nk.optim.SGD(LEARNING_RATE),
            "adagrad": nk.optim.Adagrad(LEARNING_RATE),
            "row_wise_adagrad": nk.optim.RowWiseAdagrad(LEARNING_RATE),
            "adam": nk.optim.Adam(LEARNING_RATE),
        }
        tables = [
            nk.EmbeddingBagConfig(
                shape.rows, shape.dim, f"t{t}", feature_names=[f"f{t}"], init=nk.init.Uniform(-0.5, 0.5)
            )
            for t in range(shape.tables)
        ]
        self.collection = nk.EmbeddingBagCollection(tables, optimizer=rules[optimizer])
        self._keys = [f"f{t}" for t in range(shape.tables)]
        self._lengths = torch.full((shape.tables * shape.batch,), shape.bag, dtype=torch.int64)

    def step(self, ids: Tensor, grad: Tensor) -> Tensor:
        features = nk.KeyedJaggedTensor(self._keys, ids.reshape(-1), lengths=self._lengths)
        output: Tensor = self.collection(features).values()
        output.backward(grad)  # type: ignore[no-untyped-call]
        return output.detach()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        found, _ = self.collection.store(f"t{table}").find(ids)
        return found


def make_batches(shape: Shape, seed: int) -> list[Tensor]:
    """NUM_BATCHES times int64 [tables, batch * bag]: Zipf ids, hot ones spread over the table."""
    generator = np.random.default_rng(seed)
    cdf, places = zipf_cdf(shape.rows, shape.zipf), spread_places(generator, shape.tables, shape.rows)
    return [torch.from_numpy(draw_spread(cdf, places, generator, shape.batch * shape.bag)) for _ in range(NUM_BATCHES)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shape."""
    parser.add_argument("--tables", type=positive, default=4, help="number of tables")
    parser.add_argument("--rows", type=positive, default=1_000_000, help="rows of a table")
    parser.add_argument("--dim", type=positive, default=64, help="size of an embedding")
    parser.add_argument("--batch", type=positive, default=2048, help="samples of a step")
    parser.add_argument("--bag", type=positive, default=20, help="keys of a bag")
    parser.add_argument("--zipf", type=non_negative, default=1.05, help="skew of the keys; 0 is uniform")
    parser.add_argument("--optimizer", choices=MEASURED_RULES, default="row_wise_adagrad", help="row update")


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """The one shape of the options. Its check raises ValueError where a peer computes something else."""
    shape = Shape(parsed.tables, parsed.rows, parsed.dim, parsed.batch, parsed.bag, parsed.zipf)
    batches = make_batches(shape, parsed.seed)
    grad = torch.randn(shape.batch, shape.tables * shape.dim, generator=torch.Generator().manual_seed(parsed.seed))
    all_of: list[Peer] = [Ours(shape, parsed.optimizer)]
    missing: list[str] = []
    touched: list[Tensor] = []
    if parsed.peers:
        touched = [torch.cat([ids[t] for ids in batches]).unique() for t in range(shape.tables)]  # type: ignore[no-untyped-call]
        initial = [all_of[0].rows(t, touched[t]) for t in range(shape.tables)]
        peers, missing = available_peers(shape, parsed.optimizer, LEARNING_RATE, touched, initial)
        all_of += peers
    distinct = sum(len(row.unique()) for row in batches[0])
    keys, bags, row_bytes = batches[0].numel(), shape.batch * shape.tables, 4 * shape.dim
    yield Setup(
        shape={**vars(shape), "optimizer": parsed.optimizer, "distinct_rows": distinct},
        implementations=[Implementation(one.name, partial(_step, one, batches, grad)) for one in all_of],
        # Keys; bags out and their gradients in; rows written. Each distinct row is read in forward and in the update.
        bytes_streamed=8 * keys + 2 * bags * row_bytes + distinct * row_bytes,
        random_lines=2 * distinct * lines_of(row_bytes),
        adjacent_lines=lines_of(row_bytes),
        missing=[f"{line} (make peers installs it)" for line in missing],
        check=lambda: _check_equal(all_of, batches, grad, touched),
    )


def _step(one: Peer, batches: list[Tensor], grad: Tensor, k: int) -> None:
    one.step(batches[k % len(batches)], grad)


def _check_equal(implementations: list[Peer], batches: list[Tensor], grad: Tensor, touched: list[Tensor]) -> None:
    ours, *peers = implementations
    outputs = [ours.step(ids, grad) for ids in batches]
    for peer in peers:
        worst = max(float((peer.step(ids, grad) - o).abs().max()) for ids, o in zip(batches, outputs))
        rows = max(float((peer.rows(t, k) - ours.rows(t, k)).abs().max()) for t, k in enumerate(touched))
        if not max(worst, rows) <= TOLERANCE * max(1.0, float(outputs[-1].abs().max())):
            raise ValueError(
                f"bench train_step: {peer.name} differs from nestpipe by {worst:.3g} in outputs and {rows:.3g} in "
                "rows; nothing was timed"
            )
