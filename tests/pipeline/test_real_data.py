"""Real data through DLRM on two ranks: `nested` has the losses of `sequential`, bit for bit; `async` has its own."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from nestpipe_kernels import PipelineConfig, optim
from nestpipe_kernels.data import CriteoDataset, MovieLensDataset, batches
from nestpipe_kernels.models import build
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.threads import run_ranks_as_threads

WORLD_SIZE = 2


@lru_cache(maxsize=1)
def movielens(path: Path) -> MovieLensDataset:
    return MovieLensDataset(path, history_length=20)


def losses(dataset: Any, schedule: str, batch_size: int, steps: int, **loader: Any) -> list[list[str]]:
    """Every rank's losses, as exact text."""

    def body(rank: int, communicator: Any) -> list[str]:
        model = build(
            "dlrm",
            dataset,
            optim.RowWiseAdagrad(lr=0.1),
            embedding_dim=8,
            bottom_mlp=(16,),
            top_mlp=(16,),
            process_group=communicator,
        )
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        config = PipelineConfig(schedule=schedule, num_micro_batches=4, timeout_s=60.0)
        source = batches(dataset, batch_size, rank, WORLD_SIZE, **loader)
        with NestedPipeline(model, dense, config=config) as pipeline:
            found = []
            for step in pipeline.run(source):
                found.append(float(step.loss).hex())
                if len(found) == steps:
                    break
            return found

    return run_ranks_as_threads(WORLD_SIZE, body)


def mean(rank_losses: list[str]) -> float:
    return sum(map(float.fromhex, rank_losses)) / len(rank_losses)


def check_curves(curves: dict[str, list[list[str]]], steps: int) -> None:
    assert [len(rank) for rank in curves["sequential"]] == [steps] * WORLD_SIZE
    assert curves["nested"] == curves["sequential"]
    assert curves["async"] != curves["sequential"]
    third = steps // 3
    for rank in curves["sequential"]:
        assert mean(rank[-third:]) < mean(rank[:third])  # it learns


def test_movielens_100k(ml100k):
    schedules = ("sequential", "nested", "async")
    curves = {s: losses(movielens(ml100k), s, batch_size=128, steps=60, shuffle_seed=1) for s in schedules}
    check_curves(curves, 60)


def test_criteo_sample(criteo_sample):
    dataset = CriteoDataset(criteo_sample)
    schedules = ("sequential", "nested", "async")
    # 200 rows, 16 a step and rank: six full steps and one of 4 + 4, five times over.
    curves = {s: losses(dataset, s, batch_size=16, steps=1000, epochs=5, shuffle_seed=1) for s in schedules}
    check_curves(curves, 35)
