"""Thousands of steps over real sockets leave memory, threads and file handles of the process as they were."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gloo_world import LIMIT_S, GlooWorld

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="counts come from /proc"),
]

PERIOD = 7
"""Distinct batches, used in turn: stores and buffers reach their sizes in the first round."""
GROWTH_BYTES = 6 << 20
"""Allowed between two looks: arenas of threads, the timeline's window. A tensor of 1 KB kept a step is more after
10,000 steps, one of 20 KB in the short form."""


@dataclass
class Counts:
    """What a process holds."""

    resident: int
    threads: int
    files: int
    tensors: int


def count() -> Counts:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Counts(
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
    )


def train(looks: list[int], schedule: str) -> list[Counts]:
    """Counts after each number of steps in `looks`."""
    sys.path.insert(0, str(Path(__file__).parent))
    from small_model import Recommender, make_batch, make_pipeline

    from nestpipe_kernels.comm import communicator_for

    torch.manual_seed(0)
    communicator = communicator_for(None, LIMIT_S)
    batches = [make_batch(10 * k + communicator.rank, 24, keys=300) for k in range(PERIOD)]
    settings = {"num_micro_batches": 4, "timeline_steps": 5, "timeout_s": LIMIT_S}
    pipeline = make_pipeline(Recommender(communicator), schedule, **settings)
    iterator, found = itertools.cycle(batches), []
    for step in range(1, looks[-1] + 1):
        pipeline.progress(iterator)
        if step in looks:
            pipeline.settle()
            found.append(count())
    pipeline.close()
    return found


def check_flat(world: Any, looks: list[int], schedule: str) -> None:
    for found in world.run(train, looks, schedule):
        if isinstance(found, Exception):
            raise found
        first, *later = found
        for now in later:
            assert (now.threads, now.files, now.tensors) == (first.threads, first.files, first.tensors)
            assert now.resident - first.resident < GROWTH_BYTES, (first, now)


@pytest.fixture
def world():
    made = GlooWorld(2)
    yield made
    made.close()


def test_hundreds_of_steps(world):
    check_flat(world, [50, 200], "nested")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", ["nested", "nested+early", "sequential"])
def test_ten_thousand_steps(world, schedule, monkeypatch):
    import gloo_world

    monkeypatch.setattr(gloo_world, "LIMIT_S", 3000.0)
    check_flat(world, [1_000, 2_000, 5_000, 10_000], schedule)
