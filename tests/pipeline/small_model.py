"""A small recommender, its batches, and runs of it, for tests of what a pipeline does around the arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe_kernels import init, optim
from nestpipe_kernels.config import PipelineConfig
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.explorer import read_policies, read_store
from nestpipe_kernels.testing.threads import run_ranks_as_threads
from nestpipe_kernels.types import UNBOUNDED

EXACT = ("sequential", "dbp", "fwp", "nested", "nested+early")
"""Schedules that must give the same; the last one is `nested` with early send."""

Rows = dict[tuple[str, int], bytes]


@dataclass
class Batch:
    """Samples; `bad` asks the model for a NaN gradient: 1 in its embeddings, 2 in a dense parameter."""

    sparse: KeyedJaggedTensor
    dense: Tensor
    label: Tensor
    bad: Tensor


def make_batch(seed: int, size: int = 6, *, keys: int = 7, first_key: int = 0, bad: int = 0) -> Batch:
    """A batch with keys first_key .. first_key + keys - 1, the features user (one key) and item (0 to 3)."""
    chance = random.Random(seed)
    lengths = [1] * size + [chance.choice((0, 1, 2, 3)) for _ in range(size)]
    values = [first_key + chance.randrange(keys) for _ in range(sum(lengths))]
    marks = torch.zeros(size)
    if size and bad:
        marks[size // 2] = bad
    return Batch(
        KeyedJaggedTensor(
            ["user", "item"],
            torch.tensor(values, dtype=torch.int64),
            lengths=torch.tensor(lengths, dtype=torch.int64),
            stride=size,
        ),
        torch.tensor([[chance.uniform(-1, 1), chance.uniform(-1, 1)] for _ in range(size)]).view(size, 2),
        torch.tensor([chance.uniform(-1, 1) for _ in range(size)]),
        marks,
    )


class BadGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN if asked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: bool) -> Tensor:
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradient, float("nan")) if ctx.bad else gradient, None


def make_tables(**settings: Any) -> list[EmbeddingBagConfig]:
    """Two open tables."""
    start = init.Uniform(-0.5, 0.5)
    return [
        EmbeddingBagConfig(UNBOUNDED, 4, "user", feature_names=["user"], init=start, **settings),
        EmbeddingBagConfig(UNBOUNDED, 4, "item", feature_names=["item"], init=start, **settings),
    ]


class Recommender(nn.Module):
    """Pooled embeddings and dense features into one logit per sample: returns (loss, logits)."""

    def __init__(self, process_group: Any = None, tables: Sequence[EmbeddingBagConfig] | None = None, **settings: Any):
        super().__init__()
        settings.setdefault("optimizer", optim.Adagrad(lr=0.2))
        self.ebc = EmbeddingBagCollection(tables or make_tables(), process_group=process_group, **settings)
        width = sum(c.embedding_dim * len(c.feature_names) for c in self.ebc.embedding_bag_configs())
        fixed = torch.Generator().manual_seed(5)
        self.linear = nn.Linear(width + 2, 1)
        self.linear.weight.data = torch.rand(1, width + 2, generator=fixed) - 0.5
        self.linear.bias.data = torch.zeros(1)

    def forward(self, batch: Batch) -> Any:
        pooled = self.ebc(batch.sparse).values()
        pooled = BadGradient.apply(pooled, bool((batch.bad == 1).any()))
        weight = BadGradient.apply(self.linear.weight, bool((batch.bad == 2).any()))
        logits = (torch.cat([pooled, batch.dense], 1) @ weight.t()).squeeze(1) + self.linear.bias
        return ((logits - batch.label) ** 2).mean(), logits


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With momentum, so that it has state."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def make_config(schedule: str = "nested", **settings: Any) -> PipelineConfig:
    """Two micro-batches and short waits, unless told otherwise; the schedule is one of EXACT or "async"."""
    settings = {"num_micro_batches": 2, "timeout_s": 20.0, **settings}
    if schedule.endswith("+early"):
        schedule, settings = schedule.removesuffix("+early"), {**settings, "early_send": True, "row_transfer": "once"}
    return PipelineConfig(schedule=schedule, **settings)


def make_pipeline(model: nn.Module, schedule: str = "nested", loss_fn: Any = None, **settings: Any) -> NestedPipeline:
    """A pipeline with the settings of `make_config`."""
    optimizer = dense_optimizer(model) if any(p.requires_grad for p in model.parameters()) else None
    return NestedPipeline(model, optimizer, loss_fn, make_config(schedule, **settings))


@dataclass
class State:
    """Everything a rank's training has changed so far, as an outside reader sees it between two steps."""

    rows: Rows
    metadata: dict[tuple[str, int], tuple[int, int]]
    dense: list[bytes]
    momentum: list[bytes]
    step_count: int
    policies: dict[str, Any]
    """Sizes, counters and counts of tables with a limit or a rule."""


def state_of(pipeline: NestedPipeline) -> State:
    """Read a pipeline's stores through their modules, as any outside reader must."""
    rows: Rows = {}
    metadata: dict[tuple[str, int], tuple[int, int]] = {}
    policies: dict[str, Any] = {}
    for module in pipeline.rank.modules.values():
        for binding in pipeline.rank.bindings:
            if binding.module is module:
                opened = module.store(binding.store.tables[0].name).store  # type: ignore[attr-defined]
                read_store(opened, rows, metadata)
                policies |= read_policies(opened)
    optimizer = pipeline.rank.dense_optimizer
    states = [] if optimizer is None else optimizer.state.values()
    moments = [s["momentum_buffer"] for s in states if s.get("momentum_buffer") is not None]
    return State(
        rows,
        metadata,
        [p.detach().numpy().tobytes() for _, p in pipeline.rank.dense_parameters],
        [m.numpy().tobytes() for m in moments],
        pipeline.step_count,
        policies,
    )


@dataclass
class Run:
    """A whole run of one rank."""

    losses: list[float] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    errors: list[tuple[int, BaseException]] = field(default_factory=list)
    skipped_rows: list[int] = field(default_factory=list)
    state: State | None = None
    around_errors: list[tuple[State, State]] = field(default_factory=list)
    """State before and after each step that raised."""


def run_rank(pipeline: NestedPipeline, batches: Sequence[Batch], watch: Sequence[int] = ()) -> Run:
    """Train on all batches; steps whose number is in `watch` may raise, and are compared with the state before."""
    run, iterator = Run(), iter(batches)
    with pipeline:
        for number in range(10_000):
            before = state_of(pipeline) if number in watch else None
            try:
                step = pipeline._step(iterator)
            except StopIteration:
                break
            except Exception as error:
                if before is None:
                    raise
                run.errors.append((number, error))
                run.around_errors.append((before, state_of(pipeline)))
                continue
            run.losses.append(float(step.loss))
            run.outputs.append(None if step.output is None else step.output.tolist())
            run.skipped_rows.append(step.skipped_rows)
        run.state = state_of(pipeline)
    return run


def run_all(
    world_size: int,
    schedule: str,
    batches_of: Callable[[int], Sequence[Batch]],
    watch: Sequence[int] = (),
    model_of: Callable[[Any], nn.Module] = Recommender,
    **settings: Any,
) -> list[Run]:
    """The same run on every rank of an in-memory world."""

    def body(rank: int, communicator: Any) -> Run:
        return run_rank(make_pipeline(model_of(communicator), schedule, **settings), batches_of(rank), watch)

    return run_ranks_as_threads(world_size, body, timeout_s=20.0)
