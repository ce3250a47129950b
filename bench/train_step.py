"""Case `train_step`: lookup and pooling, backward and row update of one step, ours and its peers', on one process."""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch
from torch import Tensor

import nestpipe_kernels as nk
from nestpipe_kernels.bench.lines import print_lines, spread, use_threads
from nestpipe_kernels.bench.peers import Peer, Shape, available_peers
from nestpipe_kernels.bench.zipf import draw_spread, spread_places, zipf_cdf
from nestpipe_kernels.launch.machine import facts
from nestpipe_kernels.types import SparseOptimizer

__all__ = ["Ours", "make_batches", "run"]

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


def run(parsed: argparse.Namespace) -> int:
    """Check that all implementations agree, time them in turn, print one JSON line each.

    Raises:
        ValueError: a peer computes something else; nothing was timed.
    """
    shape = Shape(parsed.tables, parsed.rows, parsed.dim, parsed.batch, parsed.bag, parsed.zipf)
    threads = use_threads(parsed.threads)
    batches = make_batches(shape, parsed.seed)
    grad = torch.randn(shape.batch, shape.tables * shape.dim, generator=torch.Generator().manual_seed(parsed.seed))
    implementations: list[Peer] = [Ours(shape, parsed.optimizer)]
    if parsed.peers:
        touched = [torch.cat([ids[t] for ids in batches]).unique() for t in range(shape.tables)]  # type: ignore[no-untyped-call]
        initial = [implementations[0].rows(t, touched[t]) for t in range(shape.tables)]
        peers, missing = available_peers(shape, parsed.optimizer, LEARNING_RATE, touched, initial)
        implementations += peers
        for line in missing:
            print(f"left out: {line} (make peers installs it)", file=sys.stderr)
        _check_equal(implementations, batches, grad, touched)
    times = _measure(implementations, batches, grad, parsed.repeat)
    _print_lines(parsed, shape, threads, times, batches)
    return 0


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
    print(f"results of {', '.join(p.name for p in implementations)} agree", file=sys.stderr)


def _measure(implementations: list[Peer], batches: list[Tensor], grad: Tensor, repeat: int) -> dict[str, list[float]]:
    """Milliseconds of every step; implementations take turns, so that drift of the machine meets all alike."""
    times: dict[str, list[float]] = {one.name: [] for one in implementations}
    last_report = time.perf_counter()
    for k in range(-len(batches), repeat):  # the first round touches every row once
        for one in implementations:
            start = time.perf_counter()
            one.step(batches[k % len(batches)], grad)
            if k >= 0:
                times[one.name].append((time.perf_counter() - start) * 1e3)
        if time.perf_counter() - last_report > 5:
            last_report = time.perf_counter()
            print(f"train_step: {max(k + 1, 0)} of {repeat} rounds", file=sys.stderr)
    return times


def _print_lines(
    parsed: argparse.Namespace, shape: Shape, threads: int, times: dict[str, list[float]], batches: list[Tensor]
) -> None:
    distinct = sum(len(set(row.tolist())) for row in batches[0])
    lines = [
        {
            "case": "train_step",
            "shape": {**vars(shape), "optimizer": parsed.optimizer, "distinct_rows": distinct},
            "impl": name,
            "dtype": "float32",
            "threads": threads,
            **spread(milliseconds),
            **facts(),
        }
        for name, milliseconds in times.items()
    ]
    print_lines(parsed, lines)
