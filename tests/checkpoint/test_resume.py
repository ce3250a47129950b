"""Going on from a checkpoint equals not having stopped, bit for bit, wherever in the epoch it was made."""

from __future__ import annotations

import pytest
from resume_cases import SCHEDULES, check_resume

from nestpipe_kernels import optim
from nestpipe_kernels.testing.scenario import Scenario


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("world_size", "save_after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_resume_in_the_middle_of_an_epoch(tmp_path, schedule, world_size, save_after):
    scenario = Scenario(world_size=world_size, batches=6, optimizer=optim.Adam(lr=0.05), seed=world_size + 10)
    check_resume(scenario, schedule, tmp_path / "ckpt", save_after)
