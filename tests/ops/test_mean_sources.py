"""mean_sources, entries_by_row and take_rows: bits, magnitudes that do not count, errors."""

from __future__ import annotations

import math

import pytest
import torch
from row_cases import DIMS, bits, native_threads
from torch import Tensor

from nestpipe_kernels.ops.mean_sources import entries_by_row, mean_sources
from nestpipe_kernels.ops.take_rows import take_rows

IMPLEMENTATIONS = ["native", "reference"]
ROWS = 60


def _case(dim: int, sources: int, seed: int = 0) -> tuple[Tensor, Tensor, list[int]]:
    """(boxes, slot, per_source): every row has some sources' entries; a source has a row once."""
    chance = torch.Generator().manual_seed(seed)
    lists = [torch.randperm(ROWS, generator=chance)[: 20 * (source % 3 + 1)] for source in range(sources)]
    slot = torch.cat(lists)
    boxes = torch.randn(len(slot), dim, generator=chance)
    boxes[torch.rand(boxes.shape, generator=chance) < 0.1] = -0.0
    return boxes, slot, [len(one) for one in lists]


def _plain(boxes: Tensor, slot: Tensor, per_source: list[int], divisors: list[float]) -> Tensor:
    """Source after source, whole lists at a time."""
    total = torch.zeros(ROWS, boxes.shape[1])
    for part, rows, divisor in zip(boxes.split(per_source), slot.split(per_source), divisors):
        total[rows] = total[rows] + part / divisor
    return total / len(per_source)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sources", [1, 2, 5])
