"""Case `consistency`: ranking quality and losses of sequence models under every schedule, beside one plain process.

For each model and seed, two ranks (or more) train on the same batches under `sequential` and `nested` with several
numbers of micro-batches, under `nested` with copies of the tables (2D sparse parallelism), under `async`, and once more
in plain PyTorch on one process: nn.Embedding with sparse gradients, torch.optim, no package code but the model's. All
start from the same rows and parameters. Then every user's held-out item is ranked among all items. Plain PyTorch runs
a second time with the samples of every batch in reverse: what another order of additions alone does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import nestpipe_kernels as nk
from nestpipe_kernels.bench.consistency_report import differences, save_plot, table
from nestpipe_kernels.capture.split import split
from nestpipe_kernels.config import process_environment
from nestpipe_kernels.data import batches, open_data
from nestpipe_kernels.jagged import JaggedTensor
from nestpipe_kernels.launch import init_rank, run_ranks
from nestpipe_kernels.launch.machine import facts
from nestpipe_kernels.models import SEQUENCE_MODELS, build

__all__ = ["PLAIN", "REVERSED", "metrics", "run"]

PLAIN = "plain PyTorch"
REVERSED = "plain PyTorch, reversed"
MICRO_BATCHES = 4
"""Of the runs that vary something else."""
RANKING_BATCH = 16


class PlainTables(nn.Module):
    """The items' table as one nn.Embedding with sparse gradients, behind the interface that the models use.

    Args:
        catalogue: int64 [n], ascending: the keys.
        rows: float32 [n, D], initial values.
    """

    def __init__(self, catalogue: Tensor, rows: Tensor) -> None:
        super().__init__()
        self._catalogue, self._dim = catalogue, rows.shape[1]
        self.table = nn.Embedding.from_pretrained(rows.clone(), freeze=False, sparse=True)  # type: ignore[no-untyped-call]

    def embedding_configs(self) -> list[SimpleNamespace]:
        """What the models want to know."""
        return [SimpleNamespace(name="item", embedding_dim=self._dim)]

    def forward(self, sparse: Any) -> dict[str, JaggedTensor]:
        """Rows of each feature's keys."""
        found = {}
        for name in ("sequence", "target", "candidates"):
            feature = sparse[name]
            places = torch.searchsorted(self._catalogue, feature.values())
            found[name] = JaggedTensor(self.table(places), lengths=feature.lengths())
        return found


def metrics(ranks: Tensor) -> dict[str, float]:
    """HR and NDCG at 10 and 50 of ranks int64 [users], 0 the best."""
    gains = 1 / torch.log2(ranks.to(torch.float64) + 2)
    found = {}
    for k in (10, 50):
        inside = (ranks < k).to(torch.float64)
        found[f"HR@{k}"], found[f"NDCG@{k}"] = float(inside.mean()), float((inside * gains).mean())
    return found


def run(parsed: argparse.Namespace) -> int:
    """Start the ranks, or be one. Prints a JSON line for each run, then the table."""
    if process_environment().get("RANK"):
        rank, world_size = init_rank(parsed.timeout)
        _train_all(parsed, rank, world_size)
        dist.destroy_process_group()
        return 0
    open_data(parsed.data, sequences=True)  # bad data is one error here, not one of each rank
    if parsed.output is not None:
        Path(parsed.output).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "nestpipe_kernels", *parsed.arguments]
    return run_ranks(command, parsed.ranks, timeout_s=parsed.timeout)


