"""Small recommenders with everything that can go wrong in order: shared keys, dropout-like noise, uneven ranks,
several tables and modes.

A Scenario makes the ranks of a run afresh as often as one likes: for the explorer (RankStates), for real pipelines
(models and loaders), and for the oracle, always with the same data and the same random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import init, optim
from ..comm import InMemoryWorld, SparseGroups, Topology
from ..jagged import KeyedJaggedTensor
from ..nn import EmbeddingBagCollection, EmbeddingBagConfig
from ..ops.owners import default_slice_owner
from ..stages.owner_pool import select_features
from ..stages.state import RankState, Source, bind_stores
from ..types import UNBOUNDED, DataType, PoolingType
from .explorer import Outcome
from .oracle import Oracle, OracleLookup
from .oracle_groups import AveragingOracle
from .oracle_rows import OracleTable, Wires

__all__ = ["Features", "Recommender", "Scenario", "ScenarioBatch", "TableChoice"]


@dataclass
class ScenarioBatch:
    """Samples of one rank."""

    sparse: KeyedJaggedTensor
    dense: Tensor
    label: Tensor


class Recommender(nn.Module):
    """Pooled embeddings and dense features into one logit; draws noise from its rank's generator, as dropout would."""

    def __init__(self, lookup: nn.Module, width: int, generator: torch.Generator | None, weight_loss: bool) -> None:
        super().__init__()
        self.lookup = lookup
        fixed = torch.Generator().manual_seed(5)
        self.linear = nn.Linear(width + 2, 1)
        self.linear.weight.data = torch.rand(1, width + 2, generator=fixed) - 0.5
        self.linear.bias.data = torch.zeros(1)
        self.generator = generator
        self.weight_loss = weight_loss

    def forward(self, batch: ScenarioBatch) -> Any:
        return self.head(self.lookup(batch.sparse).values(), batch)

    def head(self, pooled: Tensor, batch: ScenarioBatch) -> Any:
        """(loss, (logits, labels)[, weight]) from pooled embeddings."""
        logits = self.linear(torch.cat([pooled, batch.dense], 1)).squeeze(1)
        noise = torch.rand(1, generator=self.generator) if self.generator is not None else torch.zeros(1)
        noise = noise.to(logits.device)
        loss = ((logits + noise - batch.label) ** 2).mean()
        output = (logits.detach(), batch.label)
        return (loss, output, float(batch.dense.abs().sum()) + 0.5) if self.weight_loss else (loss, output)


@dataclass(frozen=True)
class TableChoice:
    """A table of a scenario."""

    name: str
    dim: int = 4
    features: tuple[str, ...] = ()
    pooling: PoolingType = PoolingType.SUM
    num_embeddings: int = UNBOUNDED
    trainable: bool = True
    capacity: int | None = None
    admission: Any = None
    eviction: Any = None
    default_row: Any = None
    data_type: DataType = DataType.FP32
    stochastic_rounding: bool = False
    tier: Any = None
    init: Any = field(default_factory=lambda: init.Uniform(-0.5, 0.5))


@dataclass
class Features:
    """Which tables a scenario has by default."""

    tables: tuple[TableChoice, ...] = (
        TableChoice("user", 4, ("user",)),
        TableChoice("item", 4, ("item", "history"), PoolingType.MEAN),
    )


