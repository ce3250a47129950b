"""Runs with num_micro_batches="auto": the same number on all ranks, exact results, and checkpoints that hold it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import Batch, Recommender, Run, make_batch, make_pipeline, run_all, state_of

from nestpipe_kernels import checkpoint
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.errors import CheckpointError
from nestpipe_kernels.pipeline import micro_choice
from nestpipe_kernels.pipeline.micro_choice import MEASURED_STEPS, PROBES, WARM_STEPS
from nestpipe_kernels.testing.threads import run_ranks_as_threads

PROBED = [n for n in PROBES for _ in range(WARM_STEPS + MEASURED_STEPS)]
CHOSEN = 3
"""No candidate, so that it can only come from the patched choice."""


@pytest.fixture
def choices(monkeypatch):
    """What the choice was made from, by each rank; it is always CHOSEN."""
    made: list[tuple[Any, ...]] = []

    def choose(*given: Any) -> int:
        made.append(given)
        return CHOSEN

    monkeypatch.setattr(micro_choice, "best_micro_batches", choose)
    return made


def batches_of(rank: int, count: int = len(PROBED) + 4) -> list[Batch]:
    """Rank 1 has larger batches, and one batch less."""
    return [make_batch(10 * k + rank, size=4 + 5 * rank) for k in range(count - rank)]


def numbers_told(world_size: int, schedule: str) -> list[list[int]]:
    def body(rank: int, communicator: Any) -> list[int]:
        told, iterator = [], iter(batches_of(rank))
        with make_pipeline(Recommender(communicator), schedule, num_micro_batches="auto") as pipeline:
            while True:
                try:
                    pipeline.progress(iterator)
                except StopIteration:
                    return told
                told.append(pipeline.num_micro_batches)

    return run_ranks_as_threads(world_size, body, timeout_s=20.0)


@pytest.mark.parametrize("schedule", ["sequential", "nested"])
def test_all_ranks_change_together_and_the_choice_stays(choices, schedule):
    told = numbers_told(2, schedule)
    assert told == [[*PROBED, *[CHOSEN] * 4]] * 2
    assert len(choices) == 2
    assert choices[0] == choices[1]
    assert choices[0][2] == 9  # the largest batch, which is rank 1's


def test_schedules_stay_bitwise_equal_while_the_number_changes(choices):
    def kept(runs: list[Run]) -> list[tuple[Any, ...]]:
        return [(run.losses, run.outputs, run.state) for run in runs]

    expected = kept(run_all(2, "sequential", batches_of, num_micro_batches="auto"))
    for schedule in ("nested", "fwp"):
        assert kept(run_all(2, schedule, batches_of, num_micro_batches="auto")) == expected


def test_batches_that_fail_count_like_others(choices):
    def batches(rank: int) -> list[Batch]:
        return [dataclasses.replace(b, bad=b.bad + (k == 5)) for k, b in enumerate(batches_of(rank))]

    runs = run_all(2, "nested", batches, watch=[5], num_micro_batches="auto")
    assert [len(run.errors) for run in runs] == [1, 1]
    assert len(choices) == 2


def test_evaluation_splits_batches_as_chosen(choices):
    batch = make_batch(900, size=7)
    with make_pipeline(Recommender(), num_micro_batches="auto") as pipeline:
        iterator = iter(batches_of(0))
        for _ in range(len(PROBED) + 1):
            pipeline.progress(iterator)
        assert pipeline.num_micro_batches == CHOSEN
        pipeline.drain()
        pipeline.model.eval()
        output = pipeline.progress(iter([batch]))
        with torch.no_grad():
            torch.testing.assert_close(output, pipeline.model(batch)[1])


def saved_at(path: Path, step: int) -> dict[str, Any]:
    """A run that saves after `step` steps; its state four steps later, and the manifest's position."""
    with make_pipeline(Recommender(), num_micro_batches="auto") as pipeline:
        iterator = iter(batches_of(0, step + 8))
        for _ in range(step):
            pipeline.progress(iterator)
        checkpoint.save(path, model=pipeline.model, pipeline=pipeline)
        for _ in range(4):
            pipeline.progress(iterator)
        return {"state": state_of(pipeline), "number": pipeline.num_micro_batches}


def loaded(path: Path, step: int, **settings: Any) -> dict[str, Any]:
    with make_pipeline(Recommender(), **{"num_micro_batches": "auto", **settings}) as pipeline:
        checkpoint.load(path, model=pipeline.model, pipeline=pipeline)
        iterator, found = iter(batches_of(0, step + 8)), []  # those consumed before are skipped
        for _ in range(4):
            pipeline.progress(iterator)
            found.append(pipeline.num_micro_batches)
        return {"state": state_of(pipeline), "number": found[-1], "numbers": found}


def test_a_checkpoint_holds_the_choice(choices, tmp_path):
    expected = saved_at(tmp_path, len(PROBED) + 2)
    assert expected["number"] == CHOSEN
    found = loaded(tmp_path, len(PROBED) + 2)
    assert found["numbers"] == [CHOSEN] * 4
    assert found["state"] == expected["state"]
    assert loaded(tmp_path, len(PROBED) + 2, num_micro_batches=2)["numbers"] == [2] * 4


def test_a_checkpoint_made_while_measuring_lets_it_begin_anew(choices, tmp_path):
    saved_at(tmp_path, WARM_STEPS)
    assert loaded(tmp_path, WARM_STEPS)["numbers"] == [PROBES[0]] * 4


def test_so_does_a_pipeline_that_has_chosen_already(choices, tmp_path):
    saved_at(tmp_path, WARM_STEPS)
    with make_pipeline(Recommender(), num_micro_batches="auto") as pipeline:
        iterator = iter(batches_of(0))
        for _ in range(len(PROBED) + 1):
            pipeline.progress(iterator)
        assert pipeline.num_micro_batches == CHOSEN
        checkpoint.load(tmp_path, model=pipeline.model, pipeline=pipeline)
        pipeline.progress(iter(batches_of(0)))
        assert pipeline.num_micro_batches == PROBES[0]


def test_a_number_that_cannot_be_is_refused(choices, tmp_path, monkeypatch):
    saved_at(tmp_path, len(PROBED) + 2)
    whole = Manifest.load

    def damaged(directory: Any) -> Manifest:
        manifest = whole(directory)
        manifest.position["num_micro_batches"] = 0
        return manifest

    monkeypatch.setattr(Manifest, "load", staticmethod(damaged))
    with pytest.raises(CheckpointError, match=r"position.num_micro_batches must lie in 1 \.\. 4095, got 0"):
        loaded(tmp_path, 0)
