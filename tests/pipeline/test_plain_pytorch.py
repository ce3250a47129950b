"""E2: as close to a float64 run as plain PyTorch in float32 (nn.EmbeddingBag, torch.optim, one process, 100 steps)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazy_optimizers as lazy
from lazy_optimizers import MaskedDense
from nestpipe_kernels import PipelineConfig, init, optim
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig
from nestpipe_kernels.ops.row_update.reference import RULES as UPDATE_RULES
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.scenario import ScenarioBatch
from nestpipe_kernels.testing.threads import run_ranks_as_threads
from nestpipe_kernels.types import PoolingType

STEPS, SAMPLES, ROWS, DIM = 100, 6, 30, 4
MODES = {"user": "sum", "item": "mean"}  # by feature


RULES: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        optim.SGD(lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: MaskedDense(p, partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01)),
    ),
    "adagrad": (
        optim.Adagrad(lr=0.05, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    ),
    "row_wise_adagrad": (
        optim.RowWiseAdagrad(lr=0.05, initial_accumulator_value=0.1, weight_decay=0.01),
        partial(lazy.row_wise_adagrad, lr=0.05, start=0.1, weight_decay=0.01),
    ),
    "adam": (optim.Adam(lr=0.01), lambda p: torch.optim.SparseAdam(list(p), lr=0.01)),
    "adamw": (
        optim.AdamW(lr=0.01, weight_decay=0.1),
        lambda p: MaskedDense(p, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)),
    ),
    "row_wise_adam": (
        optim.RowWiseAdam(lr=0.01, weight_decay=0.1),
        partial(lazy.row_wise_adam, lr=0.01, weight_decay=0.1),
    ),
    "ftrl": (optim.FTRL(lr=0.1, l1=0.1, l2=0.1), partial(lazy.ftrl, lr=0.1, l1=0.1, l2=0.1)),
    "lamb": (optim.LAMB(lr=0.01, weight_decay=0.1), partial(lazy.lamb, lr=0.01, weight_decay=0.1)),
}
Rules = tuple[str, ...]


def tables_of(rules: Rules) -> dict[str, tuple[str, str]]:
    """Table name -> (feature, rule): one model has a table of each rule; features take turns."""
    return {f"{feature}/{rule}": (feature, rule) for rule, feature in zip(rules, itertools.cycle(MODES))}


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


def top(rules: Rules, seed: int) -> nn.Linear:
    width = len(rules) * DIM + 2
    linear = nn.Linear(width, 1)
    generator = torch.Generator().manual_seed(seed)
    linear.weight.data = torch.rand(1, width, generator=generator) - 0.5
    linear.bias.data = torch.zeros(1)
    return linear


def collection(rules: Rules, seed: int, communicator: Any = None) -> EmbeddingBagCollection:
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
        for name, (feature, rule) in tables_of(rules).items()
    ]
    return EmbeddingBagCollection(tables, seed=seed, process_group=communicator)


def loss_of(linear: nn.Linear, pooled: Tensor, batch: ScenarioBatch) -> Tensor:
    dtype = linear.weight.dtype
    logits = linear(torch.cat([pooled, batch.dense.to(dtype)], 1)).squeeze(1)
    return ((logits - batch.label.to(dtype)) ** 2).mean()


class Ours(nn.Module):
    def __init__(self, rules: Rules, seed: int, communicator: Any) -> None:
        super().__init__()
        self.lookup = collection(rules, seed, communicator)
        self.linear = top(rules, seed)

    def forward(self, batch: ScenarioBatch) -> tuple[Tensor, None]:
        return loss_of(self.linear, self.lookup(batch.sparse).values(), batch), None


def through_pipeline(rules: Rules, world_size: int, micro_batches: int, seed: int) -> dict[str, Tensor]:
    def body(rank: int, communicator: Any) -> dict[str, Tensor]:
        model = Ours(rules, seed, communicator)
        dense = torch.optim.SGD(model.linear.parameters(), lr=0.05, momentum=0.9)
        with NestedPipeline(model, dense, config=PipelineConfig(num_micro_batches=micro_batches)) as pipeline:
            for _ in pipeline.run(batches(rank, seed)):
                pass
            return {name: model.lookup.embedding_bags[name].weight for name in tables_of(rules)}

    return run_ranks_as_threads(world_size, body)[0]


@cache
def plain(rules: Rules, world_size: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """One process sees the batches of all ranks; its loss is the mean of their means."""
    tables, start = tables_of(rules), collection(rules, seed).embedding_bags
    bags = {
        name: nn.EmbeddingBag(ROWS, DIM, mode=MODES[feature], sparse=True, _weight=start[name].weight.to(dtype))
        for name, (feature, _) in tables.items()
    }
    linear = top(rules, seed).to(dtype)
    optimizers = [
        make(bags[name].weight for name, (_, used) in tables.items() if used == rule)
        for rule, (_, make) in RULES.items()
        if rule in rules
    ]
    optimizers.append(torch.optim.SGD(linear.parameters(), lr=0.05, momentum=0.9))
    for step in zip(*(batches(rank, seed) for rank in range(world_size))):
        losses = []
        for batch in step:
            inputs = {f: (batch.sparse[f].values(), batch.sparse[f].offsets()[:-1]) for f in MODES}
            pooled = [bags[name](*inputs[feature]) for name, (feature, _) in tables.items()]
            losses.append(loss_of(linear, torch.cat(pooled, 1), batch))
        (torch.stack(losses).sum() / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: bag.weight.detach() for name, bag in bags.items()}


def rms(tensor: Tensor) -> float:
    return float(tensor.double().pow(2).mean().sqrt())


# World size, micro-batches, rules and seeds: each rule once; all of them at all sizes and more seeds in the soak.
SIZES = ((1, 1), (1, 4), (2, 1), (2, 4), (3, 1), (3, 4))
CASES = [
    (1, 4, ("momentum", "adagrad", "adam", "row_wise_adam", "lamb"), 3),
    (2, 2, ("sgd", "row_wise_adagrad", "adamw", "ftrl"), 3),
    *(pytest.param(*size, tuple(RULES), 5, marks=[pytest.mark.soak, pytest.mark.timeout(600)]) for size in SIZES),
]


def test_every_rule_has_a_case():
    assert sorted(CASES[0][2] + CASES[1][2]) == sorted(RULES)
    assert {ours.name for ours, _ in RULES.values()} == set(UPDATE_RULES)


@pytest.mark.parametrize(("world_size", "micro_batches", "rules", "seeds"), CASES)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_as_close_to_float64_as_torch(world_size, micro_batches, rules, seeds):
    errors: dict[str, list[tuple[float, float, float]]] = {name: [] for name in tables_of(rules)}
    for seed in range(seeds):
        run = through_pipeline(rules, world_size, micro_batches, seed)
        exact = plain(rules, world_size, seed, torch.float64)
        rounded = plain(rules, world_size, seed, torch.float32)
        for name, found in errors.items():
            ulp = rms(exact[name]) * torch.finfo(torch.float32).eps
            found.append((rms(run[name] - exact[name]), rms(rounded[name] - exact[name]), ulp))
    for name, found in errors.items():
        ours, torchs, ulp = (statistics.median(column) for column in zip(*found))
        assert ours <= 2 * torchs + ulp, f"{name}: RMS error {ours:.3g}, torch's {torchs:.3g}, ulp {ulp:.3g}"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_a_run_moves_far_more_than_it_rounds():
    rules = tuple(RULES)
    start = collection(rules, 0).embedding_bags
    exact, rounded = plain(rules, 1, 0, torch.float64), plain(rules, 1, 0, torch.float32)
    for name in tables_of(rules):
        assert rms(exact[name] - start[name].weight) > 1e4 * rms(rounded[name] - exact[name])