def _train_all(parsed: argparse.Namespace, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    data = open_data(parsed.data, sequences=True)
    lines = []
    for name in parsed.models:
        for seed in range(parsed.seed, parsed.seed + parsed.seeds):
            for impl, micro_batches, settings in _runs(parsed, world_size):
                if impl in (PLAIN, REVERSED):
                    run = (parsed, name, data, seed, world_size, impl == REVERSED)
                    losses, ranks = _train_plain(*run) if rank == 0 else ([], None)
                else:
                    losses, ranks = _train(parsed, name, data, seed, rank, world_size, micro_batches, settings)
                if rank == 0:
                    assert ranks is not None
                    line = {
                        "case": "consistency", "model": name, "impl": impl, "micro_batches": micro_batches,
                        "seed": seed, **metrics(ranks), "losses": losses, "epochs": parsed.epochs,
                        "steps": len(losses), "ranks": world_size, "users": len(ranks),
                    }  # fmt: skip
                    _print(parsed, {**line, **facts()})
                    lines.append(line)
                dist.barrier()
    if rank == 0:
        for text in [*table(lines), "", "Less plain PyTorch, thousandths:", "", *differences(lines)]:
            print(text, file=sys.stderr)
        if parsed.output is not None:
            save_plot(Path(parsed.output) / "consistency.png", lines)


def _print(parsed: argparse.Namespace, line: dict[str, Any]) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    if parsed.json is not None:
        with open(parsed.json, "a", encoding="utf-8") as file:
            file.write(text + "\n")


def _runs(parsed: argparse.Namespace, world_size: int) -> Iterable[tuple[str, int, dict[str, Any]]]:
    """(name, micro-batches, PipelineConfig's or tables' settings)."""
    for count in parsed.micro_batches:
        for schedule in ("sequential", "nested"):
            yield schedule, count, {"schedule": schedule}
    if world_size > 1:
        for sync in ("exact", "average"):
            groups = nk.SparseGroups(world_size, sync=sync)
            yield f"nested, 2D {sync}", MICRO_BATCHES, {"schedule": "nested", "groups": groups}
    yield "async", MICRO_BATCHES, {"schedule": "async"}
    yield PLAIN, 1, {}
    yield REVERSED, 1, {}


def _dense_optimizer(parsed: argparse.Namespace, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=parsed.lr)


def _train(
    parsed: argparse.Namespace, name: str, data: Any, seed: int, rank: int, world_size: int, count: int,
    settings: dict[str, Any],
) -> tuple[list[float], Tensor | None]:  # fmt: skip
    """(mean losses of all ranks, ranks of all users; on rank 0)."""
    model = build(
        name, data, nk.optim.Adam(lr=parsed.lr), seed=seed, embedding_dim=parsed.dim,
        sparse_groups=settings.get("groups", 1),
    )  # fmt: skip
    dense = _dense_optimizer(parsed, model.parameters())
    config = nk.PipelineConfig(schedule=settings["schedule"], num_micro_batches=count, timeout_s=parsed.timeout)
    loader = batches(data, parsed.batch, rank, world_size, epochs=parsed.epochs, shuffle_seed=seed)
    with nk.NestedPipeline(model, dense, config=config) as pipeline:
        losses = torch.stack([step.loss for step in pipeline.run(islice(loader, parsed.steps))])
        model.eval()
        ranking = batches(data.ranking(), RANKING_BATCH, rank, world_size)
        mine = torch.cat([step.output for step in pipeline.run(ranking) if step.output is not None])
    found: list[Any] = [None] * world_size
    dist.gather_object((losses, mine), found if rank == 0 else None)
    if rank:
        return [], None
    return torch.stack([each for each, _ in found]).mean(0).tolist(), torch.cat([ranks for _, ranks in found])


def _train_plain(
    parsed: argparse.Namespace, name: str, data: Any, seed: int, world_size: int, reverse: bool
) -> tuple[list[float], Tensor]:
    """The same on one process, without the package's tables, optimizers and pipeline."""
    alone = nk.EmbeddingStore(name="item", dim=parsed.dim, optimizer=nk.optim.Adam(lr=parsed.lr), seed=seed)
    rows, _ = alone.find_or_insert(data.catalogue)
    tables = PlainTables(data.catalogue, rows)
    model = SEQUENCE_MODELS[name](tables, max_length=data.max_length, seed=seed)
    dense = _dense_optimizer(parsed, model.layers.parameters())
    sparse = torch.optim.SparseAdam(list(tables.parameters()), lr=parsed.lr)
    loaders = [
        batches(data, parsed.batch, r, world_size, epochs=parsed.epochs, shuffle_seed=seed) for r in range(world_size)
    ]
    losses = []
    for parts in islice(zip(*loaders), parsed.steps):
        for optimizer in (dense, sparse):
            optimizer.zero_grad()
        if reverse:
            parts = tuple(split(part, [torch.arange(len(part)).flip(0)])[0] for part in parts)
        loss = torch.stack([model(part)[0] for part in parts]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in (dense, sparse):
            optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        return losses, torch.cat([model(batch)[1] for batch in batches(data.ranking(), RANKING_BATCH)])
