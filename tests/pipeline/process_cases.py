"""What a rank process of the pipeline's tests runs; models and data that a spawned process must be able to import."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe_kernels import init, optim
from nestpipe_kernels.comm import communicator_for
from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig
from nestpipe_kernels.ops.owners import default_slice_owner, owners
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.explorer import Outcome
from nestpipe_kernels.testing.scenario import Scenario, ScenarioBatch
from nestpipe_kernels.testing.threads import read_pipeline, scenario_config
from nestpipe_kernels.types import UNBOUNDED, PoolingType

LIMIT_S = 60.0


@dataclass
class ShapedScenario(Scenario):
    """A scenario whose batch sizes are given, and whose keys and bags can be forced.

    Attributes:
        shapes: per rank, the samples of each of its batches.
        empty_rank: the rank whose bags are all empty.
        pool: keys to draw from instead of 0 .. num_keys - 1.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    empty_rank: int = -1
    pool: tuple[int, ...] = ()

    def sizes(self, rank: int) -> list[int]:
        return list(self.shapes[rank]) if self.shapes else super().sizes(rank)

    def loader(self, rank: int, generator: torch.Generator | None) -> Iterator[ScenarioBatch]:
        for batch in super().loader(rank, generator):
            sparse = batch.sparse
            values, lengths = sparse.values(), sparse.lengths()
            if self.pool:
                values = torch.tensor(self.pool)[values]
            if rank == self.empty_rank:
                values, lengths = values[:0], torch.zeros_like(lengths)
            keyed = KeyedJaggedTensor(sparse.keys(), values, lengths=lengths, stride=len(batch.label))
            yield dataclasses.replace(batch, sparse=keyed)


def keys_of_one_owner(scenario: Scenario, world_size: int, owner: int, count: int) -> tuple[int, ...]:
    """Keys that `owner` owns in every table of the scenario."""
    store = scenario.collection(None).row_stores()[0]
    candidates = torch.arange(100 * count * world_size)
    mine = torch.ones(len(candidates), dtype=torch.bool)
    for table in range(len(store.tables)):
        tables = torch.full((len(candidates),), table, dtype=torch.int32)
        mine &= owners(candidates, tables, store.table_hashes, default_slice_owner(world_size)) == owner
    return tuple(candidates[mine][:count].tolist())


class RefillingLoader:
    """Hands out the same tensors for every batch, overwritten for the next one; `damage()` is the caller doing so."""

    def __init__(self, batches: list[ScenarioBatch]) -> None:
        self._batches = iter(batches)
        self._given: list[Tensor] = []

    def __iter__(self) -> RefillingLoader:
        return self

    def __next__(self) -> ScenarioBatch:
        fresh = next(self._batches)
        sparse = fresh.sparse
        new = [sparse.values(), sparse.lengths(), fresh.dense, fresh.label]
        if self._given and all(a.shape == b.shape for a, b in zip(self._given, new)):
            for old, value in zip(self._given, new):
                old.copy_(value)
        else:
            self._given = [t.clone() for t in new]
        values, lengths, dense, label = self._given
        keyed = KeyedJaggedTensor(sparse.keys(), values, lengths=lengths, stride=len(label))
        return ScenarioBatch(keyed, dense, label)

    def damage(self) -> None:
        for tensor in self._given:
            tensor.fill_(-1)


def play(scenario: Scenario, schedule: str) -> Outcome:
    """This rank's part of a scenario under a schedule, over gloo."""
    rank = dist.get_rank()
    generator = scenario.generator(rank)
    model = scenario.model(communicator_for(None, LIMIT_S), generator)
    config = scenario_config(scenario, schedule, LIMIT_S)
    with NestedPipeline(model, scenario.dense_optimizer(model), config=config) as pipeline:
        losses = [float(step.loss) for step in pipeline.run(scenario.loader(rank, generator))]
        return read_pipeline(pipeline, losses)


def play_refilled(scenario: Scenario, schedule: str) -> Outcome:
    """As `play`, from a loader that refills its tensors, and a caller that overwrites them after every step."""
    rank = dist.get_rank()
    model = scenario.model(communicator_for(None, LIMIT_S), None)
    config = scenario_config(scenario, schedule, LIMIT_S)
    loader = RefillingLoader(list(scenario.loader(rank, None)))
    with NestedPipeline(model, scenario.dense_optimizer(model), config=config) as pipeline:
        losses = []
        for step in pipeline.run(loader):
            loader.damage()
            losses.append(float(step.loss))
        return read_pipeline(pipeline, losses)


