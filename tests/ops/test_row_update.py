"""row_update: native and reference give the same bits; equal to torch.optim within float32's own error; errors."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from row_cases import DIMS, bits, native_threads
from torch import Tensor

from nestpipe_kernels import optim
from nestpipe_kernels.ops.lookup_pool import pool_backward
from nestpipe_kernels.ops.row_storage import RowStorage, embedding_words, pack_embeddings, unpack_embeddings
from nestpipe_kernels.ops.row_update import reference, row_update
from nestpipe_kernels.types import DataType, PoolingType, SparseOptimizer

OPTIMIZERS: list[SparseOptimizer] = [
    optim.SGD(),
    optim.SGD(weight_decay=0.1),
    optim.SGD(momentum=0.9),
    optim.SGD(momentum=0.9, dampening=0.3, weight_decay=0.1),
    optim.SGD(momentum=0.8, nesterov=True, weight_decay=0.1),
    optim.Adagrad(),
    optim.Adagrad(eps=1e-3, initial_accumulator_value=0.1, weight_decay=0.1),
    optim.RowWiseAdagrad(),
    optim.RowWiseAdagrad(weight_decay=0.1),
    optim.Adam(),
    optim.Adam(betas=(0.8, 0.95), bias_correction="row"),
    optim.Adam(weight_decay=0.1),
    optim.AdamW(),
    optim.AdamW(betas=(0.8, 0.95), weight_decay=0.0, bias_correction="row"),
    optim.RowWiseAdam(),
    optim.RowWiseAdam(weight_decay=0.1, bias_correction="row"),
    optim.FTRL(),
    optim.FTRL(beta=0.0, l1=0.5, l2=0.25, weight_decay=0.1),
    optim.LAMB(),
    optim.LAMB(weight_decay=0.1, bias_correction="row"),
]
IMPLEMENTATIONS = ["native", "reference"]


def buffer(optimizer: SparseOptimizer, num_rows: int, dim: int, seed: int = 0) -> Tensor:
    """Random rows with state >= 0, some counts, and a recognizable padding."""
    generator = torch.Generator().manual_seed(seed)
    header = dim + optimizer.state_floats(dim)
    rows = torch.full((num_rows, header + 4), 123.0)
    rows[:, :dim] = torch.randn(num_rows, dim, generator=generator)
    rows[:, dim:header] = torch.rand(num_rows, header - dim, generator=generator)
    rows[:, header] = torch.randint(0, 50, (num_rows,), generator=generator, dtype=torch.int32).view(torch.float32)
    return rows


def counts(rows: Tensor, optimizer: SparseOptimizer, dim: int) -> Tensor:
    return rows[:, dim + optimizer.state_floats(dim)].contiguous().view(torch.int32)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dim", DIMS)
def test_native_equals_reference(optimizer: SparseOptimizer, dim: int) -> None:
    num_rows = 63
    grads = torch.randn(num_rows, dim + 2)[:, :dim]
    grads[5] = 0.0
    lr = torch.rand(num_rows)
    mask = torch.rand(num_rows) < 0.8
    results = []
    for implementation in IMPLEMENTATIONS:
        rows = buffer(optimizer, num_rows, dim)
        row_update(rows, grads, optimizer, 1, 0.05, implementation=implementation)
        row_update(rows, grads, optimizer, 7, lr, mask, implementation=implementation)
        row_update(rows, grads, optimizer, 123_456, lr, mask.to(torch.uint8), implementation=implementation)
        results.append(rows)
    assert torch.equal(bits(results[0]), bits(results[1]))
    before = counts(buffer(optimizer, num_rows, dim), optimizer, dim)
    assert torch.equal(counts(results[0], optimizer, dim), before + 1 + 2 * mask.int())
    assert (results[0][:, -3:] == 123.0).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_threads_do_not_change_bits(optimizer: SparseOptimizer) -> None:
    grads = torch.randn(4000, 33)
    results = []
    for threads in (1, 2, 4):
        rows = buffer(optimizer, 4000, 33)
        with native_threads(threads):
            row_update(rows, grads, optimizer, 3, 0.1)
        results.append(bits(rows))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_masked_rows_keep_every_bit(optimizer: SparseOptimizer, implementation: str) -> None:
    rows = buffer(optimizer, 9, 5)
    before = rows.clone()
    grads = torch.full((9, 5), torch.nan)
    row_update(rows, grads, optimizer, 1, 0.1, torch.zeros(9, dtype=torch.bool), implementation=implementation)
    assert torch.equal(bits(rows), bits(before))


def test_scalar_and_per_row_learning_rates_agree() -> None:
    for optimizer in OPTIMIZERS:
        one, many = buffer(optimizer, 9, 5), buffer(optimizer, 9, 5)
        grads = torch.randn(9, 5)
        row_update(one, grads, optimizer, 4, 0.1)
        row_update(many, grads, optimizer, 4, torch.full((9,), 0.1))
        assert torch.equal(bits(one), bits(many))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_count_of_updates_stops_at_the_largest_integer(implementation: str) -> None:
    optimizer = optim.SGD()
    rows = buffer(optimizer, 2, 3)
    rows[:, 3] = torch.tensor([2**31 - 1, 2**31 - 2], dtype=torch.int32).view(torch.float32)
    row_update(rows, torch.zeros(2, 3), optimizer, 1, 0.1, implementation=implementation)
    assert counts(rows, optimizer, 3).tolist() == [2**31 - 1, 2**31 - 1]


def test_bias_factor_and_powers_match_the_formula() -> None:
    for step in (1, 2, 3, 10, 1000, 10**6, 10**12):
        one, root = 1 - 0.9**step, math.sqrt(1 - 0.999**step)
        expected = pytest.approx((1 / one, 1 / root, root / one), rel=1e-12)
        assert reference.bias_factors(0.9, 0.999, step) == expected
    assert reference.integer_power(0.5, 0) == 1.0
    assert reference.integer_power(0.5, 5) == 0.5**5


def test_roots_are_correctly_rounded() -> None:
    """numpy's root is the machine's instruction; one square root per element through both implementations."""
    sums = torch.rand(1000, 64) * 10
    expected = -1.0 / (np.sqrt((sums + 1.0).numpy()) + np.float32(1.0))
    for implementation in IMPLEMENTATIONS:
        rows = torch.cat([torch.zeros(1000, 64), sums, torch.zeros(1000, 1)], dim=1)
        row_update(rows, torch.ones(1000, 64), optim.Adagrad(eps=1.0), 1, 1.0, implementation=implementation)
        assert np.array_equal(rows[:, :64].numpy(), expected)


# ------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dim", [1, 8])
def test_fault_20_no_rows_is_no_op(optimizer: SparseOptimizer, dim: int, implementation: str) -> None:
    rows = buffer(optimizer, 0, dim)
    row_update(rows, torch.empty(0, dim), optimizer, 1, 0.1, implementation=implementation)
    assert rows.shape[0] == 0


def test_fault_8_padding_moves_no_row_after_adam() -> None:
    """800 paddings and one key: only the key's row moves, over several steps with momentum."""
    optimizer = optim.Adam(lr=0.1)
    slots = torch.full((801,), -1)
    slots[400] = 1
    rows = buffer(optimizer, 3, 4)
    before = rows.clone()
    for step in range(1, 6):
        grads = torch.zeros(3, 4)
        bags = (slots, torch.arange(802), [0, 801], [PoolingType.NONE.code])
        pool_backward([torch.ones(801, 4)], None, *bags, None, grads)
        assert torch.equal(grads, torch.tensor([[0.0], [1.0], [0.0]]).expand(3, 4))
        row_update(rows, grads, optimizer, step, 0.1, torch.tensor([False, True, False]))
    assert torch.equal(bits(rows[[0, 2]]), bits(before[[0, 2]]))
    assert (rows[1, :4] != before[1, :4]).all()


