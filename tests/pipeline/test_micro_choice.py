"""num_micro_batches="auto": what is chosen from given times. Runs of it: test_auto_micro_batches.py."""

from __future__ import annotations

import pytest
import torch

from nestpipe_kernels.pipeline.micro_choice import (
    MEASURED_STEPS,
    PROBES,
    WARM_STEPS,
    MicroBatchChoice,
    best_micro_batches,
)


def times(constant_us: int, cost_us: float, exposed_us: float) -> tuple[tuple[int, int], tuple[int, int]]:
    few, many = PROBES
    compute = (int(constant_us + cost_us * few), int(constant_us + cost_us * many))
    return compute, (int(exposed_us / few), int(exposed_us / many))


@pytest.mark.parametrize(
    ("cost_us", "exposed_us", "chosen"),
    [
        (1_000, 0, 1),  # nothing to hide
        (1_000, 64_000, 8),  # the square root of 64
        (4_000, 64_000, 4),
        (1_000, 250_000, 16),
        (0, 10_000_000, 32),  # the most that is offered
        (100_000, 50_000, 1),
    ],
)
def test_the_smallest_sum_of_cost_and_exposed_time(cost_us, exposed_us, chosen):
    assert best_micro_batches(*times(300_000, cost_us, exposed_us), largest_batch=4096) == chosen


def test_noise_that_makes_more_micro_batches_cheaper_does_not_make_them_free():
    assert best_micro_batches((300_000, 290_000), (3_200, 800), largest_batch=4096) == 8
    assert best_micro_batches((300_000, 300_000), (800, 3_200), largest_batch=4096) == 1


def test_a_batch_is_not_split_into_more_parts_than_it_has_samples():
    slow = times(0, 100, 10_000_000)
    assert [best_micro_batches(*slow, largest_batch=size) for size in (0, 1, 3, 9, 32)] == [1, 1, 2, 8, 32]


def test_all_ranks_choose_by_the_slowest_ones_medians():
    shared: list[torch.Tensor] = []
    slow = torch.tensor([302_000, 308_000, 32_000, 8_000, 4096])

    def share(mine: torch.Tensor) -> torch.Tensor:
        shared.append(mine)
        return torch.stack([mine, slow])

    choice, said = MicroBatchChoice(share), []
    for probe in PROBES:
        for step in range(WARM_STEPS + MEASURED_STEPS):
            said.append(choice.next_step())
            assert not choice.settled
            first = step < WARM_STEPS  # steps that must not count
            compute_us = 10**9 if first else 100 + probe + (10**6 if step == WARM_STEPS else 0)
            waits = {("lookup", True): 20_000, ("communication", True): 30_000, ("other", False): 7}
            choice.record({("compute", False): compute_us * 1000, **waits}, 7)
    assert said == [n for n in PROBES for _ in range(WARM_STEPS + MEASURED_STEPS)]
    assert choice.settled
    assert choice.next_step() == 8
    assert [mine.tolist() for mine in shared] == [[100 + PROBES[0], 100 + PROBES[1], 50, 50, 7]]
