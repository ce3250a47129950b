"""A converted model in the loops that its users have: the model, its batches, runs of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from small_model import make_config
from torch import Tensor, nn

import nestpipe_kernels as nk

SIZE, DIM, SAMPLES = 15, 4, 8
SEEDING = threading.Lock()  # ranks are threads, with one generator
ROWS_LR, DENSE_LR = 0.2, 0.1


class Recommender(nn.Module):
    """A user, a bag of items, two layers; returns logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        with SEEDING:
            torch.manual_seed(3)
            self.user = nn.Embedding(SIZE, DIM, sparse=True)
            self.item = nn.EmbeddingBag(SIZE, DIM, mode="sum", sparse=True)
            self.top = nn.Sequential(nn.Linear(2 * DIM, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        pooled = torch.cat([self.user(batch["user"]), self.item(batch["items"])], 1)
        return self.top(pooled).squeeze(1)


def make_batches(count: int = 5, seed: int = 0, size: int = SAMPLES) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "user": torch.randint(SIZE, (size,), generator=generator),
            "items": torch.randint(SIZE, (size, 3), generator=generator),
            "label": torch.rand(size, generator=generator),
        }
        for _ in range(count)
    ]


def loss_of(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    out = model(batch)
    return ((out - batch["label"]) ** 2).mean(), out


def dense_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.top.parameters(), lr=DENSE_LR, momentum=0.9)


def state_of(model: Any, losses: Iterable[float] = ()) -> dict[str, Tensor]:
    """Everything that training has changed, rows too, by plain names."""
    found = {name.replace("_orig_mod.", "").replace(".module.", "."): v for name, v in model.state_dict().items()}
    return {**found, "losses": torch.tensor(list(losses))}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 2e-6) -> bool:
    """Sums over micro-batches instead of a batch round elsewhere: a few units in the last place of values of size 1."""
    return one.keys() == other.keys() and all(
        torch.allclose(value, other[name], rtol=0, atol=tolerance) for name, value in one.items()
    )


def train(
    schedule: str,
    *,
    prepare: Callable[[Any], Any] | None = None,
    wrap: Callable[[Any], Any] | None = None,
    loss: Callable[..., Any] = loss_of,
    batches: Iterable[Any] | None = None,
    each: Callable[[Any, Any, Any], Any] | None = None,
    dropout: float = 0.0,
    optimizer: Any = None,
    settings: Any = None,
    communicator: Any = None,
    scaler: Any = None,
    before_step: Callable[[Any, Any, Any], None] | None = None,
    **config: Any,
) -> dict[str, Tensor]:
    """A run through a pipeline. `prepare(model)` goes after convert, may return something that `each` gets after every
    step: each(pipeline, step, prepared). What `wrap(model)` returns is trained in the model's place."""
    model = Recommender(dropout)
    rule = nk.optim.SGD(lr=ROWS_LR) if optimizer is None else optimizer
    nk.convert(model, rule, settings=settings, process_group=communicator)
    prepared = None if prepare is None else prepare(model)
    dense = dense_of(model)
    if before_step is not None:
        dense.register_step_pre_hook(before_step)
    losses, trained = [], model if wrap is None else wrap(model)
    with nk.NestedPipeline(trained, dense, loss, make_config(schedule, **config), grad_scaler=scaler) as pipe:
        for step in pipe.run(make_batches() if batches is None else batches):
            losses.append(float(step.loss))
            if each is not None:
                each(pipe, step, prepared)
    return state_of(model, losses)


def alike(schedules: Sequence[str] = ("nested",), **run: Any) -> dict[str, Tensor]:
    """The run of `sequential`, once every other schedule has given the same."""
    expected = train("sequential", **run)
    for schedule in schedules:
        assert same(train(schedule, **run), expected), schedule
    return expected


def torch_loop(
    *,
    loss: Callable[..., Any] = loss_of,
    batches: Iterable[Any] | None = None,
    step: Callable[[Any, Any, Any], None] | None = None,
    sparse: Callable[[Any], Any] | None = None,
    after: Callable[[Any, Any, Any], None] | None = None,
    dropout: float = 0.0,
) -> dict[str, Tensor]:
    """The same in plain PyTorch: gradients of the tables are sparse, and their optimizer steps beside the dense one."""
    model = Recommender(dropout)
    tables = [model.user.weight, model.item.weight]
    rows = torch.optim.SGD(tables, lr=ROWS_LR) if sparse is None else sparse(model)
    dense, losses = dense_of(model), []
    for batch in make_batches() if batches is None else batches:
        rows.zero_grad()
        dense.zero_grad()
        value, _ = loss(model, batch)
        value.backward()
        if step is not None:
            step(model, rows, dense)
        rows.step()
        dense.step()
        losses.append(float(value.detach()))
        if after is not None:
            after(model, rows, dense)
    return state_of(model, losses)