def test_fault_21_lazy_rule_and_step_alone_decide_bias_correction() -> None:
    """Untouched rows stay, moments included; with step 1 again, a fresh row moves as at the first step."""
    optimizer = optim.Adam()
    grads = torch.ones(2, 4)
    rows = torch.zeros(2, 4 + 8 + 1)
    row_update(rows, grads, optimizer, 1, 0.1, torch.tensor([True, False]))
    first = rows[0].clone()
    for step in range(2, 6):
        row_update(rows, grads, optimizer, step, 0.1, torch.tensor([False, True]))
    assert torch.equal(bits(rows[0]), bits(first))
    again = torch.zeros(1, 13)
    row_update(again, grads[:1], optimizer, 1, 0.1)
    assert torch.equal(bits(again[0]), bits(first))
    assert first[:4] == pytest.approx(torch.full((4,), -0.1), rel=1e-5)


def test_fault_21_bias_correction_by_row_counts_own_updates() -> None:
    optimizer = optim.Adam(bias_correction="row")
    early, late = torch.zeros(1, 13), torch.zeros(1, 13)
    for step in (1, 2):
        row_update(early, torch.ones(1, 4), optimizer, step, 0.1)
        row_update(late, torch.ones(1, 4), optimizer, step + 1000, 0.1)
    assert torch.equal(bits(early), bits(late))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_zero_gradient_of_a_new_row_is_finite(optimizer: SparseOptimizer) -> None:
    rows = torch.zeros(1, 4 + optimizer.state_floats(4) + 1)
    row_update(rows, torch.zeros(1, 4), optimizer, 1, 0.1)
    assert torch.equal(rows[:, :4], torch.zeros(1, 4))


