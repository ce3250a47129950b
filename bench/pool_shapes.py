"""The shapes of `lookup_pool` and `train_step`: tables, bags and Zipf keys, and the stores and peers that hold them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nestpipe_kernels as nk
from nestpipe_kernels.bench.peers import Peer, Shape, available_peers
from nestpipe_kernels.bench.zipf import draw_spread, spread_places, zipf_cdf
from nestpipe_kernels.config import non_negative, positive
from nestpipe_kernels.types import SparseOptimizer

__all__ = ["LEARNING_RATE", "MEASURED_RULES", "Ours", "add_shape_options", "chosen_shapes", "make_all", "make_batches"]

MEASURED_RULES = ("sgd", "adagrad", "row_wise_adagrad", "adam")
"""Update rules that a peer has, too."""
NUM_BATCHES = 4
"""Distinct batches, used in turn: rows of one do not stay in the caches until it comes again."""
LEARNING_RATE = 0.05
FILL_BYTES = 1 << 30
"""Rows, without states, that a store holds at most beside those of the batches."""

SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "dim8": {"dim": 8},
    "dim128": {"dim": 128},
    "dim512": {"dim": 512, "rows": 250_000},
    "single": {"bag": 1},
    "small": {"batch": 256},
    "hot": {"hot": 0.5},
}
"""What differs from the options' own defaults."""


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

    def fill(self, shape: Shape, touched: list[Tensor], seed: int) -> None:
        """Give rows to keys in random order, as many as fit into FILL_BYTES and all of `touched`."""
        generator = np.random.default_rng(seed)
        allowed = FILL_BYTES // (4 * shape.dim * shape.tables)
        for t, keys in enumerate(touched):
            order = generator.permutation(shape.rows)
            kept = np.arange(shape.rows) < allowed
            wanted = np.zeros(shape.rows, dtype=bool)
            wanted[keys.numpy()] = True
            self.collection.store(f"t{t}").find_or_insert(torch.from_numpy(order[kept | wanted[order]]))

    def forward(self, ids: Tensor) -> Tensor:
        features = nk.KeyedJaggedTensor(self._keys, ids.reshape(-1), lengths=self._lengths)
        output: Tensor = self.collection(features).values()
        return output

    def step(self, ids: Tensor, grad: Tensor) -> Tensor:
        output = self.forward(ids)
        output.backward(grad)  # type: ignore[no-untyped-call]
        return output.detach()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        found, _ = self.collection.store(f"t{table}").find(ids)
        return found


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """What describes a shape."""
    parser.add_argument("--tables", type=positive, default=4, help="number of tables")
    parser.add_argument("--rows", type=positive, default=1_000_000, help="rows of a table")
    parser.add_argument("--dim", type=positive, default=64, help="size of an embedding")
    parser.add_argument("--batch", type=positive, default=2048, help="samples of a step")
    parser.add_argument("--bag", type=positive, default=20, help="keys of a bag")
    parser.add_argument("--zipf", type=non_negative, default=1.05, help="skew of the keys; 0 is uniform")
    parser.add_argument("--hot", type=non_negative, default=0.0, help="part of the bags with the same first key")
    parser.add_argument(
        "--shapes", nargs="+", choices=("all", *SHAPES), default=["default"], metavar="SHAPE",
        help=f"that of the other options (default), or with changes: {', '.join(list(SHAPES)[1:])}; or all of them",
    )  # fmt: skip


def chosen_shapes(parsed: argparse.Namespace) -> Iterator[tuple[str, Shape]]:
    """The shapes of the options, by name."""
    own = Shape(parsed.tables, parsed.rows, parsed.dim, parsed.batch, parsed.bag, parsed.zipf, parsed.hot)
    for name in SHAPES if "all" in parsed.shapes else dict.fromkeys(parsed.shapes):
        yield name, replace(own, **SHAPES[name])


def make_batches(shape: Shape, seed: int) -> list[Tensor]:
    """NUM_BATCHES times int64 [tables, batch * bag]: Zipf ids, hot ones spread over the table."""
    generator = np.random.default_rng(seed)
    cdf, places = zipf_cdf(shape.rows, shape.zipf), spread_places(generator, shape.tables, shape.rows)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = draw_spread(cdf, places, generator, shape.batch * shape.bag)
        if shape.hot:
            bags = ids.reshape(shape.tables, shape.batch, shape.bag)
            bags[:, :, 0] = np.where(generator.random((shape.tables, shape.batch)) < shape.hot, 0, bags[:, :, 0])
        batches.append(torch.from_numpy(ids))
    return batches


def make_all(
    shape: Shape, optimizer: str, batches: list[Tensor], seed: int, peers: bool
) -> tuple[list[Peer], list[Tensor], list[str]]:
    """Ours, filled, and the peers with the same rows; the keys of each table in the batches; which peers are missing
    and why."""
    touched = [torch.cat([ids[t] for ids in batches]).unique() for t in range(shape.tables)]  # type: ignore[no-untyped-call]
    ours = Ours(shape, optimizer)
    ours.fill(shape, touched, seed)
    if not peers:
        return [ours], touched, []
    initial = [ours.rows(t, touched[t]) for t in range(shape.tables)]
    others, missing = available_peers(shape, optimizer, LEARNING_RATE, touched, initial)
    return [ours, *others], touched, [f"{line} (make peers installs it)" for line in missing]