# ------------------------------------------------------------------------------------------- without a pipeline


def _eager_collection(**settings: Any) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(UNBOUNDED, 3, "t", feature_names=["f"], init=init.Uniform(-0.5, 0.5), **settings)
    return EmbeddingBagCollection([table], optimizer=optim.SGD(lr=1.0), process_group=communicator_for(None, LIMIT_S))


def _bags(*bags: list[int]) -> KeyedJaggedTensor:
    keys = [key for bag in bags for key in bag]
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    return KeyedJaggedTensor(["f"], torch.tensor(keys, dtype=torch.int64), lengths=lengths, stride=len(bags))


def _own_rows(module: EmbeddingBagCollection) -> dict[int, list[float]]:
    keys = module.store("t").keys()
    return dict(zip(keys.tolist(), module.store("t").find(keys)[0].tolist()))


def eager_gradient_one(per_rank: list[list[list[int]]]) -> dict[int, tuple[list[float], list[float]]]:
    """One step in which every output has gradient 1: rows of this rank before and after."""
    module = _eager_collection()
    output = module(_bags(*per_rank[dist.get_rank()])).values()
    before = _own_rows(module)
    output.sum().backward()
    after = _own_rows(module)
    return {key: (before[key], after[key]) for key in before}


def eager_empty(batch_of_rank_1: list[list[int]]) -> tuple[list[int], str, bool, dict[int, list[float]]]:
    """Rank 1 has the given bags, the other keys 1 and 2: (output shape, dtype, all zero, rows that moved)."""
    rank = dist.get_rank()
    module = _eager_collection(pooling=PoolingType.MEAN)
    output = module(_bags(*(batch_of_rank_1 if rank == 1 else [[1, 2], [2]]))).values()
    before = _own_rows(module)
    output.sum().backward()
    moved = {key: value for key, value in _own_rows(module).items() if value != before[key]}
    return list(output.shape), str(output.dtype), not bool(output.detach().count_nonzero()), moved


def eager_failing_rank() -> tuple[str, list[int]]:
    """Rank 1 looks an id up that does not exist; (what this rank got, shape of the next call's output)."""
    table = EmbeddingBagConfig(10, 3, "t", feature_names=["f"])
    group = communicator_for(None, LIMIT_S)
    module = EmbeddingBagCollection([table], optimizer=optim.SGD(lr=1.0), process_group=group)
    got = ""
    try:
        module(_bags([3, 10] if dist.get_rank() == 1 else [3, 4]))
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
    output = module(_bags([3], [4])).values()
    output.sum().backward()
    return got, list(output.shape)


