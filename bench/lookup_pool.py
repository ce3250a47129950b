"""Case `lookup_pool`: rows of bags of keys, summed; ours by key from a store, the peers' by row number."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.bench.machine_floor import lines_of
from nestpipe_kernels.bench.peers import Peer, Shape
from nestpipe_kernels.bench.pool_shapes import add_shape_options, chosen_shapes, make_all, make_batches

__all__ = ["add_options", "setups"]

TOLERANCE = 1e-5
"""Largest difference of an output from a peer's, relative to the largest output."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shape."""
    add_shape_options(parser)


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """The shapes of the options. Their check raises ValueError where a peer computes something else."""
    for _, shape in chosen_shapes(parsed):
        yield _setup(parsed, shape)


def _setup(parsed: argparse.Namespace, shape: Shape) -> Setup:
    batches = make_batches(shape, parsed.seed)
    all_of, _, missing = make_all(shape, "sgd", batches, parsed.seed, parsed.peers)
    distinct = sum(len(row.unique()) for row in batches[0])
    keys, bags, row_bytes = batches[0].numel(), shape.batch * shape.tables, 4 * shape.dim
    ours, *peers = all_of
    return Setup(
        shape={**vars(shape), "distinct_rows": distinct},
        implementations=[
            Implementation(ours.name, partial(_evaluate, ours, batches)),
            Implementation(f"{ours.name}, training", partial(_train, ours, batches)),
            *(Implementation(one.name.split(" sparse")[0], partial(_evaluate, one, batches)) for one in peers),
        ],
        # Keys in, bags out; each distinct row is read, and its key looked up.
        bytes_streamed=8 * keys + bags * row_bytes,
        random_lines=distinct * lines_of(row_bytes),
        adjacent_lines=lines_of(row_bytes),
        missing=missing,
        check=lambda: _check_equal(all_of, batches),
    )


@torch.no_grad()
def _evaluate(one: Peer, batches: list[Tensor], k: int) -> Tensor:
    return one.forward(batches[k % len(batches)])


def _train(one: Peer, batches: list[Tensor], k: int) -> Tensor:
    """The forward of training: keys without a row get one, and their use is counted."""
    return one.forward(batches[k % len(batches)])


def _check_equal(implementations: list[Peer], batches: list[Tensor]) -> None:
    ours, *peers = implementations
    for k in range(len(batches)):
        expected = _evaluate(ours, batches, k)
        if not torch.equal(_train(ours, batches, k).detach(), expected):
            raise ValueError("bench lookup_pool: training and evaluation differ; nothing was timed")
        for peer in peers:
            worst = float((_evaluate(peer, batches, k) - expected).abs().max())
            if not worst <= TOLERANCE * max(1.0, float(expected.abs().max())):
                raise ValueError(
                    f"bench lookup_pool: {peer.name} differs from nestpipe by {worst:.3g}; nothing was timed"
                )
