"""Sparse groups over gloo between four real processes: the bits of threads in one process."""

from __future__ import annotations

from collections.abc import Iterator

import process_cases as cases
import pytest
from groups_cases import grouped, one_copy
from test_processes import joined

from gloo_world import GlooWorld
from nestpipe_kernels import optim
from nestpipe_kernels.testing.scenario import Scenario
from nestpipe_kernels.testing.threads import run_scenario

pytestmark = pytest.mark.multiprocess

CASE = Scenario(world_size=4, batches=5, optimizer=optim.Adam(lr=0.1), seed=2)


@pytest.fixture(scope="module")
def world() -> Iterator[GlooWorld]:
    world = GlooWorld(4)
    yield world
    world.close()


def test_exact_groups_of_processes_have_the_bits_of_one_group(world):
    plain = one_copy(run_scenario(CASE, "sequential"))
    assert plain.difference(one_copy(joined(world.run(cases.play, grouped(CASE), "nested")), 2)) == ""


def test_groups_of_processes_that_average(world):
    case = grouped(CASE, 2, "average", 2)
    assert run_scenario(case, "sequential").difference(joined(world.run(cases.play, case, "nested"))) == ""
