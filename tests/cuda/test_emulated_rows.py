"""What becomes of row gradients, on the emulator: means over sources, rows taken out, what is finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulated_cuda import EmulatedCuda, planted, seeds_that_see
from nestpipe_kernels.ops.finite_rows import cuda as finite_cuda
from nestpipe_kernels.ops.finite_rows import reference as finite_reference
from nestpipe_kernels.ops.mean_sources import cuda as mean_cuda
from nestpipe_kernels.ops.mean_sources import reference as mean_reference
from nestpipe_kernels.ops.take_rows import cuda as take_cuda
from nestpipe_kernels.ops.take_rows import reference as take_reference

SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42, -3e38])


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def settled(values: Tensor) -> Tensor:
    """Bits, all NaNs alike: which one comes out of a sum depends on the machine."""
    return bits(torch.where(values.isnan(), torch.tensor(7.0), values))


def assert_means_are_right(
    num_rows: int, dim: int, per_source: list[int], *, chosen: int | None = None, device: str = "cpu"
) -> None:
    """Boxes with something special here and there; rows that no source has, and rows that all have."""
    generator = torch.Generator().manual_seed(dim + num_rows)
    size = sum(per_source)
    boxes = torch.randn(size, dim, generator=generator)
    if size > 9:
        boxes[4:9, dim // 2] = SPECIAL[:5]
    slot = torch.randint(0, max(1, num_rows - 2), (size,), generator=generator)
    entries = mean_reference.entries_by_row(slot, num_rows)
    rows = None if chosen is None else torch.randperm(num_rows, generator=generator)[:chosen]
    divisors = [1.0, 3.0, 0.7][: len(per_source)]
    for limit in (math.inf, 2.0):
        results = []
        for run, place in ((mean_cuda.mean_sources, device), (mean_reference.mean_sources, "cpu")):
            total = torch.full((num_rows, dim), 7.0, device=place)
            countable = torch.ones(num_rows, dtype=torch.bool, device=place)
            run(total, countable, boxes.to(place), entries, per_source, divisors, rows, limit)
            results.append((settled(total.cpu()), countable.cpu()))
        for found, expected in zip(*results):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("num_rows", "dim"), [(1, 1), (40, 7), (40, 64), (13, 2048)])
def test_emulated_cuda_mean_sources(cuda: EmulatedCuda, num_rows: int, dim: int) -> None:
    for per_source in ([0], [1], [17], [30, 0, 50], [20, 3]):
        assert_means_are_right(num_rows, dim, per_source)
    for chosen in (0, 1, num_rows):
        assert_means_are_right(num_rows, dim, [30, 10, 50], chosen=chosen)


def test_emulated_cuda_rows_beside_a_boundary(cuda: EmulatedCuda) -> None:
    """Rows of 64 that begin 4 bytes after a boundary of 16."""
    boxes, total = torch.randn(20 * 64 + 1)[1:].view(20, 64), torch.empty(20 * 64 + 1)[1:].view(20, 64)
    entries = mean_reference.entries_by_row(torch.arange(20), 20)
    mean_cuda.mean_sources(total, torch.ones(20, dtype=torch.bool), boxes, entries, [20], [1.0], None, math.inf)
    assert torch.equal(total, boxes)
    assert finite_cuda.all_finite(total) and bool(finite_cuda.finite_rows(boxes).all())
    assert torch.equal(take_cuda.take_rows(total, torch.arange(20))[0], boxes) and not bool(total.any())


def test_emulated_cuda_mean_sources_leaves_out_rows_out_of_range(cuda: EmulatedCuda) -> None:
    total, countable, bad = torch.zeros(4, 8), torch.ones(4, dtype=torch.bool), torch.tensor([-1])
    entries = mean_reference.entries_by_row(torch.arange(4), 4)
    rows = torch.tensor([1, 4, -1])
    mean_cuda.mean_sources(total, countable, torch.ones(4, 8), entries, [4], [1.0], rows, math.inf, bad)
    assert total[:, 0].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert int(bad) == 1


@pytest.mark.parametrize(("num_rows", "dim", "stride"), [(1, 1, 1), (60, 7, 9), (60, 64, 64), (5, 2048, 2052)])
def test_emulated_cuda_take_rows(cuda: EmulatedCuda, num_rows: int, dim: int, stride: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randn(num_rows, stride, generator=generator)
    wide[num_rows // 2, : len(SPECIAL)] = SPECIAL[:stride]
    for size in (0, 1, num_rows):
        index, there = torch.randperm(num_rows, generator=generator)[:size], wide.clone()
        expected = there.clone()
        found = take_cuda.take_rows(there[:, :dim], index)
        wanted = take_reference.take_rows(expected[:, :dim], index)
        assert torch.equal(bits(there), bits(expected))
        assert torch.equal(bits(found[0]), bits(wanted[0]))
        assert torch.equal(settled(found[1]), settled(wanted[1]))


def test_emulated_cuda_take_rows_leaves_out_rows_out_of_range(cuda: EmulatedCuda) -> None:
    matrix, bad = torch.ones(4, 8), torch.tensor([-1])
    rows, peaks = take_cuda.take_rows(matrix, torch.tensor([3, 2**40, -1, 0]), bad)
    assert matrix[:, 0].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert rows[[0, 3]].eq(1.0).all() and peaks[[0, 3]].tolist() == [1.0, 1.0]
    assert int(bad) == 1


def assert_finite_is_right(num_rows: int, dim: int, stride: int, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(dim)
    wide = torch.full((num_rows, stride), torch.nan)
    grads = wide[:, :dim]
    grads.copy_(torch.randn(num_rows, dim, generator=generator))
    there = grads.to(device)
    assert finite_cuda.all_finite(there) and bool(finite_cuda.finite_rows(there).all())
    for row in range(0, num_rows, 9):
        grads[row, row % dim] = SPECIAL[row % len(SPECIAL)]
    there = grads.to(device)
    assert torch.equal(finite_cuda.finite_rows(there).cpu(), finite_reference.finite_rows(grads))
    assert finite_cuda.all_finite(there) == finite_reference.all_finite(grads)


FINITE = [(0, 4, 4), (1, 1, 1), (70, 7, 9), (70, 64, 64), (3, 2048, 2052)]


@pytest.mark.parametrize(("num_rows", "dim", "stride"), FINITE)
def test_emulated_cuda_finite_rows(cuda: EmulatedCuda, num_rows: int, dim: int, stride: int) -> None:
    assert_finite_is_right(num_rows, dim, stride)


# ----------------------------------------------------------------------------------------------------- planted bugs


def means_are_right(cuda: EmulatedCuda) -> bool:
    with cuda.used_for():
        assert_means_are_right(40, 64, [30, 0, 50])
    return True


def peaks_are_right(cuda: EmulatedCuda) -> bool:
    rows = torch.arange(640.0).view(10, 64)
    with cuda.used_for():
        return take_cuda.take_rows(rows, torch.arange(10))[1].tolist() == [64.0 * row + 63 for row in range(10)]


BUGS = {
    "the divisor of the source before": (
        "buffers/mean_sources.cu",
        {"a.divisors[source]": "a.divisors[source > 0 ? source - 1 : 0]"},
        means_are_right,
    ),
    "a peak of half the lanes": ("buffers/take_rows.cu", {"blockDim.x / 2": "blockDim.x / 4"}, peaks_are_right),
}


LATER = {"the divisor of the source before"}


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.soak] * (bug in LATER)) for bug in BUGS])
def test_emulated_cuda_rows_see(emulated_objects: list[Path], tmp_path: Path, bug: str) -> None:
    source, changes, is_right = BUGS[bug]
    assert seeds_that_see(planted(emulated_objects, source, changes, tmp_path), is_right) == 6
