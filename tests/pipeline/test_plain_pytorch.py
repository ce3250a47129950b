"""E2: as close to a float64 run as plain PyTorch in float32 (nn.EmbeddingBag, torch.optim, one process, 100 steps)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe_kernels import PipelineConfig, init, optim
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.scenario import ScenarioBatch
from nestpipe_kernels.testing.threads import run_ranks_as_threads
from nestpipe_kernels.types import PoolingType

STEPS, SEEDS, SAMPLES, ROWS, DIM = 100, 5, 6, 30, 4
MODES = {"user": "sum", "item": "mean"}  # by feature


class PlainRowWiseAdagrad(torch.optim.Optimizer):
    """s += mean(g * g) of a row; p -= lr / (sqrt(s) + eps) * g, in the parameter's own precision."""

    def __init__(self, params: Any, lr: float, start: float, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "start": start, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad.coalesce()
                rows, g = grad.indices()[0], grad.values()
                s = self.state[p].setdefault("sum", torch.full((len(p),), group["start"], dtype=p.dtype))
                s[rows] += (g * g).mean(1)
                p[rows] -= (group["lr"] / (s[rows].sqrt() + group["eps"]))[:, None] * g


RULES: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (
        optim.Adagrad(lr=0.05, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    ),
    "row_wise_adagrad": (
        optim.RowWiseAdagrad(lr=0.05, initial_accumulator_value=0.1),
        lambda p: PlainRowWiseAdagrad(p, lr=0.05, start=0.1),
    ),
    "adam": (optim.Adam(lr=0.01), lambda p: torch.optim.SparseAdam(list(p), lr=0.01)),
}
TABLES = {f"{feature}/{rule}": (feature, rule) for rule in RULES for feature in MODES}
"""One model has a table for each feature and rule, so that a run shows all of them."""


def batches(rank: int, seed: int) -> Iterator[ScenarioBatch]:
    generator = torch.Generator().manual_seed(seed * 10 + rank)
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (2 * SAMPLES,), generator=generator)
        lengths[0] = lengths[-1] = 2
        keys = (torch.rand(int(lengths.sum()), generator=generator) ** 2 * ROWS).long()
        dense = torch.rand(SAMPLES, 2, generator=generator)
        yield ScenarioBatch(
            KeyedJaggedTensor(list(MODES), keys, lengths=lengths, stride=SAMPLES),
            dense,
            torch.rand(SAMPLES, generator=generator),
        )


def top(seed: int) -> nn.Linear:
    width = len(TABLES) * DIM + 2
    linear = nn.Linear(width, 1)
    generator = torch.Generator().manual_seed(seed)
    linear.weight.data = torch.rand(1, width, generator=generator) - 0.5
    linear.bias.data = torch.zeros(1)
    return linear


def collection(seed: int, communicator: Any = None) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            ROWS,
            DIM,
            name,
            feature_names=[feature],
            pooling=PoolingType[MODES[feature].upper()],
            init=init.Uniform(-0.5, 0.5),
            optimizer=RULES[rule][0],
        )
        for name, (feature, rule) in TABLES.items()
    ]
    return EmbeddingBagCollection(tables, seed=seed, process_group=communicator)


def loss_of(linear: nn.Linear, pooled: Tensor, batch: ScenarioBatch) -> Tensor:
    dtype = linear.weight.dtype
    logits = linear(torch.cat([pooled, batch.dense.to(dtype)], 1)).squeeze(1)
    return ((logits - batch.label.to(dtype)) ** 2).mean()


class Ours(nn.Module):
    def __init__(self, seed: int, communicator: Any) -> None:
        super().__init__()
        self.lookup = collection(seed, communicator)
        self.linear = top(seed)

    def forward(self, batch: ScenarioBatch) -> tuple[Tensor, None]:
        return loss_of(self.linear, self.lookup(batch.sparse).values(), batch), None


def through_pipeline(world_size: int, micro_batches: int, seed: int) -> dict[str, Tensor]:
    def body(rank: int, communicator: Any) -> dict[str, Tensor]:
        model = Ours(seed, communicator)
        dense = torch.optim.SGD(model.linear.parameters(), lr=0.05, momentum=0.9)
        with NestedPipeline(model, dense, config=PipelineConfig(num_micro_batches=micro_batches)) as pipeline:
            for _ in pipeline.run(batches(rank, seed)):
                pass
            return {name: model.lookup.embedding_bags[name].weight for name in TABLES}

    return run_ranks_as_threads(world_size, body)[0]


@cache
def plain(world_size: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """One process sees the batches of all ranks; its loss is the mean of their means."""
    start = collection(seed).embedding_bags
    bags = {
        name: nn.EmbeddingBag(ROWS, DIM, mode=MODES[feature], sparse=True, _weight=start[name].weight.to(dtype))
        for name, (feature, _) in TABLES.items()
    }
    linear = top(seed).to(dtype)
    optimizers = [
        make(bags[name].weight for name, (_, used) in TABLES.items() if used == rule)
        for rule, (_, make) in RULES.items()
    ]
    optimizers.append(torch.optim.SGD(linear.parameters(), lr=0.05, momentum=0.9))
    for step in zip(*(batches(rank, seed) for rank in range(world_size))):
        losses = []
        for batch in step:
            inputs = {f: (batch.sparse[f].values(), batch.sparse[f].offsets()[:-1]) for f in MODES}
            pooled = [bags[name](*inputs[feature]) for name, (feature, _) in TABLES.items()]
            losses.append(loss_of(linear, torch.cat(pooled, 1), batch))
        (torch.stack(losses).sum() / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: bag.weight.detach() for name, bag in bags.items()}


def rms(tensor: Tensor) -> float:
    return float(tensor.double().pow(2).mean().sqrt())


# World size and micro-batches; what takes longest in the soak.
LONGER = ((1, 4), (2, 1), (3, 1), (3, 4))
CASES = [(1, 1), (2, 4), *(pytest.param(*case, marks=pytest.mark.soak) for case in LONGER)]


@pytest.mark.parametrize(("world_size", "micro_batches"), CASES)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_as_close_to_float64_as_torch(world_size, micro_batches):
    errors: dict[str, list[tuple[float, float, float]]] = {name: [] for name in TABLES}
    for seed in range(SEEDS):
        run = through_pipeline(world_size, micro_batches, seed)
        exact = plain(world_size, seed, torch.float64)
        rounded = plain(world_size, seed, torch.float32)
        for name in TABLES:
            ulp = rms(exact[name]) * torch.finfo(torch.float32).eps
            errors[name].append((rms(run[name] - exact[name]), rms(rounded[name] - exact[name]), ulp))
    for name, found in errors.items():
        ours, torchs, ulp = (statistics.median(column) for column in zip(*found))
        assert ours <= 2 * torchs + ulp, f"{name}: RMS error {ours:.3g}, torch's {torchs:.3g}, ulp {ulp:.3g}"


def test_a_run_moves_far_more_than_it_rounds():
    start = collection(0).embedding_bags
    exact, rounded = plain(1, 0, torch.float64), plain(1, 0, torch.float32)
    for name in TABLES:
        assert rms(exact[name] - start[name].weight) > 1e4 * rms(rounded[name] - exact[name])
