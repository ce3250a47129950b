"""Case `train_step`: lookup and pooling, backward and row update of one step, ours and its peers', on one process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.bench.machine_floor import lines_of
from nestpipe_kernels.bench.peers import Peer, Shape
from nestpipe_kernels.bench.pool_shapes import MEASURED_RULES, add_shape_options, chosen_shapes, make_all, make_batches

__all__ = ["add_options", "setups"]

TOLERANCE = 2e-5
"""Largest difference of an output or a row from a peer's, after a few steps on values of size 1."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shape."""
    add_shape_options(parser)
    parser.add_argument("--optimizer", choices=MEASURED_RULES, default="row_wise_adagrad", help="row update")


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """The shapes of the options. Their check raises ValueError where a peer computes something else."""
    for _, shape in chosen_shapes(parsed):
        yield _setup(parsed, shape)


def _setup(parsed: argparse.Namespace, shape: Shape) -> Setup:
    batches = make_batches(shape, parsed.seed)
    grad = torch.randn(shape.batch, shape.tables * shape.dim, generator=torch.Generator().manual_seed(parsed.seed))
    all_of, touched, missing = make_all(shape, parsed.optimizer, batches, parsed.seed, parsed.peers)
    distinct = sum(len(row.unique()) for row in batches[0])
    keys, bags, row_bytes = batches[0].numel(), shape.batch * shape.tables, 4 * shape.dim
    return Setup(
        shape={**vars(shape), "optimizer": parsed.optimizer, "distinct_rows": distinct},
        implementations=[Implementation(one.name, partial(_step, one, batches, grad)) for one in all_of],
        # Keys; bags out and their gradients in; rows written. Each distinct row is read in forward and in the update.
        bytes_streamed=8 * keys + 2 * bags * row_bytes + distinct * row_bytes,
        random_lines=2 * distinct * lines_of(row_bytes),
        adjacent_lines=lines_of(row_bytes),
        missing=missing,
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