@dataclass
class Scenario:
    """A reproducible run.

    Attributes:
        world_size, micro_batches, batches: W, N and T.
        optimizer: one of optim's.
        tables: what is embedded.
        num_keys: keys per feature, few so that batches share them.
        uneven: ranks end at different batches and have differently many samples, sometimes none.
        row_transfer, row_wire, gradient_wire, owner_pooling, clustering, nan_policy: as in PipelineConfig.
        weight_loss: the model returns weights.
        fetch: the loader gives items, which are made batches one after another, away from the generator.
        sparse_groups: copies of the tables among the ranks.
    """

    world_size: int = 2
    micro_batches: int = 2
    batches: int = 5
    optimizer: Any = field(default_factory=lambda: optim.RowWiseAdagrad(lr=0.3))
    tables: tuple[TableChoice, ...] = Features().tables
    num_keys: int = 7
    samples: int = 5
    uneven: bool = True
    row_transfer: str = "once"
    row_wire: str = "fp32"
    gradient_wire: str = "fp32"
    owner_pooling: Any = False
    clustering: str = "none"
    nan_policy: str = "raise"
    weight_loss: bool = False
    weighted: bool = False
    noise: bool = True
    fetch: bool = False
    seed: int = 0
    bad_labels: float = 0.0
    """Chance of a label whose gradient is not finite; the oracle knows nan_policy="skip_row" alone."""
    sparse_groups: SparseGroups = field(default_factory=SparseGroups)

    @property
    def feature_names(self) -> list[str]:
        """Features in table order."""
        return [f for t in self.tables for f in t.features]

    @property
    def width(self) -> int:
        """Columns of all pooled features."""
        return sum(t.dim * len(t.features) for t in self.tables)

    # --------------------------------------------------------------------------------------------- data

    def sizes(self, rank: int) -> list[int]:
        """Samples of each batch of a rank."""
        chance = random.Random(self.seed * 1000 + rank)
        ends = self.batches
        if self.uneven and rank != self.seed % self.world_size and chance.random() < 0.5:
            ends = chance.randint(0, self.batches)
        choices = [0, 1, self.samples - 1, self.samples, self.samples + 2] if self.uneven else [self.samples]
        return [chance.choice(choices) for _ in range(ends)]

    def generator(self, rank: int) -> torch.Generator | None:
        """Random numbers shared by a rank's loader and model, as torch's default generator is."""
        return torch.Generator().manual_seed(self.seed * 77 + rank) if self.noise else None

    def loader(self, rank: int, generator: torch.Generator | None) -> Iterator[ScenarioBatch]:
        """A rank's batches; draws from the generator when a batch is drawn."""
        yield from map(self.fetcher(rank), self.items(rank, generator))

    def source(self, rank: int, generator: torch.Generator | None) -> Iterator[Any]:
        """What a rank's pipeline draws from: batches, or items where there is a `fetch`."""
        return self.items(rank, generator) if self.fetch else self.loader(rank, generator)

    def items(self, rank: int, generator: torch.Generator | None) -> Iterator[Any]:
        """What batches are made of: their size, and noise from the generator."""
        for size in self.sizes(rank):
            yield size, torch.rand(size, generator=generator) if generator is not None else torch.zeros(size)

    def fetcher(self, rank: int) -> Callable[[Any], ScenarioBatch]:
        """Item -> batch; it has a state, so the order of its calls matters."""
        chance, mischief = (random.Random(self.seed * 9176 + rank + salt) for salt in (0, 41))

        def fetch(item: Any) -> ScenarioBatch:
            size, extra = item
            lengths = [[chance.choice((0, 1, 1, 2, 3)) for _ in range(size)] for _ in self.feature_names]
            total = sum(map(sum, lengths))
            keys = [min(chance.randrange(self.num_keys), chance.randrange(self.num_keys)) for _ in range(total)]
            dense = torch.tensor([[chance.uniform(-1, 1), chance.uniform(-1, 1)] for _ in range(size)]).view(size, 2)
            bad = [float("inf") if mischief.random() < self.bad_labels else 0.0 for _ in range(size)]
            weights = torch.tensor([chance.uniform(-1, 1) for _ in range(total)]) if self.weighted else None
            return ScenarioBatch(
                KeyedJaggedTensor(
                    self.feature_names,
                    torch.tensor(keys, dtype=torch.int64),
                    weights,
                    lengths=torch.tensor([n for f in lengths for n in f], dtype=torch.int64),
                    stride=size,
                ),
                dense,
                extra + torch.tensor([chance.uniform(-1, 1) for _ in range(size)]) + torch.tensor(bad),
            )

        return fetch

    # -------------------------------------------------------------------------------------------- models

    def collection(self, process_group: Any) -> EmbeddingBagCollection:
        """The embedding module of one rank."""
        configs = [
            EmbeddingBagConfig(
                t.num_embeddings, t.dim, t.name, feature_names=list(t.features), pooling=t.pooling,
                init=t.init, trainable=t.trainable, capacity=t.capacity, admission=t.admission,
                eviction=t.eviction, default_row=t.default_row,
                data_type=t.data_type, stochastic_rounding=t.stochastic_rounding, tier=t.tier,
            )
            for t in self.tables
        ]  # fmt: skip
        return EmbeddingBagCollection(
            configs,
            is_weighted=self.weighted,
            optimizer=self.optimizer,
            seed=self.seed,
            process_group=process_group,
            sparse_groups=self.sparse_groups,
        )

    def model(self, process_group: Any, generator: torch.Generator | None) -> Recommender:
        """One rank's model."""
        return Recommender(self.collection(process_group), self.width, generator, self.weight_loss)

    @staticmethod
    def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        """Momentum, so that the dense optimizer has state."""
        dense = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(dense, lr=0.05, momentum=0.9)

    def ranks(self, world: InMemoryWorld | None = None) -> list[RankState]:
        """Fresh RankStates for the explorer, poisoned buffers, captured inputs known."""
        world = world or InMemoryWorld(self.world_size, timeout_s=0)
        made = []
        for r in range(self.world_size):
            generator = self.generator(r)
            communicator = world.communicator(r)
            model = self.model(communicator, generator)
            modules = {"lookup": model.lookup}
            bindings = bind_stores(modules)  # type: ignore[arg-type]
            if self.owner_pooling:
                select_features(bindings, self.owner_pooling)
            made.append(
                RankState(
                    communicator,
                    modules,  # type: ignore[arg-type]
                    bindings,
                    default_slice_owner(self.world_size // self.sparse_groups.count),
                    num_micro_batches=self.micro_batches,
                    track_use=self.row_transfer == "per_micro_batch",
                    owner_pooling_auto=self.owner_pooling == "auto",
                    row_wire=self.row_wire,
                    gradient_wire=self.gradient_wire,
                    clustering=self.clustering == "key",
                    nan_policy=self.nan_policy,
                    poison=True,
                    weighted=self.weight_loss,
                    model=model,
                    call_model=lambda m, batch: (*m(batch), None)[:3],
                    dense_optimizer=self.dense_optimizer(model),
                    dense_parameters=[(n, p) for n, p in model.named_parameters() if p.requires_grad],
                    inputs=_SparseField(),
                    fetch=self.fetcher(r) if self.fetch else None,
                    source=Source(self.source(r, generator)),
                    topology=Topology(communicator, self.sparse_groups),
                )
            )
        return made

    # -------------------------------------------------------------------------------------------- oracle

    def oracle(self, partition: list[list[list[list[int]]]]) -> Outcome:
        """What must come out, given which samples formed which micro-batch: [rank][batch][micro-batch] indices.

        `stores`: the rows of all ranks; of each copy of the tables, where copies are averaged.
        """
        tables = [
            OracleTable(
                t.name,
                t.dim,
                t.features,
                t.pooling.code,
                t.init,
                self.optimizer,
                self.seed,
                t.trainable,
                t.capacity,
                t.admission,
                t.eviction,
                t.default_row,
                t.data_type,
                t.stochastic_rounding,
            )
            for t in self.tables
        ]
        generators = [self.generator(r) for r in range(self.world_size)]
        loaders = [self.loader(r, g) for r, g in enumerate(generators)]
        models = [Recommender(OracleLookup(tables), self.width, g, self.weight_loss) for g in generators]
        groups = self.sparse_groups
        settings: dict[str, Any] = {
            "tables": tables,
            "models": models,
            "optimizers": [self.dense_optimizer(m) for m in models],
            "run_model": self._run_oracle,
            "keys_of": self._keys_of,
            "wires": Wires(self.row_wire, self.gradient_wire, self.row_transfer == "once"),
            "shards": self.world_size // groups.count,
        }
        if groups.mode == "average":
            player: Oracle = AveragingOracle(**settings, groups=groups.count, average_every=groups.average_every)
        else:
            player = Oracle(**settings)

        def parts(t: int, rank: int, batch: ScenarioBatch) -> list[tuple[int, Any]]:
            return [(len(chosen), self._take(batch, chosen)) for chosen in partition[rank][t]]

        player.play(lambda r: next(loaders[r], None), parts, self.batches)
        copies = player.copies
        rows = [{key: row.numpy().tobytes() for key, row in copy.values.items()} for copy in copies]
        dense = [[p.detach().numpy().tobytes() for p in m.parameters()] for m in models]
        losses = [[player.losses[t][r] for t in range(self.batches)] for r in range(self.world_size)]
        shards = [r % player.shards for r in range(self.world_size)]
        metadata = [copies[0].metadata(shard) for shard in shards]
        policies = [copies[0].policies(shard) for shard in shards]
        return Outcome(rows, metadata, dense, losses, [], policies=policies)

    def _run_oracle(self, model: Any, micro: tuple[dict[str, Any], ScenarioBatch]) -> tuple[Tensor, Any]:
        bags, batch = micro
        outputs = model.lookup(bags)
        pooled = torch.cat([outputs[f] for f in self.feature_names], 1)
        returned = model.head(pooled, batch)
        return returned[0], returned[2] if len(returned) == 3 else None

    def _keys_of(self, micro: tuple[dict[str, Any], ScenarioBatch]) -> dict[str, list[int]]:
        return {t.name: [k for f in t.features for keys, _ in micro[0][f] for k in keys] for t in self.tables}

    def _take(self, batch: ScenarioBatch, chosen: list[int]) -> tuple[dict[str, Any], ScenarioBatch]:
        """The bags of some samples as plain lists; dense parts by index."""
        size = len(batch.label)
        offsets, values = batch.sparse.offsets().tolist(), batch.sparse.values().tolist()
        weights = batch.sparse.weights().tolist() if self.weighted else None
        bags: dict[str, list[tuple[list[int], list[float] | None]]] = {}
        for k, name in enumerate(self.feature_names):
            spans = [(offsets[k * size + i], offsets[k * size + i + 1]) for i in chosen]
            bags[name] = [(values[a:b], weights[a:b] if weights is not None else None) for a, b in spans]
        index = torch.tensor(chosen, dtype=torch.int64)
        return bags, ScenarioBatch(batch.sparse, batch.dense[index], batch.label[index])


class _SparseField:
    """Inputs without capture: the model's one lookup gets `batch.sparse`."""

    def replay(self, batch: ScenarioBatch) -> dict[str, list[Any]]:
        return {"lookup": [batch.sparse]}

    def check(self, name: str, call_index: int, planned: Any, actual: Any) -> None:
        if planned is not actual:
            raise AssertionError(f"call {call_index} of {name} got another object than planned")
