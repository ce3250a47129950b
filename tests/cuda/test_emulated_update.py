"""Row updates on the emulator: every rule, storage type and rounding has the reference's bits."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulated_cuda import EmulatedCuda, planted, seeds_that_see
from nestpipe_kernels import optim
from nestpipe_kernels.ops.row_storage import RowStorage, embedding_words, pack_embeddings, unpack_embeddings
from nestpipe_kernels.ops.row_update import cuda as update_cuda
from nestpipe_kernels.ops.row_update import reference
from nestpipe_kernels.types import DataType, SparseOptimizer

OPTIMIZERS: list[SparseOptimizer] = [
    optim.SGD(weight_decay=0.1),
    optim.SGD(momentum=0.9, dampening=0.3),
    optim.SGD(momentum=0.8, nesterov=True, weight_decay=0.1),
    optim.Adagrad(eps=1e-3, weight_decay=0.1),
    optim.RowWiseAdagrad(weight_decay=0.1),
    optim.Adam(betas=(0.8, 0.95), bias_correction="row", weight_decay=0.1),
    optim.AdamW(weight_decay=0.1),
    optim.RowWiseAdam(weight_decay=0.1, bias_correction="row"),
    optim.FTRL(l1=0.5, l2=0.25, weight_decay=0.1),
    optim.LAMB(weight_decay=0.1, bias_correction="row"),
]
MORE = [optim.SGD(), optim.Adagrad(), optim.RowWiseAdagrad(), optim.Adam(), optim.AdamW(bias_correction="row")]
MORE += [optim.RowWiseAdam(), optim.FTRL(beta=0.0, l2=0.5), optim.LAMB()]
ALL = [*OPTIMIZERS, *(pytest.param(optimizer, marks=pytest.mark.soak) for optimizer in MORE)]
OF_HALVES = [OPTIMIZERS[1], OPTIMIZERS[4], OPTIMIZERS[5], OPTIMIZERS[8]]
LARGEST = 2**31 - 1
ROWS = 21


def buffer(optimizer: SparseOptimizer, dim: int, row_floats: int, data_type: DataType) -> Tensor:
    """Random rows with state >= 0, some counts, the least and the largest among them, and padding of NaNs."""
    generator = torch.Generator().manual_seed(dim)
    words = embedding_words(dim, data_type)
    header = words + optimizer.state_floats(dim)
    rows = torch.full((ROWS, max(row_floats, header + 1)), torch.nan)
    pack_embeddings(torch.randn(ROWS, dim, generator=generator), rows, data_type)
    rows[:, words:header] = torch.rand(ROWS, header - words, generator=generator)
    counts = torch.randint(0, 50, (ROWS,), generator=generator, dtype=torch.int32)
    counts[:4] = torch.tensor([0, LARGEST, LARGEST - 1, 0])
    rows[:, header] = counts.view(torch.float32)
    return rows


def storage_of(data_type: DataType, at_random: bool) -> RowStorage:
    if not at_random:
        return RowStorage(data_type)
    generator = torch.Generator().manual_seed(9)
    keys, hashes, seeds = torch.randint(-(2**63), 2**63 - 1, (3, ROWS), generator=generator)
    tables = torch.randint(0, 3, (ROWS,), generator=generator).int()
    return RowStorage(data_type, keys, tables, hashes[:3].clone(), seeds[:3].clone())


def assert_same(
    optimizer: SparseOptimizer,
    size: tuple[int, int],
    storage: RowStorage,
    grads: Tensor | None = None,
    device: str = "cpu",
    shift: int = 0,
) -> None:
    """Three updates on a device: at one rate; with a rate and a mask for each row; late in a training. `shift`: floats
    from a boundary of 16 bytes to the first row."""
    dim = size[0]
    generator = torch.Generator().manual_seed(dim + 1)
    if grads is None:
        grads = torch.randn(ROWS, dim + dim % 4, generator=generator)[:, :dim]
        grads[5] = 0.0
    lr, mask = torch.rand(ROWS, generator=generator), torch.rand(ROWS, generator=generator) < 0.8
    lr[:3] = torch.tensor([0.0, 2.0**-101, 2.0**-100])
    rows = buffer(optimizer, *size, storage.data_type)
    expected, there = rows.clone(), torch.empty(rows.numel() + shift, device=device)[shift:].view(rows.shape)
    there.copy_(rows)
    for step, rate, chosen in ((1, 0.05, None), (7, lr, mask), (123_456, lr, mask.to(torch.uint8))):
        update_cuda.row_update(there, grads.to(device), optimizer, step, rate, chosen, storage)
        reference.row_update(expected, grads, optimizer, step, rate, chosen, storage)
    for found, wanted in zip(settled(there.cpu(), dim, optimizer, storage), settled(expected, dim, optimizer, storage)):
        assert torch.equal(found, wanted)


def settled(rows: Tensor, dim: int, optimizer: SparseOptimizer, storage: RowStorage) -> tuple[Tensor, Tensor]:
    """Bits of embeddings and states, all NaNs alike (which one comes out depends on the machine); of what follows."""
    words = embedding_words(dim, storage.data_type)
    header = words + optimizer.state_floats(dim)
    numbers = torch.cat([unpack_embeddings(rows, dim, storage.data_type), rows[:, words:header]], dim=1)
    return bits(torch.where(numbers.isnan(), torch.tensor(7.0), numbers)), bits(rows[:, header:])


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


@pytest.mark.parametrize("optimizer", ALL, ids=repr)
@pytest.mark.parametrize("size", [(7, 20), (37, 120), (64, 200)])
def test_emulated_cuda_update(cuda: EmulatedCuda, optimizer: SparseOptimizer, size: tuple[int, int]) -> None:
    assert_same(optimizer, size, RowStorage())


@pytest.mark.parametrize("at_random", [False, True])
@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("optimizer", OF_HALVES, ids=repr)
def test_emulated_cuda_update_of_halves(
    cuda: EmulatedCuda, optimizer: SparseOptimizer, data_type: DataType, at_random: bool
) -> None:
    for size in ((1, 5), (7, 20), (12, 40), (16, 64), (37, 120)):
        assert_same(optimizer, size, storage_of(data_type, at_random))


@pytest.mark.parametrize("optimizer", [optim.RowWiseAdagrad(), optim.LAMB()], ids=repr)
@pytest.mark.parametrize("size", [(1, 8), (2, 8), (4, 16), (20, 64), (1281, 4000), (2048, 6148)])
def test_emulated_cuda_update_sums_in_the_written_order(
    cuda: EmulatedCuda, optimizer: SparseOptimizer, size: tuple[int, int]
) -> None:
    assert_same(optimizer, size, RowStorage())


@pytest.mark.parametrize("optimizer", OF_HALVES, ids=repr)
def test_emulated_cuda_update_by_what_is_not_finite(cuda: EmulatedCuda, optimizer: SparseOptimizer) -> None:
    generator = torch.Generator().manual_seed(4)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42, -3e38, 65520.0, 2.0**-25])
    for dim in (7, 16):
        grads = special[torch.randint(0, len(special), (ROWS, dim), generator=generator)]
        for storage in (RowStorage(), storage_of(DataType.FP16, True), storage_of(DataType.BF16, False)):
            assert_same(optimizer, (dim, 52), storage, grads)


def test_emulated_cuda_update_of_rows_beside_a_boundary(cuda: EmulatedCuda) -> None:
    for shift in (1, 2):
        assert_same(optim.Adam(), (64, 200), RowStorage(), shift=shift)
        assert_same(optim.RowWiseAdagrad(), (16, 64), storage_of(DataType.BF16, True), shift=shift)
    grads = torch.randn(ROWS * 64 + 1)[1:].view(ROWS, 64)
    assert_same(optim.Adagrad(), (64, 200), RowStorage(), grads)


def test_emulated_cuda_update_of_nothing(cuda: EmulatedCuda) -> None:
    rows, one = torch.empty(0, 9), torch.ones(1, 4)
    update_cuda.row_update(rows, torch.empty(0, 4), optim.Adagrad(), 1, 0.1, None, RowStorage())
    masked = torch.tensor([[1.0, 2.0, 3.0, 4.0, torch.nan]])
    update_cuda.row_update(masked, one, optim.SGD(), 1, 0.1, torch.tensor([False]), RowStorage())
    assert masked[0, :4].tolist() == [1.0, 2.0, 3.0, 4.0]


def far_rows_are_right(cuda: EmulatedCuda) -> bool:
    """Rows of 3 GiB of address space, hardly any of it touched: the last one begins beyond 2^31 floats."""
    memory = mmap.mmap(-1, 12 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    rows = torch.frombuffer(memory, dtype=torch.float32).view(4, -1)
    with cuda.used_for():
        update_cuda.row_update(rows, torch.ones(4, 8), optim.Adagrad(eps=1.0), 1, 0.5, None, RowStorage())
    return rows[:, [0, 7, 8, 15]].tolist() == [[-0.25, -0.25, 1.0, 1.0]] * 4 and bits(rows[:, 16]).tolist() == [1] * 4


def test_emulated_cuda_update_of_rows_that_are_far_apart(cuda: EmulatedCuda) -> None:
    assert far_rows_are_right(cuda)


# ----------------------------------------------------------------------------------------------------- planted bugs


def momentum_is_right(cuda: EmulatedCuda) -> bool:
    with cuda.used_for():
        assert_same(optim.SGD(momentum=0.9, dampening=0.3), (37, 80), RowStorage())
    return True


def sums_are_right(cuda: EmulatedCuda) -> bool:
    with cuda.used_for():
        for size in ((37, 80), (64, 140)):
            assert_same(optim.RowWiseAdagrad(), size, RowStorage())
    return True


def rounding_is_right(cuda: EmulatedCuda) -> bool:
    with cuda.used_for():
        assert_same(optim.SGD(), (16, 12), storage_of(DataType.BF16, True))
    return True


UPDATE = "optim/row_update.cu"
BUGS = {
    "a count that is written before all lanes have read it": (
        UPDATE, {"  __syncwarp(row.lanes);\n": ""}, momentum_is_right
    ),
    "words of the unit instead of the element": (
        UPDATE, {"narrow(p[k], 4 * unit + k)": "narrow(p[k], unit + k)"}, rounding_is_right
    ),
    "an index of 32 bits": (
        UPDATE,
        {"a.rows + u * a.row_floats;": "a.rows + static_cast<int>(u * a.row_floats);"},
        far_rows_are_right,
    ),
    "accumulators added in another order": (
        "cuda/row_units.cuh",
        {"half = kLanesOfSum<kWidth> / 2; half > 0; half /= 2": "half = 1; half < kLanesOfSum<kWidth>; half *= 2"},
        sums_are_right,
    ),
}  # fmt: skip


LATER = {"an index of 32 bits", "words of the unit instead of the element", "accumulators added in another order"}


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.soak] * (bug in LATER)) for bug in BUGS])
def test_emulated_cuda_update_sees(emulated_objects: list[Path], tmp_path: Path, bug: str) -> None:
    source, changes, is_right = BUGS[bug]
    user = UPDATE if source != UPDATE else ""
    assert seeds_that_see(planted(emulated_objects, source, changes, tmp_path, user), is_right) >= 2


@pytest.mark.soak
def test_emulated_cuda_update_sees_nothing_where_nothing_is_planted(emulated_library: Path) -> None:
    for is_right in (momentum_is_right, sums_are_right, rounding_is_right):
        assert seeds_that_see(emulated_library, is_right) == 0