@pytest.mark.parametrize("dim", DIMS)
def test_sums_sources_in_order_and_divides_last(dim: int, sources: int, implementation: str) -> None:
    boxes, slot, per_source = _case(dim, sources)
    divisors = [1.0, 3.0, -0.7, 1e-3, 1.0][:sources]
    entries = entries_by_row(slot, ROWS, implementation=implementation)
    total, countable = torch.full((ROWS, dim), torch.nan), torch.ones(ROWS, dtype=torch.bool)
    mean_sources(total, countable, boxes, entries, per_source, divisors, implementation=implementation)
    assert torch.equal(bits(total), bits(_plain(boxes, slot, per_source, divisors)))
    assert countable.all()
    some, rows = torch.full((ROWS, dim), 7.0), torch.tensor([59, 0, 31])
    mean_sources(some, countable, boxes, entries, per_source, divisors, rows, implementation=implementation)
    assert torch.equal(bits(some[rows]), bits(total[rows]))
    assert int((some == 7.0).all(1).sum()) == ROWS - 3
    nothing = torch.full((ROWS, dim), 7.0)
    mean_sources(nothing, countable, boxes, entries, per_source, (), rows[:0], implementation=implementation)
    assert (nothing == 7.0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_entries_of_each_row_ascend(implementation: str) -> None:
    slot = torch.tensor([2, 0, 2, 4, 0, 2])
    starts, order = entries_by_row(slot, 5, implementation=implementation)
    assert starts.tolist() == [0, 2, 2, 5, 5, 6]
    assert order.tolist() == [1, 4, 0, 2, 5, 3]
    starts, order = entries_by_row(slot[:0], 0, implementation=implementation)
    assert (starts.tolist(), order.tolist()) == ([0], [])
    with pytest.raises(IndexError, match=r"entries_by_row: slot must lie in \[0, 4\), got 4 at position 3"):
        entries_by_row(slot, 4, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bad_entry_marks_its_row_alone(implementation: str) -> None:
    limit = torch.finfo(torch.float32).max / 4
    slot, per_source = torch.tensor([0, 1, 2, 3, 0, 1, 2, 4]), [4, 4]
    entries = entries_by_row(slot, 6)
    boxes = torch.ones(8, 19)
    boxes[1, 18], boxes[2, 3], boxes[4, 0], boxes[7, 0] = math.nan, -limit, -limit * 1.01, math.inf
    expected = {limit: [False, False, True, True, False, True], math.inf: [True, False, True, True, True, True]}
    for allowed, wanted in expected.items():
        total, countable = torch.zeros(6, 19), torch.ones(6, dtype=torch.bool)
        mean_sources(total, countable, boxes, entries, per_source, (), None, allowed, implementation=implementation)
        assert countable.tolist() == wanted
        assert (total[5] == 0).all()
    countable = torch.ones(6, dtype=torch.bool)
    mean_sources(
        torch.zeros(6, 19), countable, boxes, entries, per_source, [1.0, 2.0], torch.tensor([0, 1]), limit,
        implementation=implementation,
    )  # fmt: skip
    assert countable.tolist() == [True, False, True, True, True, True]  # divided first; row 4 was not chosen


def test_threads_do_not_change_bits() -> None:
    chance = torch.Generator().manual_seed(1)
    slot = torch.cat([torch.randperm(5000, generator=chance)[:4000] for _ in range(3)])
    boxes, results = torch.randn(12000, 33, generator=chance), []
    for threads in (1, 4):
        total, countable = torch.empty(5000, 33), torch.ones(5000, dtype=torch.bool)
        with native_threads(threads):
            mean_sources(total, countable, boxes, entries_by_row(slot, 5000), [4000] * 3, [1.0, 2.0, 3.0])
            rows, peaks = take_rows(total.clone(), torch.arange(4999, 0, -1))
        results.append((bits(total), bits(rows), bits(peaks)))
    for one, many in zip(*results):
        assert torch.equal(one, many)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", DIMS)
def test_taken_rows_leave_zeros(dim: int, implementation: str) -> None:
    matrix = torch.randn(90, dim + 3)[:, :dim]
    matrix[4, 0], matrix[5, dim - 1] = math.nan, -math.inf
    before, index = matrix.clone(), torch.randperm(90)[:63]
    index = torch.cat([torch.tensor([5, 4]), index[index > 5]])
    rows, peaks = take_rows(matrix, index, implementation=implementation)
    assert torch.equal(bits(rows), bits(before[index]))
    largest = before[index].abs().amax(1)
    assert torch.equal(peaks.isnan(), largest.isnan())
    assert torch.equal(peaks[~peaks.isnan()], largest[~peaks.isnan()])
    before[index] = 0.0
    assert torch.equal(bits(matrix), bits(before))
    rows, peaks = take_rows(matrix, index[:0], implementation=implementation)
    assert rows.shape == (0, dim)
    assert peaks.shape == (0,)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_arguments(implementation: str) -> None:
    total, countable, boxes = torch.full((3, 2), 7.0), torch.ones(3, dtype=torch.bool), torch.ones(2, 2)
    entries = entries_by_row(torch.tensor([0, 2]), 3)
    good = (total, countable, boxes, entries, [1, 1])
    cases = [
        (TypeError, "total must be a float32 CPU tensor, got float64", (total.double(), *good[1:])),
        (ValueError, "total and boxes must be contiguous", (total, countable, torch.ones(2, 3), *good[3:])),
        (ValueError, r"entries\[0\] must have 4 entries, got 3", (*good[:3], (entries[0][:3], entries[1]), [1, 1])),
        (ValueError, "countable must be a contiguous bool vector of 3 entries", (total, countable[:2], *good[2:])),
        (ValueError, r"per_source must add up to 2 boxes, got \[1\]", (*good[:4], [1])),
        (ValueError, "expected 2 divisors or none, got 1", (*good, [1.0])),
        (IndexError, r"rows must lie in \[0, 3\), got 3 at position 1", (*good, (), torch.tensor([0, 3]))),
        (ValueError, "rows must be distinct, got row 1 again at position 1", (*good, (), torch.tensor([1, 1]))),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=f"mean_sources: {message}"):
            mean_sources(*arguments, implementation=implementation)
    with pytest.raises(ValueError, match="take_rows: index must be distinct, got row 1 again"):
        take_rows(total, torch.tensor([1, 1]), implementation=implementation)
    with pytest.raises(IndexError, match=r"take_rows: index must lie in \[0, 3\), got -1 at position 0"):
        take_rows(total, torch.tensor([-1]), implementation=implementation)
    with pytest.raises(TypeError, match="take_rows: matrix must be a float32 CPU tensor"):
        take_rows(total.half(), torch.tensor([1]), implementation=implementation)
    assert (total == 7.0).all()