def _eager_step(module: EmbeddingBagCollection, rank: int, step: int) -> Tensor:
    """The loss of one rank's samples in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    bags = [torch.randint(0, 12, (n,), generator=generator).tolist() for n in (2, 0, 3, 1)]
    output = module(_bags(*bags)).values()
    return (output * torch.linspace(-1, 1, output.numel()).view_as(output)).pow(2).sum()


EAGER_RULES = {
    "sgd": optim.SGD(lr=0.1),
    "adagrad": optim.Adagrad(lr=0.1, initial_accumulator_value=0.1),
    "row_wise_adagrad": optim.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.1),
    "adam": optim.Adam(lr=0.05),
}


def eager_train(rule: str, pooling: str, world_size: int, alone: bool) -> Tensor:
    """float32 [12, 3] after 4 steps: each rank its samples, or one process all of them (mean of losses)."""
    table = EmbeddingBagConfig(12, 3, "t", feature_names=["f"], pooling=PoolingType[pooling])
    group = None if alone else communicator_for(None, LIMIT_S)
    module = EmbeddingBagCollection([table], optimizer=EAGER_RULES[rule], seed=3, process_group=group)
    for step in range(4):
        if alone:
            losses = [_eager_step(module, rank, step) for rank in range(world_size)]
            (torch.stack(losses).sum() / world_size).backward()
        else:
            _eager_step(module, dist.get_rank(), step).backward()
    return module.embedding_bags["t"].weight


# ------------------------------------------------------------------------------------------------- construction


def construct(change: str) -> str:
    """A pipeline whose settings differ on rank 1 in `change`; what construction raised."""
    rank = dist.get_rank()
    odd = rank == 1
    scenario = Scenario(micro_batches=3 if odd and change == "num_micro_batches" else 2)
    if odd and change == "tables":
        scenario = dataclasses.replace(scenario, seed=1)
    model = scenario.model(communicator_for(None, LIMIT_S), None)
    if odd and change == "dense parameters":
        model.extra = torch.nn.Linear(1, 1)
    schedule = "dbp" if odd and change == "schedule" else "nested"
    try:
        NestedPipeline(model, scenario.dense_optimizer(model), config=scenario_config(scenario, schedule)).close()
    except ValueError as error:
        return str(error)
    return ""


def one_bad_batch(schedule: str, bad_batch: int, fault: str) -> list[str]:
    """On rank 1 one of five batches fails: by an id outside the vocabulary ("id"), in the model's first or last
    micro-batch ("first", "last") or in the loader ("loader"); what every progress gave."""
    rank = dist.get_rank()
    table = EmbeddingBagConfig(10, 4, "t", feature_names=["f"])
    group = communicator_for(None, LIMIT_S)
    module = EmbeddingBagCollection([table], optimizer=optim.SGD(lr=0.1), process_group=group)
    model = torch.nn.ModuleDict({"embedding": module, "top": torch.nn.Linear(4, 1)})

    def loss(model: Any, batch: tuple[KeyedJaggedTensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model["top"](model["embedding"](batch[0]).values())
        sample = {"first": 0, "last": 2}.get(fault, -1)
        if rank == 1 and bool((batch[1] == bad_batch + sample / 10).any()):
            raise ArithmeticError(f"the {fault} micro-batch broke")
        return logits.pow(2).mean(), batch[1]

    class Loader:
        """Goes on after it has raised, as a generator does not."""

        index = -1

        def __iter__(self) -> Loader:
            return self

        def __next__(self) -> tuple[KeyedJaggedTensor, Tensor]:
            self.index += 1
            if self.index == 5:
                raise StopIteration
            bad = rank == 1 and self.index == bad_batch
            if bad and fault == "loader":
                raise OSError("the disk is gone")
            key = 10 if bad and fault == "id" else self.index
            return _bags([self.index], [key], [1, 2]), self.index + torch.tensor([0.0, 0.1, 0.2])

    config = scenario_config(Scenario(), schedule, LIMIT_S)
    dense = torch.optim.SGD(model["top"].parameters(), lr=0.1)
    got = []
    with NestedPipeline(model, dense, loss, config) as pipeline:
        iterator = Loader()
        while True:
            try:
                got.append(f"batch {float(pipeline.progress(iterator)[0]):g}")
            except StopIteration:
                got.append(f"end after {pipeline.step_count} steps")
                return got
            except Exception as error:
                got.append(f"{type(error).__name__}: {error}")


class Layers(torch.nn.Module):
    """With a buffer, which DDP would send in every forward."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        self.weight = torch.nn.Parameter(torch.rand(4, 4, generator=generator))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) + self.offset


def wrapped_layers() -> tuple[list[bytes], list[bytes], tuple[bool, bool]]:
    """Dense parameters, rows and losses of a model, and of the same with its layers in DistributedDataParallel; rank 1
    has a batch less, and its first one is empty. And whether DDP's switches are as before."""

    def train(wrap: bool) -> tuple[list[bytes], bool]:
        communicator = communicator_for(None, LIMIT_S)
        tables = [EmbeddingBagConfig(20, 4, "item", init=init.Uniform(-1, 1))]
        model = torch.nn.Module()
        model.item = EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=0.1))
        layers = Layers()
        model.layers = torch.nn.parallel.DistributedDataParallel(layers) if wrap else layers

        def loss_fn(model: Any, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
            out = model.layers(model.item(batch).values())
            return out.square().mean(), out

        def loader() -> Iterator[KeyedJaggedTensor]:
            rank = communicator.rank
            generator = torch.Generator().manual_seed(rank)
            for number in range(4 - rank):
                size = 0 if rank and not number else 6
                keys = torch.randint(20, (size * 2,), generator=generator)
                yield KeyedJaggedTensor(["item"], keys, lengths=torch.full((size,), 2), stride=size)

        config = PipelineConfig(num_micro_batches=2, timeout_s=LIMIT_S)
        dense = torch.optim.SGD(layers.parameters(), lr=0.1)
        with NestedPipeline(model, dense, loss_fn, config) as pipeline:
            losses = [float(step.loss) for step in pipeline.run(loader())]
        rows = model.item.state_dict()["embedding_bags.item.weight"]
        state = [layers.weight.detach().numpy().tobytes(), rows.numpy().tobytes(), repr(losses).encode()]
        return state, not wrap or (model.layers.require_backward_grad_sync and model.layers.require_forward_param_sync)

    (plain, one), (wrapped, other) = train(False), train(True)
    return plain, wrapped, (one, other)
