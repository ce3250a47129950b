"""Operations on rows that lie on an accelerator: the bits of the CPU, errors. On the stand-in for an NPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import on_device_cases as cases
import pytest

from gloo_world import GlooWorld

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def world() -> Iterator[GlooWorld]:
    made = GlooWorld(1)
    yield made
    made.close()


@pytest.mark.parametrize("group", [group for group in cases.GROUPS if "soak" not in group])
def test_rows_on_a_device_have_the_bits_of_the_cpu(world, group):
    assert world.call(cases.differences, group) == []


@pytest.mark.soak
def test_soak_hot_rows_on_a_device_have_the_bits_of_the_cpu(world):
    assert world.call(cases.differences, "soak: hot rows") == []


def test_what_is_elsewhere_or_out_of_range_is_refused(world):
    placed, ranged, apart, grads = world.call(cases.errors)
    assert placed == "TypeError: gather_rows: index must be an int64 CPU tensor, got int64 on npu (shape [2])"
    assert ranged == "IndexError: gather_rows: index must lie in [0, 4), got 4 at position 1"
    assert apart == (
        "TypeError: scatter_rows: all rows must be on one device, got float32 on npu (shape [4, 8]) and float32 on cpu "
        "(shape [2, 8])"
    )
    assert grads == "TypeError: row_update: grads must be on npu:0, as rows are, got float32 on cpu (shape [4, 2])"


def test_emulated_cuda_kernels_have_the_bits_of_the_cpu(world, emulated_library: Path) -> None:
    """Last, as this process's device has the kernels from here on."""
    world.call(cases.use_kernels, str(emulated_library))
    for group in cases.GROUPS:
        if "soak" not in group:
            assert world.call(cases.differences, group) == []
    assert world.call(cases.kernels_used) == cases.KERNELS
    assert world.call(cases.key_differences) == 0
    assert world.call(cases.kernel_errors) == [
        "TypeError: lookup_pool: outs[0] must be a float32 tensor on npu:0, got float32 on cpu (shape [1, 8])",
        "TypeError: lookup_pool: rows must be a float32 tensor on npu:0, got float64 on npu (shape [4, 8])",
        "TypeError: lookup_pool: grads[0] must be a float32 tensor on npu:0, got float64 on npu (shape [1, 8])",
        "ValueError: lookup_pool: pooling max needs `rows` in backward, got none",
        "TypeError: lookup_pool: rows must be a float32 tensor on npu:0, got float32 on cpu (shape [4, 8])",
        "TypeError: row_update: rows must be a float32 tensor on npu:0, got float64 on npu (shape [4, 8])",
        "ValueError: intersect: keys_b must be on cpu, where the keys are, got npu:0",
        "TypeError: row_update: mask must be a bool or uint8 tensor on the CPU or npu:0, "
        "got float32 on npu (shape [4])",
    ]