# ------------------------------------------------------------------------------------------------- storage types


def stored(optimizer: SparseOptimizer, dim: int, data_type: DataType, num_rows: int = 63) -> Tensor:
    """The rows of `buffer` with their embeddings in a storage type."""
    rows = buffer(optimizer, num_rows, dim)
    words = torch.zeros(num_rows, embedding_words(dim, data_type))
    pack_embeddings(rows[:, :dim].contiguous(), words, data_type)
    return torch.cat([words.view(torch.int32), rows[:, dim:].contiguous().view(torch.int32)], 1).view(torch.float32)


def random_storage(data_type: DataType, num_rows: int = 63) -> RowStorage:
    tables = torch.arange(num_rows, dtype=torch.int32) % 3
    return RowStorage(data_type, torch.arange(num_rows) - 5, tables, torch.tensor([3, 4, -5]), torch.tensor([6, -7, 8]))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("dim", [1, 7, 64, 129])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_storage_types_widen_update_and_round_once(
    optimizer: SparseOptimizer, dim: int, data_type: DataType, stochastic: bool
) -> None:
    grads, mask = torch.randn(63, dim), torch.rand(63) < 0.8
    storage = random_storage(data_type) if stochastic else RowStorage(data_type)
    start = stored(optimizer, dim, data_type)
    results = []
    for implementation in IMPLEMENTATIONS:
        rows = start.clone()
        row_update(rows, grads, optimizer, 7, 0.05, mask, storage, implementation=implementation)
        results.append(rows)
    assert torch.equal(bits(results[0]), bits(results[1]))
    # the same rule on float32 rows, rounded afterwards
    words = embedding_words(dim, data_type)
    wide = torch.cat([unpack_embeddings(start, dim, data_type), start[:, words:]], 1)
    row_update(wide, grads, optimizer, 7, 0.05, mask)
    expected = start.clone()
    pack_embeddings(wide[:, :dim], expected, data_type, storage, 7)
    unmasked = torch.where(mask[:, None], bits(expected)[:, :words], bits(start)[:, :words])
    assert torch.equal(bits(results[0])[:, :words], unmasked)
    assert torch.equal(bits(results[0][:, words:]), bits(wide[:, dim:]))


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_stochastic_rounding_does_not_depend_on_threads_or_company(data_type: DataType) -> None:
    optimizer, storage = optim.RowWiseAdagrad(), random_storage(data_type, 4000)
    grads, start = torch.randn(4000, 33), stored(optim.RowWiseAdagrad(), 33, data_type, 4000)
    results = []
    for threads in (1, 4):
        rows = start.clone()
        with native_threads(threads):
            row_update(rows, grads, optimizer, 3, 0.1, None, storage)
        results.append(bits(rows))
    assert torch.equal(*results)
    chosen = torch.randperm(4000)[:100]
    assert storage.keys is not None
    assert storage.tables is not None
    some = RowStorage(
        data_type, storage.keys[chosen], storage.tables[chosen], storage.table_hashes, storage.table_seeds
    )
    rows = start[chosen].contiguous()
    row_update(rows, grads[chosen], optimizer, 3, 0.1, None, some)
    assert torch.equal(bits(rows), results[0][chosen])


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_small_updates_add_up_with_stochastic_rounding_only(data_type: DataType) -> None:
    """500 steps of -1e-5 from 1.0: far below half the distance between neighbours; 2,000 rows give the mean."""
    num_rows, steps, change = 2000, 500, 1e-5
    means = []
    for storage in (RowStorage(data_type), random_storage(data_type, num_rows)):
        rows = torch.zeros(num_rows, 2)
        pack_embeddings(torch.ones(num_rows, 2), rows, data_type)
        for step in range(1, steps + 1):
            row_update(rows, torch.ones(num_rows, 2), optim.SGD(), step, change, None, storage)
        means.append(float(unpack_embeddings(rows, 2, data_type).mean()))
    assert means[0] == 1.0
    # The mean moves by 0.005; a row's deviation is at most sqrt(500 * 1e-5 * 2^-8), 4,000 of them: 7e-5.
    assert abs(means[1] - (1.0 - steps * change)) < 4e-4


