"""Storage types: conversions bit for bit, packing into rows, stochastic rounding, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from row_cases import DIMS, bits
from torch import Tensor

from nestpipe_kernels.ops.gather_rows import gather_rows
from nestpipe_kernels.ops.row_storage import (
    RowStorage,
    embedding_words,
    pack_embeddings,
    put_elements,
    stored_elements,
    unpack_embeddings,
)
from nestpipe_kernels.ops.row_storage.reference import random_words, round_stochastically
from nestpipe_kernels.types import DataType

HALVES = [DataType.FP16, DataType.BF16]
IMPLEMENTATIONS = ["native", "reference"]
LARGEST = {DataType.FP16: 65504.0, DataType.BF16: float(torch.finfo(torch.bfloat16).max)}


def every_half(data_type: DataType) -> Tensor:
    """All 65,536 bit patterns, [256, 256]."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(data_type.torch_dtype).view(256, 256)


def hard_floats(data_type: DataType) -> Tensor:
    """float32: every half, the middles between neighbours, one unit in the last place around both, random bits."""
    halves = every_half(data_type).float().flatten()
    ordered = halves[halves.isfinite()].double().unique()
    middles = ((ordered[1:] + ordered[:-1]) / 2).float()
    past = torch.tensor([65519.996, 65520.0, 65520.004, 65536.0, 3.3961776e38, 3.4028235e38, math.inf, math.nan, 1e-45])
    exact = torch.cat([halves, middles, past, -past])
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (300_000,), generator=generator).to(torch.int32)
    around = torch.cat([exact.view(torch.int32) + step for step in (-1, 0, 1)])
    return torch.cat([around, random]).view(torch.float32)


def packed(values: Tensor, data_type: DataType, *rest: object, implementation: str = "native") -> Tensor:
    """The elements [n, dim] that packing writes."""
    rows = torch.full((values.shape[0], embedding_words(values.shape[1], data_type)), torch.nan)
    pack_embeddings(values, rows, data_type, *rest, implementation=implementation)  # type: ignore[arg-type]
    return stored_elements(rows, values.shape[1], data_type)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("data_type", HALVES)
