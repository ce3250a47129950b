"""Gradients of rows and of weights, and pooled rows, on the emulator: the reference's order of sums, bit for bit."""

from __future__ import annotations

import mmap
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulated_cuda import EmulatedCuda, planted, seeds_that_see
from nestpipe_kernels.ops.lookup_pool import cuda as pool_cuda
from nestpipe_kernels.ops.lookup_pool import reference
from nestpipe_kernels.ops.lookup_pool.bags import Bags
from nestpipe_kernels.types import PoolingType

SUM, MEAN, MAX, NONE = (mode.code for mode in (PoolingType.SUM, PoolingType.MEAN, PoolingType.MAX, PoolingType.NONE))
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, torch.nan, 1e-42, -3e38])


def bits(values: Tensor) -> Tensor:
    """All NaNs alike: which one comes out of a sum depends on the machine."""
    return torch.where(values.isnan(), torch.tensor(7.0), values).contiguous().view(torch.int32)


def some_bags(modes: list[int], size: int, num_rows: int, *, weighted: bool = False, narrow: bool = False) -> Bags:
    """About `size` occurrences in each segment, in bags of uneven length; padding; few rows that are very frequent."""
    generator = torch.Generator().manual_seed(size + num_rows + len(modes))
    lengths: list[int] = []
    segment_bags = [0]
    for mode in modes:
        if mode == NONE:
            lengths += [1] * size
        else:
            cuts = torch.randint(0, size + 1, (size // 5,), generator=generator).sort().values
            lengths += torch.cat([torch.tensor([0, 0]), cuts, torch.tensor([size, size])]).diff().tolist()
        segment_bags.append(len(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    n = int(offsets[-1])
    slots = (torch.rand(n, generator=generator) ** 6 * num_rows).long().clamp(max=num_rows - 1)
    slots[torch.rand(n, generator=generator) < 0.1] = -1
    weights = torch.randn(n, generator=generator) if weighted else None
    return Bags(slots.int() if narrow else slots, offsets, tuple(segment_bags), tuple(modes), weights)


def matrices(bags: Bags, dim: int, stride: int, seed: int = 0) -> list[Tensor]:
    """One matrix for each segment, NaN beside its columns."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for begin, end in pairwise(bags.segment_bags):
        wide = torch.full((end - begin, stride), torch.nan)
        wide[:, :dim] = torch.randn(end - begin, dim, generator=generator)
        made.append(wide[:, :dim])
    return made


def assert_gradients_are_right(
    bags: Bags, num_rows: int, dim: int, stride: int, *, special: bool = False, device: str = "cpu"
) -> None:
    rows = matrices(Bags(bags.slots, bags.bag_offsets, (0, num_rows), (SUM,), None), dim, stride, seed=1)[0]
    rows[:, 0] = rows[:, 0].round()  # equal ones among the candidates of a maximum
    grads: list[Tensor | None] = [*matrices(bags, dim, stride)]
    if special:
        rows[2], grads[0][3] = SPECIAL[:dim].repeat(dim)[:dim], SPECIAL[:dim].repeat(dim)[:dim]
    results = []
    for run, place in ((pool_cuda.pool_backward, device), (reference.pool_backward, "cpu")):
        accumulator = torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(5))
        accumulator[:3] = -0.0
        accumulator = accumulator.to(place)
        given = [None if grad is None else grad.to(place) for grad in grads]
        run(given, rows.to(place), bags, accumulator)
        if len(grads) > 1:
            run([None, *given[1:]], rows.to(place), bags, accumulator)
        results.append(bits(accumulator.cpu()))
    assert torch.equal(*results)


def assert_pooling_is_right(bags: Bags, num_rows: int, dim: int, stride: int, device: str = "cpu") -> None:
    rows = matrices(Bags(bags.slots, bags.bag_offsets, (0, num_rows), (SUM,), None), dim, stride, seed=1)[0]
    rows[num_rows // 2] = SPECIAL.repeat(dim)[:dim]
    rows[:, 0] = rows[:, 0].round()
    results = []
    for run, place in ((pool_cuda.pool_forward, device), (reference.pool_forward, "cpu")):
        outs = [torch.full_like(out, torch.nan).to(place) for out in matrices(bags, dim, stride)]
        run(rows.to(place), bags, outs)
        results.append([bits(out.cpu()) for out in outs])
    for found, expected in zip(*results):
        assert torch.equal(found, expected)


def assert_weight_gradients_are_right(dim: int, stride: int, device: str = "cpu") -> None:
    bags = some_bags([SUM, NONE, SUM], 30, 20)
    rows = matrices(Bags(bags.slots, bags.bag_offsets, (0, 20), (SUM,), None), dim, stride, seed=1)[0]
    grads = [*matrices(bags, dim, stride)[:2], None]
    there = [None if grad is None else grad.to(device) for grad in grads]
    found = pool_cuda.pool_weight_grad(there, rows.to(device), bags)
    assert torch.equal(bits(found.cpu()), bits(reference.pool_weight_grad(grads, rows, bags)))


def hot_bags(counts: list[int]) -> Bags:
    """Weighted occurrences of row u, counts[u] of them, in any order."""
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(3))]
    offsets = torch.arange(0, len(slots) + 1, 7 if len(slots) % 7 == 0 else 1)
    return Bags(slots, offsets, (0, len(offsets) - 1), (SUM,), torch.rand(len(slots)))


HOT_COUNTS = ([1024, 1025, 2048, 0, 3, 2501], [2049], [4, 1024])
"""Rows of one block and of several, the last one full, and not; two hot rows side by side, others in between."""


DIMS = [(1, 1), (7, 9), (64, 68)]


@pytest.mark.parametrize(("dim", "stride"), DIMS)
def test_emulated_cuda_pool_backward(cuda: EmulatedCuda, dim: int, stride: int) -> None:
    assert_gradients_are_right(some_bags([SUM, MEAN, MAX, NONE, MEAN], 60, 40), 40, dim, stride, special=True)
    assert_gradients_are_right(some_bags([NONE, SUM], 150, 300, weighted=True, narrow=True), 300, dim, stride)
    assert_gradients_are_right(some_bags([SUM], 1, 1), 1, dim, stride)
    assert_gradients_are_right(some_bags([SUM], 0, 3), 3, dim, stride)


def test_emulated_cuda_pool_backward_of_long_rows(cuda: EmulatedCuda) -> None:
    assert_gradients_are_right(some_bags([SUM, MAX], 20, 9), 9, 2048, 2048)
    assert_gradients_are_right(some_bags([MEAN], 20, 9), 9, 1281, 1284)


@pytest.mark.parametrize(("dim", "stride"), [(3, 3), (4, 4)])
def test_emulated_cuda_pool_backward_of_hot_rows(cuda: EmulatedCuda, dim: int, stride: int) -> None:
    for counts in HOT_COUNTS:
        assert_gradients_are_right(hot_bags(counts), len(counts), dim, stride)


@pytest.mark.parametrize(("dim", "stride"), [*DIMS, (2048, 2048)])
@pytest.mark.parametrize("weighted", [False, True])
def test_emulated_cuda_pool_forward(cuda: EmulatedCuda, dim: int, stride: int, weighted: bool) -> None:
    modes = [SUM, NONE] if weighted else [SUM, MEAN, MAX, NONE]
    for size, num_rows in ((0, 3), (1, 1), (60, 40)):
        bags = some_bags(modes, size, num_rows, weighted=weighted, narrow=weighted)
        assert_pooling_is_right(bags, num_rows, dim, stride)


@pytest.mark.parametrize(("dim", "stride"), [*DIMS, (37, 40), (1280, 1280)])
def test_emulated_cuda_pool_weight_grad(cuda: EmulatedCuda, dim: int, stride: int) -> None:
    assert_weight_gradients_are_right(dim, stride)


def test_emulated_cuda_pool_of_rows_that_are_far_apart(cuda: EmulatedCuda) -> None:
    """Rows of 3 GiB of address space, hardly any of it touched: the last one begins beyond 2^31 floats."""
    memory = mmap.mmap(-1, 12 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    rows = torch.frombuffer(memory, dtype=torch.float32).view(4, -1)[:, :8]
    rows.copy_(torch.arange(32.0).view(4, 8))
    bags = Bags(torch.tensor([3, 0, 3, 2]), torch.tensor([0, 2, 4]), (0, 1, 2), (SUM, MAX), None)
    outs, accumulator = [torch.empty(1, 8), torch.empty(1, 8)], torch.zeros(4, 8)
    pool_cuda.pool_forward(rows, bags, outs)
    pool_cuda.pool_backward([torch.ones(1, 8), torch.ones(1, 8)], rows, bags, accumulator)
    assert outs[0].tolist() == (rows[3:] + rows[:1]).tolist() and outs[1].tolist() == rows[3:].tolist()
    assert accumulator[:, 5].tolist() == [1.0, 0.0, 0.0, 2.0]


def test_emulated_cuda_pool_beside_a_boundary(cuda: EmulatedCuda) -> None:
    """Rows of 8 that begin 4 bytes after a boundary of 16: each matrix in turn."""
    bags = some_bags([SUM, MAX], 30, 20)
    sizes = [20, *(end - begin for begin, end in pairwise(bags.segment_bags)), 20]
    for shifted in range(len(sizes)):
        results = []
        for module in (pool_cuda, reference):
            generator = torch.Generator().manual_seed(2)
            flat = [torch.randn(size * 8 + 1, generator=generator)[int(k == shifted) :] for k, size in enumerate(sizes)]
            rows, *outs, sums = (part[: size * 8].view(size, 8) for part, size in zip(flat, sizes))
            module.pool_backward(outs, rows, bags, sums)
            module.pool_forward(rows, bags, outs)
            results.append([bits(part) for part in (*outs, sums)])
        assert all(torch.equal(found, expected) for found, expected in zip(*results))


def test_emulated_cuda_pool_leaves_out_slots_out_of_range(cuda: EmulatedCuda) -> None:
    bags = Bags(torch.tensor([1, 0, 4, 2**40, -2, 3]), torch.tensor([0, 3, 6]), (0, 2), (SUM,), None)
    rows, bad = torch.arange(32.0).view(4, 8), torch.full((3,), -1)
    out, accumulator = torch.empty(2, 8), torch.zeros(4, 8)
    pool_cuda.pool_forward(rows, bags, [out], bad[:1])
    pool_cuda.pool_backward([torch.ones(2, 8)], rows, bags, accumulator, bad[1:2])
    dots = pool_cuda.pool_weight_grad([torch.ones(2, 8)], rows, bags, bad[2:])
    assert out[:, 0].tolist() == [8.0, 24.0]
    assert accumulator[:, 0].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert dots.eq(0).tolist() == [False, False, True, True, True, False]
    assert bad.tolist() == [2, 2, 2]


# ----------------------------------------------------------------------------------------------------- planted bugs


def hot_rows_are_right(cuda: EmulatedCuda) -> bool:
    slots = torch.arange(2 * 1500) % 2
    bags = Bags(slots, torch.arange(len(slots) + 1), (0, len(slots)), (SUM,), None)
    with cuda.used_for():
        assert_gradients_are_right(bags, 2, 4, 4)
    return True


def means_are_right(cuda: EmulatedCuda) -> bool:
    """Bags of many lanes of several warps, which count at the same time."""
    slots = torch.arange(900) % 7
    slots[::5] = -1
    bags = Bags(slots, torch.tensor([0, 10, 850, 900]), (0, 3), (MEAN,), None)
    with cuda.used_for():
        assert_gradients_are_right(bags, 7, 3, 3)
    return True


BUGS = {
    "counts that are added without atomics": (
        {
            "atomicAdd(work.bag_counts + bag, __popc(same));": "store_racing(work.bag_counts + bag, "
            "load_racing(work.bag_counts + bag) + __popc(same));"
        },
        means_are_right,
    ),
    "blocks of another size": (
        {"begin + kGradientBlock < last ? begin + kGradientBlock : last": "begin + 512 < last ? begin + 512 : last"},
        hot_rows_are_right,
    ),
    "hot rows summed without blocks": (
        {"if (work.counts[u] <= kGradientBlock) {": "if (work.counts[u] <= 4 * kGradientBlock) {"},
        hot_rows_are_right,
    ),
}
LATER = {"blocks of another size", "hot rows summed without blocks"}


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.soak] * (bug in LATER)) for bug in BUGS])
def test_emulated_cuda_reduce_sees(emulated_objects: list[Path], tmp_path: Path, bug: str) -> None:
    changes, is_right = BUGS[bug]
    source = "pool/lookup_pool_backward.cu"
    assert seeds_that_see(planted(emulated_objects, source, changes, tmp_path), is_right) >= 2


@pytest.mark.soak
def test_emulated_cuda_reduce_sees_nothing_where_nothing_is_planted(emulated_library: Path) -> None:
    for is_right in (hot_rows_are_right, means_are_right):
        assert seeds_that_see(emulated_library, is_right) == 0