def test_fault_23_gradients_of_half_rows_are_summed_in_float32() -> None:
    """Three gradients of 2^-9 beside 1: summed in bfloat16 they would vanish."""
    grads = torch.zeros(1, 1)
    parts = torch.tensor([[1.0], [2.0**-9], [2.0**-9], [2.0**-9]])
    pool_backward([parts], None, torch.zeros(4).long(), torch.arange(5), [0, 4], [PoolingType.NONE.code], None, grads)
    assert float(grads) == 1.0 + 3 * 2.0**-9
    rows = torch.zeros(1, 2)
    row_update(rows, grads, optim.SGD(), 1, 256.0, None, RowStorage(DataType.BF16))
    assert float(unpack_embeddings(rows, 1, DataType.BF16)) == -(256.0 + 2.0)


# ------------------------------------------------------------------------------------------------------- errors


def test_errors() -> None:
    optimizer = optim.Adagrad()
    rows, grads = torch.zeros(3, 9), torch.zeros(3, 4)

    def call(*, rows: Tensor = rows, grads: Tensor = grads, step: object = 1, **rest: object) -> None:
        row_update(rows, grads, optimizer, step, rest.pop("lr", 0.1), **rest)  # type: ignore[arg-type]

    call()
    with pytest.raises(
        ValueError, match="row_update: unknown implementation 'gpu': choose native, triton or reference"
    ):
        call(implementation="gpu")
    with pytest.raises(TypeError, match="rows must be a float32 CPU tensor, got float64"):
        call(rows=rows.double())
    with pytest.raises(ValueError, match="rows and grads must have as many rows, got 2 and 3"):
        call(rows=rows[:2])
    with pytest.raises(ValueError, match="rows must be contiguous, got strides"):
        call(rows=torch.zeros(3, 12)[:, :9])
    with pytest.raises(ValueError, match="rows of adagrad with dim 4 need at least 9 floats, got 8"):
        call(rows=torch.zeros(3, 8))
    with pytest.raises(ValueError, match="rows of adagrad with dim 4 need at least 7 floats, got 6"):
        call(rows=torch.zeros(3, 6), storage=RowStorage(DataType.BF16))
    with pytest.raises(ValueError, match="row_update: FP32 is what the arithmetic is done in"):
        call(storage=RowStorage(DataType.FP32, torch.arange(3)))
    with pytest.raises(ValueError, match=r"grads must have at least one column, got shape \[3, 0\]"):
        call(grads=torch.zeros(3, 0))
    for step in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match=r"step must be an integer >= 1 \(1 for the first update\), got"):
            call(step=step)
    for rate in (math.nan, 1e39):
        with pytest.raises(ValueError, match=re.escape(f"lr must be finite in float32, got {rate}")):
            call(lr=rate)
    with pytest.raises(TypeError, match="lr must be a float or a float32 CPU tensor, got float64"):
        call(lr=torch.ones(3).double())
    with pytest.raises(ValueError, match=r"lr must have one entry per row \(3\), got shape \[2\]"):
        call(lr=torch.ones(2))
    with pytest.raises(TypeError, match="mask must be a bool or uint8 CPU tensor, got int64"):
        call(mask=torch.ones(3).long())
    with pytest.raises(ValueError, match=r"mask must have one entry per row \(3\), got shape \[4\]"):
        call(mask=torch.ones(4).bool())

    class Unknown(optim.SGD):
        @property
        def name(self) -> str:
            return "lion"

    with pytest.raises(
        ValueError, match=r"no rule for optimizer 'lion': choose one of sgd, adagrad, row_wise_adagrad, adam, .*, lamb"
    ):
        row_update(rows, grads, Unknown(), 1, 0.1)
