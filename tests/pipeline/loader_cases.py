"""Data sets and runs for the tests of loaders, importable in spawned processes: by ranks and by DataLoader workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from nestpipe_kernels.comm import Communicator, communicator_for
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline
from nestpipe_kernels.testing.explorer import Outcome
from nestpipe_kernels.testing.scenario import Recommender, Scenario, ScenarioBatch
from nestpipe_kernels.testing.threads import read_pipeline, scenario_config

LIMIT_S = 60.0
BATCHES = 5
SCENARIO = Scenario(world_size=2, micro_batches=2, batches=BATCHES, uneven=False, samples=5, noise=False, seed=3)
EVALUATED = Scenario(world_size=2, batches=2, uneven=False, samples=4, noise=False, num_keys=40, seed=4)


class RankBatches(Dataset[Any]):
    """A rank's batches by index; a DataLoader with batch_size=None hands them on whole."""

    def __init__(self, rank: int) -> None:
        self.batches = [(b.sparse, b.dense, b.label) for b in SCENARIO.loader(rank, None)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> ScenarioBatch:
        sparse, dense, label = self.batches[index]
        return ScenarioBatch(sparse, dense.clone(), label.clone())


def make(communicator: Communicator, schedule: str) -> tuple[Recommender, NestedPipeline]:
    """A fresh model and its pipeline."""
    model = SCENARIO.model(communicator, None)
    config = scenario_config(SCENARIO, schedule, LIMIT_S)
    return model, NestedPipeline(model, SCENARIO.dense_optimizer(model), config=config)


def plain_epochs(rank: int, communicator: Communicator, epochs: int) -> Outcome:
    """The expected outcome: every epoch's batches from a list."""
    _, pipeline = make(communicator, "sequential")
    with pipeline:
        losses = [float(s.loss) for _ in range(epochs) for s in pipeline.run(SCENARIO.loader(rank, None))]
        return read_pipeline(pipeline, losses)


def worker_epochs(method: str, persistent: bool) -> tuple[Outcome, bool]:
    """Two epochs over gloo from a DataLoader with two workers; (outcome, whether both used one iterator object)."""
    rank = dist.get_rank()
    loader = DataLoader(
        RankBatches(rank),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=persistent,
        timeout=LIMIT_S,
    )
    _, pipeline = make(communicator_for(None, LIMIT_S), "nested")
    losses, iterators = [], []
    with pipeline:
        for _ in range(2):
            iterator = iter(loader)
            iterators.append(iterator)
            losses += [float(step.loss) for step in pipeline.run(iterator)]
        outcome = read_pipeline(pipeline, losses)
    same = iterators[0] is iterators[1]
    for iterator in set(iterators):
        iterator._shutdown_workers()
    return outcome, same


def exhausted_again(rank: int, communicator: Communicator, schedule: str) -> list[str]:
    """A generator that is through, asked again twice; then a new one."""
    _, pipeline = make(communicator, schedule)
    got = []
    with pipeline:
        iterator: Iterator[Any] = SCENARIO.loader(rank, None)
        for _ in range(BATCHES + 3):
            try:
                pipeline.progress(iterator)
                got.append("batch")
            except StopIteration:
                got.append("end")
        got += ["batch" for _ in pipeline.run(SCENARIO.loader(rank, None))]
        got.append(f"{pipeline.step_count} steps")
    return got


def with_evaluation(
    rank: int, communicator: Communicator, schedule: str, evaluate_after: tuple[int, ...]
) -> tuple[Outcome, list[str]]:
    """An epoch with evaluations in between; what is wrong with the evaluations, as text."""
    model, pipeline = make(communicator, schedule)
    wrong: list[str] = []
    with pipeline:
        iterator, losses = SCENARIO.loader(rank, None), []
        for index in range(BATCHES):
            _, labels = pipeline.progress(iterator)
            losses.append(0.0)
            given = list(SCENARIO.loader(rank, None))[index]
            if not torch.equal(labels, given.label):
                wrong.append(f"training batch {index} gave another batch's output")
            if index in evaluate_after:
                wrong += _evaluate(rank, model, pipeline, index)
        return read_pipeline(pipeline, losses), wrong


def _evaluate(rank: int, model: Recommender, pipeline: NestedPipeline, index: int) -> list[str]:
    """Evaluate the two batches of EVALUATED, compare with the model called without a pipeline."""
    wrong = []
    sizes = [len(model.lookup.store(table)) for table in ("user", "item")]
    batches = list(EVALUATED.loader(rank, None))
    with torch.no_grad():
        model.eval()
        expected = [model(batch)[1] for batch in batches]
    iterator = iter(batches)
    for k, (logits, labels) in enumerate(expected):
        got_logits, got_labels = pipeline.progress(iterator)
        if not torch.equal(got_labels, labels) or not torch.allclose(got_logits, logits, rtol=1e-6, atol=1e-6):
            wrong.append(f"evaluation batch {k} after {index} differs from the model's own output")
    try:
        pipeline.progress(iterator)
        wrong.append(f"evaluation after {index} found a third batch")
    except StopIteration:
        pass
    model.train()
    if sizes != [len(model.lookup.store(table)) for table in ("user", "item")]:
        wrong.append(f"evaluation after {index} inserted rows")
    return wrong
