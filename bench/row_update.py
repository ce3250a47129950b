"""Case `row_update`: an update rule applied to the rows of a buffer, ours and by torch's dense optimizers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import nestpipe_kernels as nk
from nestpipe_kernels._native import core
from nestpipe_kernels.bench.case import Implementation, Setup
from nestpipe_kernels.bench.pool_shapes import LEARNING_RATE, MEASURED_RULES
from nestpipe_kernels.config import positive
from nestpipe_kernels.ops.row_update import row_update
from nestpipe_kernels.types import SparseOptimizer

__all__ = ["add_options", "setups"]

TOLERANCE = 2e-5
"""Largest difference of an embedding from a peer's, after CHECKED_STEPS on values of size 1."""
CHECKED_STEPS = 3
EPS = 1e-30
"""Of Adam: next to none, since ours is added to the root before bias correction, and torch's after it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The case's own options; without any, its default shapes."""
    parser.add_argument("--rows", type=positive, default=100_000, help="rows that are updated")
    parser.add_argument("--dim", type=positive, nargs="+", default=[8, 64, 128, 512], help="floats of an embedding")
    parser.add_argument(
        "--optimizer", choices=MEASURED_RULES, nargs="+", default=["row_wise_adagrad", "adam"], help="update rules"
    )


def setups(parsed: argparse.Namespace) -> Iterator[Setup]:
    """Every rule with every dimension; the check raises ValueError where a peer computes something else."""
    for rule in parsed.optimizer:
        for dim in parsed.dim:
            yield _setup(parsed, rule, dim)


class _Rows:
    """Rows as a store keeps them, updated by row_update."""

    name = "nestpipe"

    def __init__(self, rule: str, values: Tensor) -> None:
        rules: dict[str, SparseOptimizer] = {
            "sgd": nk.optim.SGD(LEARNING_RATE),
            "adagrad": nk.optim.Adagrad(LEARNING_RATE),
            "row_wise_adagrad": nk.optim.RowWiseAdagrad(LEARNING_RATE),
            "adam": nk.optim.Adam(LEARNING_RATE, eps=EPS),
        }
        self._optimizer, self._dim = rules[rule], values.shape[1]
        self.row_floats: int = core().row_floats(self._dim, self._optimizer.state_floats(self._dim))
        self._rows = torch.zeros(len(values), self.row_floats)
        self._rows[:, : self._dim] = values
        self._step = 0

    def step(self, grads: Tensor) -> None:
        self._step += 1
        row_update(self._rows, grads, self._optimizer, self._step, LEARNING_RATE)

    def embeddings(self) -> Tensor:
        return self._rows[:, : self._dim]


class _Torch:
    """The same rows as one parameter with a dense gradient; torch's fused loops, where it has some."""

    def __init__(self, rule: str, values: Tensor) -> None:
        self._weight = torch.nn.Parameter(values.clone())
        made: Any = {
            "sgd": lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, fused=True),
            "adagrad": lambda p: torch.optim.Adagrad(p, lr=LEARNING_RATE, fused=True),
            "adam": lambda p: torch.optim.Adam(p, lr=LEARNING_RATE, eps=EPS, fused=True),
            "row_wise_adagrad": lambda p: None,
        }
        self._optimizer = made[rule]([self._weight])
        self._sums = torch.zeros(len(values), 1)
        self.name = f"torch {rule}" + (", fused" if self._optimizer is not None else ", in operations")

    @torch.no_grad()
    def step(self, grads: Tensor) -> None:
        self._weight.grad = grads
        if self._optimizer is not None:
            self._optimizer.step()
            return
        self._sums += grads.square().mean(1, keepdim=True)
        self._weight.sub_(grads * (LEARNING_RATE / (self._sums.sqrt() + 1e-10)))

    def embeddings(self) -> Tensor:
        return self._weight.detach()


def _setup(parsed: argparse.Namespace, rule: str, dim: int) -> Setup:
    generator = torch.Generator().manual_seed(parsed.seed)
    values = torch.rand(parsed.rows, dim, generator=generator) - 0.5
    grads = torch.randn(parsed.rows, dim, generator=generator)
    ours = _Rows(rule, values)
    peers = [_Torch(rule, values)] if parsed.peers else []
    all_of: list[_Rows | _Torch] = [ours, *peers]
    # Rows are read and written, gradients read; all in order.
    return Setup(
        shape={"rows": parsed.rows, "dim": dim, "optimizer": rule, "row_floats": ours.row_floats},
        implementations=[Implementation(one.name, partial(_step, one, grads)) for one in all_of],
        bytes_streamed=4.0 * parsed.rows * (2 * ours.row_floats + dim),
        check=lambda: _check_equal(all_of, grads),
    )


def _step(one: _Rows | _Torch, grads: Tensor, k: int) -> None:
    one.step(grads)


def _check_equal(all_of: list[_Rows | _Torch], grads: Tensor) -> None:
    ours, *peers = all_of
    for one in all_of:
        for _ in range(CHECKED_STEPS):
            one.step(grads)
    for peer in peers:
        worst = float((peer.embeddings() - ours.embeddings()).abs().max())
        if not worst <= TOLERANCE:
            raise ValueError(f"bench row_update: {peer.name} differs from nestpipe by {worst:.3g}; nothing was timed")
