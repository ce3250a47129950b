"""E1 with CUDA's kernels: pipelines on a device whose streams run late, which CUDA's own row kernels serve, run by the
emulator, give the bits of `sequential` on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import npu_runs as cases
import pytest
from test_exactness import make, name_of
from test_npu import COVER, HCCL, SHORT, SOAK_HCCL, assert_hccl_is_exact, run

from gloo_world import GlooWorld

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def world(emulated_library: Path) -> Iterator[GlooWorld]:
    """Two processes; either may also be used alone."""
    made = GlooWorld(2)
    run(made, cases.use_cuda_kernels, str(emulated_library), ranks=(0, 1))
    yield made
    made.close()


@pytest.mark.parametrize("schedule", SHORT)
def test_emulated_cuda_pipeline_equals_sequential_on_the_cpu(world, schedule):
    assert run(world, cases.compare, SHORT[schedule], schedule) == ""


@pytest.mark.soak
@pytest.mark.parametrize("case", COVER, ids=map(name_of, COVER))
def test_soak_emulated_cuda_pipeline_equals_sequential_on_the_cpu(world, case):
    assert run(world, cases.compare, make(case, seed=COVER.index(case)), case["schedule"]) == ""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] * (name != "early")) for name in HCCL])
def test_emulated_cuda_pipeline_between_processes_equals_sequential_on_the_cpu(world, name):
    assert_hccl_is_exact(world, *HCCL[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK_HCCL)
def test_soak_emulated_cuda_pipeline_between_processes_equals_sequential_on_the_cpu(world, name):
    assert_hccl_is_exact(world, *SOAK_HCCL[name])


def test_emulated_cuda_pipeline_with_bounded_tables_and_rows_in_a_file(world):
    assert run(world, cases.special_stores) == ["", ""]


def test_emulated_cuda_pipeline_uses_the_kernels(world):
    scenario = SHORT["nested"]
    assert run(world, cases.compare, scenario, "nested") == ""
    used = run(world, cases.kernels_used)
    assert {"gather_rows", "row_sync", "scatter_rows", "row_update", "mean_sources", "take_rows"} <= used


def test_emulated_cuda_pipeline_shows_what_is_not_ordered(world):
    """Last, and in the process that has no other test but those of both: see `compare_damaged`."""
    found = {damage: run(world, cases.compare_damaged, cases.DAMAGED, damage, ranks=(1,)) for damage in cases.DAMAGES}
    assert found.pop("nothing") == ""
    assert all(found.values()), found
