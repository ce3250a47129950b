"""E1 with rows in the device's memory: pipelines on the stand-in, CUDA's kernels run by the emulator, give the bits of
`sequential` with rows in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import npu_runs as cases
import pytest
from test_exactness import make, name_of
from test_npu import COVER, SHORT, run

from gloo_world import GlooWorld

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def world(emulated_library: Path) -> Iterator[GlooWorld]:
    """A process with the device."""
    made = GlooWorld(1)
    run(made, cases.use_cuda_kernels, str(emulated_library))
    yield made
    made.close()


@pytest.mark.parametrize("schedule", SHORT)
def test_emulated_cuda_rows_equal_sequential_on_the_cpu(world, schedule):
    assert run(world, cases.compare_rows_there, SHORT[schedule], schedule) == ""


def test_emulated_cuda_rows_of_bounded_tables(world):
    assert run(world, cases.bounded_there) == ""


@pytest.mark.soak
@pytest.mark.parametrize("case", COVER, ids=map(name_of, COVER))
def test_soak_emulated_cuda_rows_equal_sequential_on_the_cpu(world, case):
    assert run(world, cases.compare_rows_there, make(case, seed=COVER.index(case)), case["schedule"]) == ""


@pytest.mark.parametrize(
    ("work", "schedule"),
    [(cases.evaluate_between_steps, "nested"), (cases.go_on_after_a_bad_batch, "nested+early")],
)
def test_emulated_cuda_rows_of_retrieval_that_is_undone_and_repeated(world, work, schedule):
    expected = run(world, work, "cpu", schedule)
    assert run(world, work, cases.ROWS_THERE, schedule) == expected
    assert len(set(expected)) == len(expected) > 3


def test_emulated_cuda_rows_calls_are_done_when_they_return(world):
    assert run(world, cases.calls_on_streams_of_their_own)


def test_emulated_cuda_rows_out_of_memory_are_a_typed_error_and_training_goes_on(world):
    expected = run(world, cases.go_on_after_full_stores, "cpu")
    assert run(world, cases.go_on_after_full_stores, cases.ROWS_THERE) == expected
    assert len(set(expected)) == len(expected) > 3


@pytest.mark.parametrize(
    ("first", "second"),
    [(cases.ROWS_THERE, "cpu"), pytest.param("cpu", cases.ROWS_THERE, marks=pytest.mark.soak)],
)
def test_emulated_cuda_rows_of_checkpoints_go_to_the_host_and_back(world, first, second):
    assert run(world, cases.saved_and_loaded, first, second) == run(world, cases.saved_and_loaded, "cpu", "cpu")


@pytest.mark.parametrize(
    ("saver", "loader"),
    [("cpu", cases.ROWS_THERE), pytest.param(cases.ROWS_THERE, "cpu", marks=pytest.mark.soak)],
)
def test_emulated_cuda_rows_of_checkpoints_go_to_another_number_of_ranks(world, saver, loader):
    assert run(world, cases.resharded, saver, loader) == run(world, cases.resharded, "cpu", "cpu")


def test_emulated_cuda_rows_without_a_pipeline(world):
    expected = run(world, cases.without_a_pipeline, "cpu")
    assert run(world, cases.without_a_pipeline, cases.ROWS_THERE) == expected
    assert run(world, cases.converted, cases.ROWS_THERE) == run(world, cases.converted, "cpu")


def test_emulated_cuda_rows_that_do_not_fit_the_pipeline_are_refused(world):
    found = run(world, cases.rows_that_are_refused)
    assert found["cpu"] == (
        "NestedPipeline: rows of table 'user' of module 'lookup' lie on npu:0, but the pipeline works on cpu; move the "
        "dense model with model.to('npu:0'), or give the table another tier"
    )
    assert found["copies"] == (
        "table 'user': rows on a device (DeviceTier) do not work with sparse_groups=2; use sparse_groups=1, or leave "
        "the tier out"
    )
    assert found["kernels"].startswith("device store: no native kernels for tensors on npu:0: install a wheel built")
