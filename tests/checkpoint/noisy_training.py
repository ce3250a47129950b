"""A model with dropout and loaders with noise, all drawing from the process's generators: any change of order shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nestpipe_kernels import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, init, optim
from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.explorer import read_store
from nestpipe_kernels.types import UNBOUNDED

BATCH = 4
SAMPLES = 24


def tables(**settings: Any) -> list[EmbeddingBagConfig]:
    """One open table and one fixed."""
    return [
        EmbeddingBagConfig(UNBOUNDED, 4, "user", feature_names=["user"], init=init.Uniform(-0.5, 0.5), **settings),
        EmbeddingBagConfig(40, 4, "item", feature_names=["item"], **settings),
    ]


class Noisy(nn.Module):
    """Dropout and a batch norm around a linear layer; returns (loss, logits)."""

    def __init__(self, process_group: Any = None, configs: list[EmbeddingBagConfig] | None = None, width: int = 3):
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            configs or tables(), optimizer=optim.Adam(lr=0.05), process_group=process_group
        )
        features = sum(c.embedding_dim for c in self.ebc.embedding_bag_configs())
        self.hidden = nn.Linear(features, width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 1)
        self.register_buffer("scale", torch.ones(2))
        fixed = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=fixed) - 0.3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        keys, label = batch
        lengths = torch.ones(2 * len(label), dtype=torch.int64)
        sparse = KeyedJaggedTensor(["user", "item"], keys.t().reshape(-1), lengths=lengths)
        hidden = self.norm(self.hidden(self.ebc(sparse).values()))
        logits = self.out(nn.functional.dropout(torch.relu(hidden), 0.3, training=self.training)).squeeze(1)
        return ((logits - label) ** 2).mean(), logits.detach()


class NoisySamples(Dataset[Any]):
    """(keys int64 [2], label float32); labels carry noise of three generators."""

    def __init__(self, samples: int = SAMPLES) -> None:
        chance = random.Random(8)
        self.keys = torch.tensor([[chance.randrange(9), chance.randrange(40)] for _ in range(samples)])
        self.labels = torch.tensor([chance.uniform(-1, 1) for _ in range(samples)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        return self.keys[index], self.labels[index] + noise


def data_loader(workers: int = 0, own_generator: bool = False, batch: int = BATCH) -> DataLoader[Any]:
    """Shuffled; from the process's generator or one of its own."""
    generator = torch.Generator().manual_seed(77) if own_generator else None
    context = "fork" if workers else None
    return DataLoader(
        NoisySamples(),
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        generator=generator,
        multiprocessing_context=context,
        timeout=30 if workers else 0,
    )


class StatefulLoader:
    """A loader with a state, shuffled by a seed of its own, as torchdata's StatefulDataLoader would be."""

    def __init__(self, seed: int = 4) -> None:
        self.data = NoisySamples()
        self.seed = seed
        self.epoch, self.given = 0, 0
        self.loaded = False

    def __iter__(self) -> Any:
        if not self.loaded:
            self.given = 0
        self.loaded = False
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        while self.given < SAMPLES // BATCH:
            chosen = order[self.given * BATCH : (self.given + 1) * BATCH].tolist()
            self.given += 1
            keys, labels = zip(*(self.data[k] for k in chosen))
            yield torch.stack(keys), torch.stack(labels)
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self.given, "nested": {"seed": torch.tensor([self.seed])}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.given, self.loaded = state["epoch"], state["given"], True
        self.seed = int(state["nested"]["seed"][0])


def seed_all(seed: int) -> None:
    """The process's generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@dataclass
class Run:
    """A model in training."""

    model: Noisy
    pipeline: NestedPipeline
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        """Everything that training changed on this rank, as plain values."""
        rows: dict[Any, bytes] = {}
        notes: dict[Any, Any] = {}
        self.pipeline.settle()
        for binding in self.pipeline.rank.bindings:
            read_store(binding.store, rows, notes)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        moments = {
            f"{k}.{name}": value
            for k, state in enumerate(self.optimizer.state.values())
            for name, value in state.items()
        }
        return {
            "rows": rows,
            "metadata": notes,
            "tensors": {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()},
            "moments": {name: torch.as_tensor(value).numpy().tobytes() for name, value in moments.items()},
            "steps": self.pipeline.step_count,
            "torch": torch.get_rng_state().numpy().tobytes(),
            "python": random.getstate(),
            "numpy": str(np.random.get_state()),
        }


def start(schedule: str = "nested", process_group: Any = None, **settings: Any) -> Run:
    """A fresh model, optimizer and pipeline (one micro-batch: dropout and batch norm see whole batches)."""
    model = Noisy(process_group, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = PipelineConfig(schedule=schedule, num_micro_batches=1, timeout_s=30.0)
    return Run(model, NestedPipeline(model, optimizer, config=config), optimizer)


def by_run(run: Run, loader: Iterable[Any]) -> Iterable[float]:
    """Losses through pipeline.run."""
    return (float(step.loss) for step in run.pipeline.run(loader))


def by_progress(run: Run, loader: Iterable[Any]) -> Iterable[float]:
    """Losses through progress-like steps of one iterator, whose loader the pipeline is told."""
    run.pipeline.set_loader(loader)
    iterator = iter(loader)
    while True:
        try:
            yield float(run.pipeline._step(iterator).loss)
        except StopIteration:
            return


Through = Callable[[Run, Iterable[Any]], Iterable[float]]
