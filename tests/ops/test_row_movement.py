"""row_sync, gather_rows, scatter_rows, scatter_add_rows, zero_rows, finite_rows: bits, bounds, errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from row_cases import DIMS, bits, native_threads

from nestpipe_kernels.ops.finite_rows import all_finite, finite_rows
from nestpipe_kernels.ops.gather_rows import gather_rows
from nestpipe_kernels.ops.row_sync import row_sync
from nestpipe_kernels.ops.scatter_add_rows import scatter_add_rows, scatter_rows, zero_rows

IMPLEMENTATIONS = ["native", "reference"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [0, 1, 63, 1000])
def test_row_sync_copies_whole_rows_and_nothing_else(size: int, implementation: str) -> None:
    source = torch.randint(-(2**31), 2**31 - 1, (1200, 20), dtype=torch.int32).view(torch.float32)  # NaN bits too
    target = torch.full((1100, 20), torch.nan)
    source_index, target_index = torch.randperm(1200)[:size], torch.randperm(1100)[:size]
    row_sync(source, target, source_index, target_index, implementation=implementation)
    expected = torch.full((1100, 20), torch.nan).view(torch.int32)
    expected[target_index] = source.view(torch.int32)[source_index]
    assert torch.equal(bits(target), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", DIMS)
def test_gather_takes_the_first_floats_of_each_row(dim: int, implementation: str) -> None:
    rows = torch.randn(50, dim + 7)
    index = torch.randint(0, 50, (63,))
    gathered = gather_rows(rows, index, dim, implementation=implementation)
    assert torch.equal(gathered, rows[index][:, :dim])
    assert gathered.is_contiguous()
    wide = torch.full((63, dim + 2), torch.nan)
    out = wide[:, 1 : 1 + dim]
    assert gather_rows(rows, index, dim, out, implementation=implementation) is out
    assert torch.equal(out, gathered)
    assert wide[:, 0].isnan().all()
    assert wide[:, -1].isnan().all()
    assert gather_rows(rows, index[:0], dim, implementation=implementation).shape == (0, dim)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", DIMS)
def test_scatter_add_and_zero(dim: int, implementation: str) -> None:
    start, source, index = torch.randn(90, dim), torch.randn(63, dim), torch.randperm(90)[:63]
    target = start.clone()
    scatter_add_rows(target, index, source, implementation=implementation)
    expected = start.clone()
    expected[index] = start[index] + source
    assert torch.equal(bits(target), bits(expected))
    scatter_rows(target, index, source, implementation=implementation)
    expected[index] = source
    assert torch.equal(bits(target), bits(expected))
    zero_rows(target, index, implementation=implementation)
    expected[index] = 0.0
    assert torch.equal(bits(target), bits(expected))
    scatter_add_rows(target, index[:0], source[:0], implementation=implementation)
    assert torch.equal(bits(target), bits(expected))


def test_threads_do_not_change_bits() -> None:
    start, source, index = torch.randn(5000, 33), torch.randn(4000, 33), torch.randperm(5000)[:4000]
    results = []
    for threads in (1, 4):
        target, other = start.clone(), torch.zeros(5000, 33)
        with native_threads(threads):
            scatter_add_rows(target, index, source)
            row_sync(target, other, index, index)
            results.append((bits(target), bits(other), bits(gather_rows(target, index, 30))))
    for one, many in zip(*results):
        assert torch.equal(one, many)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", DIMS)
def test_finite_rows(dim: int, implementation: str) -> None:
    grads = torch.randn(70, dim + 1)[:, :dim]
    assert finite_rows(grads, implementation=implementation).all()
    assert all_finite(grads, implementation=implementation)
    grads[0, 0], grads[33, dim - 1], grads[69, dim // 2] = torch.nan, torch.inf, -torch.inf
    grads[5, 0], grads[6, 0] = 3.4e38, 1e-45
    expected = torch.ones(70, dtype=torch.bool)
    expected[[0, 33, 69]] = False
    assert torch.equal(finite_rows(grads, implementation=implementation), expected)
    assert not all_finite(grads, implementation=implementation)
    assert all_finite(grads[1:33], implementation=implementation)
    assert finite_rows(grads[:0], implementation=implementation).shape == (0,)
    assert all_finite(grads[:0], implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [-1, 4, 2**62])
def test_index_out_of_range_changes_nothing(bad: int, implementation: str) -> None:
    target, source = torch.zeros(4, 2), torch.ones(3, 2)
    index, good = torch.tensor([0, 1, bad]), torch.tensor([0, 1, 2])
    calls: dict[str, Callable[[], object]] = {
        "row_sync: source_index": lambda: row_sync(target + 1, target, index, good, implementation=implementation),
        "row_sync: target_index": lambda: row_sync(target + 1, target, good, index, implementation=implementation),
        "gather_rows: index": lambda: gather_rows(target, index, 2, implementation=implementation),
        "scatter_rows: index": lambda: scatter_rows(target, index, source, implementation=implementation),
        "scatter_add_rows: index": lambda: scatter_add_rows(target, index, source, implementation=implementation),
        "zero_rows: index": lambda: zero_rows(target, index, implementation=implementation),
    }
    for name, call in calls.items():
        with pytest.raises(IndexError, match=rf"{name} must lie in \[0, 4\), got {bad} at position 2"):
            call()
        assert (target == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_repeated_target_rows_are_refused(implementation: str) -> None:
    target, source, index = torch.zeros(4, 2), torch.ones(3, 2), torch.tensor([2, 1, 2])
    calls: dict[str, Callable[[], object]] = {
        "row_sync: target_index": lambda: row_sync(target + 1, target, index, index, implementation=implementation),
        "scatter_rows: index": lambda: scatter_rows(target, index, source, implementation=implementation),
        "scatter_add_rows: index": lambda: scatter_add_rows(target, index, source, implementation=implementation),
        "zero_rows: index": lambda: zero_rows(target, index, implementation=implementation),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} must be distinct, got row 2 again at position 2"):
            call()
        assert (target == 0).all()


def test_errors_of_types_and_shapes() -> None:
    rows, index = torch.zeros(4, 3), torch.tensor([0, 1])
    with pytest.raises(TypeError, match="gather_rows: index must be an int64 CPU tensor, got int32"):
        gather_rows(rows, index.int(), 2)
    with pytest.raises(ValueError, match="gather_rows: index must be a contiguous vector"):
        gather_rows(rows, torch.arange(4)[::2], 2)
    with pytest.raises(ValueError, match=r"gather_rows: dim must lie in \[0, 3\] \(the row's length\), got 4"):
        gather_rows(rows, index, 4)
    with pytest.raises(ValueError, match=r"gather_rows: out must have shape \[2, 3\], got \[3, 3\]"):
        gather_rows(rows, index, 3, torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"scatter_rows: source must have shape \[2, 3\], got \[2, 2\]"):
        scatter_rows(rows, index, torch.zeros(2, 2))
    with pytest.raises(TypeError, match="scatter_add_rows: source must be a float32 CPU tensor, got float64"):
        scatter_add_rows(rows, index, torch.zeros(2, 3).double())
    with pytest.raises(ValueError, match="row_sync: source and target must have rows of the same length, got 3 and 2"):
        row_sync(rows, torch.zeros(4, 2), index, index)
    with pytest.raises(ValueError, match="row_sync: target_index must have 2 entries, got 1"):
        row_sync(rows, rows.clone(), index, index[:1])
    with pytest.raises(ValueError, match="row_sync: target must be contiguous, got strides"):
        row_sync(rows, torch.zeros(4, 6)[:, :3], index, index)
    with pytest.raises(ValueError, match="finite_rows: grads must have 2 dimensions"):
        finite_rows(torch.zeros(3))
    with pytest.raises(TypeError, match="all_finite: grads must be a float32 CPU tensor, got list"):
        all_finite([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zero_rows: unknown implementation 'cuda': choose native or reference"):
        zero_rows(rows, index, implementation="cuda")