def test_every_half_widens_as_torch_does_and_comes_back(data_type: DataType) -> None:
    halves = every_half(data_type)
    rows = torch.empty(256, 128)
    put_elements(rows, halves)
    assert same_bits(stored_elements(rows, 256, data_type), halves)
    wide = unpack_embeddings(rows, 256, data_type)
    assert torch.equal(bits(wide), bits(gather_rows(rows, torch.arange(256), 256, data_type=data_type)))
    number = ~halves.isnan()
    assert torch.equal(bits(wide[number]), bits(halves[number].to(torch.float32)))
    assert wide[~number].isnan().all()
    quiet = halves.view(torch.int16) | (0x200 if data_type is DataType.FP16 else 0x40)
    expected = torch.where(number, halves.view(torch.int16), quiet)
    for implementation in IMPLEMENTATIONS:
        back = packed(wide, data_type, implementation=implementation)
        assert torch.equal(back.view(torch.int16), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("data_type", HALVES)
def test_rounding_to_nearest_is_torchs(data_type: DataType, implementation: str) -> None:
    values = hard_floats(data_type)
    ours = packed(values[:, None], data_type, implementation=implementation).flatten()
    number = ~values.isnan()
    assert same_bits(ours[number], values[number].to(data_type.torch_dtype))
    assert ours[~number].isnan().all()
    assert torch.equal(ours[~number].signbit(), values[~number].signbit())


@pytest.mark.parametrize("data_type", HALVES)
def test_nan_bits_agree(data_type: DataType) -> None:
    values = hard_floats(data_type)
    values = values[values.isnan()][:, None]
    assert same_bits(packed(values, data_type), packed(values, data_type, implementation="reference"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("data_type", list(DataType))
@pytest.mark.parametrize("dim", DIMS)
def test_rows_hold_elements_and_zero_in_what_is_over(dim: int, data_type: DataType, implementation: str) -> None:
    words = embedding_words(dim, data_type)
    assert words == math.ceil(dim * data_type.itemsize / 4)
    values = torch.randn(9, dim)
    rows = torch.full((9, words + 3), torch.nan)
    pack_embeddings(values, rows, data_type, implementation=implementation)
    assert rows[:, words:].isnan().all()
    expected = values.to(data_type.torch_dtype)
    assert torch.equal(stored_elements(rows, dim, data_type), expected)
    assert torch.equal(unpack_embeddings(rows, dim, data_type), expected.float())
    if data_type is not DataType.FP32 and dim % 2:
        assert (rows.view(torch.int16)[:, dim] == 0).all()
    again = torch.full_like(rows, torch.nan)
    put_elements(again, expected)
    assert torch.equal(bits(again), bits(rows))
    for chosen in IMPLEMENTATIONS:
        gathered = gather_rows(rows, torch.tensor([3, 3, 0]), dim, data_type=data_type, implementation=chosen)
        assert torch.equal(gathered, expected.float()[[3, 3, 0]])


# --------------------------------------------------------------------------------------------- stochastic rounding


def storage(data_type: DataType, count: int, seed: int = 3) -> RowStorage:
    keys = torch.arange(count) - count // 2
    tables = torch.arange(count, dtype=torch.int32) % 2
    return RowStorage(data_type, keys, tables, torch.tensor([12345, -67890]), torch.tensor([seed, -1]))


@pytest.mark.parametrize("data_type", HALVES)
def test_stochastic_rounding_is_alike_in_native_and_reference(data_type: DataType) -> None:
    values = hard_floats(data_type)
    values = values[: values.numel() // 5 * 5].view(-1, 5)
    given = storage(data_type, len(values))
    native = packed(values, data_type, given, 7)
    assert same_bits(native, packed(values, data_type, given, 7, implementation="reference"))
    assert same_bits(native, packed(values, data_type, given, 7))
    other_step, other_seed = (
        packed(values, data_type, given, 8),
        packed(values, data_type, storage(data_type, len(values), 4), 7),
    )
    assert not same_bits(native, other_step)
    assert not same_bits(native, other_seed)


@pytest.mark.parametrize("data_type", HALVES)
def test_stochastic_rounding_gives_a_neighbour_and_no_new_infinity(data_type: DataType) -> None:
    values = hard_floats(data_type)[:, None]
    values = values[~values[:, 0].isnan()]
    nearest = packed(values, data_type).float()
    halves = every_half(data_type).double().flatten()
    grid = halves[halves.isfinite()].unique()
    for step in range(3):
        found = packed(values, data_type, storage(data_type, len(values)), step)
        assert torch.equal(found.isinf(), nearest.isinf())
        finite = ~found.isinf()
        exact, result = values[finite].double(), found[finite].double()
        below = grid[(torch.searchsorted(grid, exact, right=True) - 1).clamp(min=0)]
        above = grid[torch.searchsorted(grid, exact).clamp(max=len(grid) - 1)]
        assert ((result == below) | (result == above)).all()
        assert torch.equal(found.signbit(), values.signbit())
        exact_already = nearest == values
        assert torch.equal(found[exact_already].float(), values[exact_already])


@pytest.mark.parametrize(
    ("data_type", "value"),
    [
        (DataType.BF16, 1.001),
        (DataType.BF16, -0.33333),
        (DataType.FP16, 1.0003),
        (DataType.FP16, -3.3e-5),  # below 2^-14
        (DataType.FP16, 1.1e-7),
        (DataType.FP16, 2e-8),  # below the smallest element
        (DataType.BF16, LARGEST[DataType.BF16] * 1.001),
        (DataType.FP16, 65510.0),
    ],
)
def test_stochastic_rounding_is_unbiased(data_type: DataType, value: float) -> None:
    exact = torch.full((40_000, 1), value)
    found = packed(exact, data_type, storage(data_type, 40_000), 1).double()
    low, high = float(found.min()), float(found.max())
    if abs(value) > LARGEST[data_type]:  # no room above: the largest number
        assert low == high == LARGEST[data_type]
        return
    share = (float(exact[0, 0]) - low) / (high - low)
    assert 0 < share < 1
    # five standard errors of a share
    deviation = 5 * math.sqrt(share * (1 - share) / 40_000) * (high - low)
    assert abs(float(found.mean()) - float(exact[0, 0])) < deviation


@pytest.mark.parametrize("data_type", HALVES)
def test_words_differ_between_keys_tables_steps_elements(data_type: DataType) -> None:
    given = storage(data_type, 64)
    words = np.concatenate([random_words(given, step, 16).ravel() for step in range(4)])
    assert len(np.unique(words)) == 4 * 64 * 16
    assert np.array_equal(random_words(given, 2, 16)[:, :5], random_words(given, 2, 5))
    high_bits = np.unpackbits((words >> np.uint64(48)).astype(np.uint16).view(np.uint8))
    assert abs(high_bits.mean() - 0.5) < 0.01


def test_smallest_floats_become_zero() -> None:
    tiny = torch.tensor([[2.0**-65, -(2.0**-80), 1e-45, 0.0, -0.0]])
    highest = np.full((1, 5), 2**64 - 1, dtype=np.uint64)
    assert (round_stochastically(tiny, DataType.FP16, highest).float() == 0).all()


# -------------------------------------------------------------------------------------------------------- errors


def test_errors() -> None:
    values, rows = torch.zeros(3, 4), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"rows for 3 embeddings of 4 FP32 elements must have shape \[3, >= 4\]"):
        pack_embeddings(values, rows, DataType.FP32)
    with pytest.raises(TypeError, match="row_storage: values must be a float32 CPU tensor, got float16"):
        pack_embeddings(values.half(), rows, DataType.FP16)
    with pytest.raises(ValueError, match="row_storage: unknown implementation 'gpu'"):
        pack_embeddings(values, rows, DataType.FP16, implementation="gpu")
    good = storage(DataType.FP16, 3)
    pack_embeddings(values, rows, DataType.FP16, good)
    cases = [
        (RowStorage(DataType.FP32, good.keys), ValueError, "FP32 is what the arithmetic is done in"),
        (RowStorage(DataType.FP16, good.keys), ValueError, "needs keys, tables, table_hashes and table_seeds"),
        (storage(DataType.FP16, 4), ValueError, "keys must have 3 entries, got 4"),
    ]
    assert good.keys is not None
    assert good.tables is not None
    parts = (good.table_hashes, good.table_seeds)
    wide = RowStorage(DataType.FP16, good.keys, good.tables.long(), *parts)
    cases.append((wide, ValueError, r"tables must be contiguous int32 \[3\], got int64"))
    outside = RowStorage(DataType.FP16, good.keys, good.tables + 1, *parts)
    cases.append((outside, IndexError, r"tables must lie in \[0, 2\)"))
    for given, error, message in cases:
        with pytest.raises(error, match=message):
            pack_embeddings(values, rows, DataType.FP16, given)
    with pytest.raises(ValueError, match=r"gather_rows: dim must lie in \[0, 4\] \(the row's length\), got 5"):
        gather_rows(rows, torch.tensor([0]), 5, data_type=DataType.BF16)
