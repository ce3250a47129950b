"""What feeds a pipeline: DataLoader workers, iterators that come again, evaluation in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator

import loader_cases as cases
import pytest

from gloo_world import GlooWorld
from nestpipe_kernels.testing.explorer import Outcome
from nestpipe_kernels.testing.threads import run_ranks_as_threads

SCHEDULES = ["sequential", "dbp", "fwp", "nested"]


def joined(parts: list[Outcome]) -> Outcome:
    columns = {name: [getattr(p, name)[0] for p in parts] for name in ("stores", "metadata", "dense", "losses")}
    return Outcome(**columns, partition=[])


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[GlooWorld]:
    """Two rank processes that may have workers of their own."""
    world = GlooWorld(2, daemon=False)
    yield world
    world.close()


@pytest.fixture(scope="module")
def two_epochs() -> Outcome:
    return joined(run_ranks_as_threads(2, lambda rank, comm: cases.plain_epochs(rank, comm, 2)))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("method", "persistent"),
    [("fork", True), ("fork", False), ("spawn", True)],
    ids=["fork-same-iterator", "fork-new-iterator", "spawn-same-iterator"],
)
def test_fault_40_two_epochs_from_loader_workers(two_ranks, two_epochs, method, persistent):
    results = two_ranks.run(cases.worker_epochs, method, persistent)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert [same for _, same in results] == [persistent] * 2
    assert two_epochs.difference(joined([outcome for outcome, _ in results])) == ""
    assert len(two_epochs.losses[0]) == 2 * cases.BATCHES


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fault_40_an_exhausted_iterator_ends_again_and_a_new_one_trains(schedule):
    for got in run_ranks_as_threads(2, lambda rank, comm: cases.exhausted_again(rank, comm, schedule)):
        assert got == ["batch"] * 5 + ["end"] * 3 + ["batch"] * 5 + ["10 steps"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("evaluate_after", [(1,), (0, 1, 4)])
def test_fault_15_40_evaluation_in_the_middle_of_an_epoch(schedule, evaluate_after):
    plain = run_ranks_as_threads(2, lambda rank, comm: cases.with_evaluation(rank, comm, schedule, ()))
    run = run_ranks_as_threads(2, lambda rank, comm: cases.with_evaluation(rank, comm, schedule, evaluate_after))
    assert [wrong for _, wrong in plain + run] == [[]] * 4
    assert joined([o for o, _ in plain]).difference(joined([o for o, _ in run])) == ""
