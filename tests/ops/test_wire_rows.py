"""Rows as they travel: bytes of both implementations, values, hard numbers, errors."""

from __future__ import annotations

import math

import pytest
import torch
from row_cases import bits
from torch import Tensor

from nestpipe_kernels.ops.wire_rows import decode_rows, encode_rows, wire_dtype, wire_width
from nestpipe_kernels.ops.wire_rows.reference import round_rows

SHORT = ["bf16", "fp16", "int8"]
IMPLEMENTATIONS = ["native", "reference"]
SMALLEST_STEP = 2.0**-126
HARD = [
    0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-126, 2.0**-127, 1.5e-36, 6e-8, 2.9802322e-08, 2.98023e-08, 6.1e-5, 1.0, -1.0,
    1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 126.5, 127.0, 65504.0, 65519.996, 65520.0, -65520.0, 3.4e38,
    3.39e38, -3.4028235e38, math.inf, -math.inf, math.nan,
]  # fmt: skip


def arrived(rows: Tensor, wire: str, implementation: str = "native") -> Tensor:
    message = encode_rows(rows, wire, implementation=implementation)
    assert message.dtype == wire_dtype(wire) and message.shape == (len(rows), wire_width(rows.shape[1], wire))
    return decode_rows(message, rows.shape[1], wire, implementation=implementation)


def random_rows(size: int, dim: int) -> Tensor:
    """Magnitudes from denormal to huge, zeros, equal rows, NaN and infinities in some."""
    generator = torch.Generator().manual_seed(size * 1000 + dim)
    scale = torch.randint(-149, 127, (size, 1), generator=generator)
    rows = torch.ldexp(torch.randn(size, dim, generator=generator), scale)
    rows[::7] = 0.0
    rows[1::50, -1], rows[2::50, 0], rows[3::50, dim // 2] = math.nan, math.inf, -math.inf
    return rows


@pytest.mark.parametrize("wire", SHORT)
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 16, 63, 64, 65, 127, 130])
def test_native_bytes_are_the_references(wire: str, dim: int) -> None:
    strided = torch.full((700, dim + 3), 7.0)
    strided[:, :dim] = random_rows(700, dim)
    rows = strided[:, :dim]
    native, expected = (encode_rows(rows, wire, implementation=i) for i in IMPLEMENTATIONS)
    assert torch.equal(native, expected)
    back, wanted = (decode_rows(expected, dim, wire, implementation=i) for i in IMPLEMENTATIONS)
    assert torch.equal(bits(back), bits(wanted))
    assert torch.equal(bits(back), bits(round_rows(rows, wire)))


@pytest.mark.parametrize("wire", SHORT)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_pair_of_hard_numbers(wire: str, implementation: str) -> None:
    values = torch.tensor(HARD)
    pairs = torch.cartesian_prod(values, values)
    assert torch.equal(encode_rows(pairs, wire, implementation=implementation), encode_rows(pairs, wire))
    got = arrived(pairs, wire, implementation)
    assert torch.equal(bits(got), bits(arrived(pairs, wire)))
    lost = ~pairs.isfinite()
    if wire == "int8":
        lost = lost.any(1, keepdim=True).expand_as(pairs)
        assert got[lost].isnan().all()
    else:
        assert torch.equal(got[lost].isnan(), pairs[lost].isnan())
        infinite = pairs.isinf()
        assert torch.equal(got[infinite], pairs[infinite])
    assert got[~lost & (pairs.abs() < 65520)].isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("wire, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_halves_round_as_torch_does(wire: str, dtype: torch.dtype, implementation: str) -> None:
    rows = torch.cat([random_rows(500, 9), torch.tensor(HARD).view(-1, 1).expand(-1, 9)])
    expected = rows.to(dtype).to(torch.float32)
    torch.testing.assert_close(arrived(rows, wire, implementation), expected, rtol=0, atol=0, equal_nan=True)
    message = encode_rows(rows[rows.isfinite().all(1)], wire, implementation=implementation)
    assert torch.equal(message.view(dtype), rows[rows.isfinite().all(1)].to(dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_int8_counts_steps_to_nearest_ties_to_even(implementation: str) -> None:
    rows = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, 126.5, -127.0]])
    message = encode_rows(rows, "int8", implementation=implementation)
    assert message[0, :4].clone().view(torch.float32).item() == 1.0
    assert message[0, 4:].view(torch.int8).tolist() == [127, 0, 2, 2, 0, -2, -2, 0, 126, -127]
    assert arrived(rows, "int8", implementation).tolist() == [[127, 0, 2, 2, 0, -2, -2, 0, 126, -127]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_int8_stays_within_half_a_step(implementation: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scale = torch.randint(-120, 120, (400, 1), generator=generator)
    rows = torch.ldexp(torch.randn(400, 33, generator=generator), scale)
    step = rows.double().abs().amax(1, keepdim=True) / 127
    distance = (arrived(rows, "int8", implementation).double() - rows.double()).abs()
    assert (distance <= step * (0.5 + 1e-4)).all()
    assert (distance > step * 0.45).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_int8_of_zero_and_of_tiny_rows(implementation: str) -> None:
    rows = torch.tensor([[0.0, -0.0], [1e-45, 1e-40], [SMALLEST_STEP, SMALLEST_STEP / 2], [3 * SMALLEST_STEP, 0.0]])
    got = arrived(rows, "int8", implementation)
    assert torch.equal(bits(got[:2]), torch.zeros(2, 2, dtype=torch.int32))
    assert got[2:].tolist() == [[SMALLEST_STEP, 0.0], [3 * SMALLEST_STEP, 0.0]]
    silent = torch.zeros(1, 6, dtype=torch.uint8)
    silent[0, 4:] = torch.tensor([5, 251], dtype=torch.uint8)
    assert decode_rows(silent, 2, "int8", implementation=implementation).abs().tolist() == [[0.0, 0.0]]


def test_int8_keeps_other_rows_beside_one_with_nan() -> None:
    rows = torch.tensor([[1.0, 127.0], [math.nan, 5.0], [-127.0, 3.0], [math.inf, 5.0]])
    got = arrived(rows, "int8")
    assert torch.equal(got[[0, 2]], rows[[0, 2]])
    assert got[[1, 3]].isnan().all()


@pytest.mark.parametrize("wire", ["fp32", *SHORT])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows_and_dim_1(wire: str, implementation: str) -> None:
    assert arrived(torch.empty(0, 5), wire, implementation).shape == (0, 5)
    assert arrived(torch.tensor([[2.0], [-3.0]]), wire, implementation).tolist() == [[2.0], [-3.0]]


def test_fp32_is_the_rows_themselves() -> None:
    rows = random_rows(20, 5)
    assert encode_rows(rows, "fp32") is rows
    assert decode_rows(rows, 5, "fp32") is rows


def test_sizes() -> None:
    assert [wire_width(7, wire) for wire in ("fp32", "bf16", "fp16", "int8")] == [7, 14, 14, 11]
    assert [wire_dtype(wire).itemsize for wire in ("fp32", "bf16", "fp16", "int8")] == [4, 1, 1, 1]


def test_a_message_that_starts_at_any_byte() -> None:
    rows = random_rows(9, 5)
    for wire in SHORT:
        message = encode_rows(rows, wire)
        shifted = torch.empty(message.numel() + 1, dtype=torch.uint8)
        shifted[1:] = message.flatten()
        got = decode_rows(shifted[1:].view(9, -1), 5, wire)
        assert torch.equal(bits(got), bits(decode_rows(message, 5, wire)))


def test_errors() -> None:
    rows = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="wire_rows: unknown format 'fp8': choose one of fp32, bf16, fp16, int8"):
        encode_rows(rows, "fp8")
    with pytest.raises(ValueError, match="wire_rows: unknown implementation 'fast'"):
        encode_rows(rows, "bf16", implementation="fast")
    with pytest.raises(TypeError, match="wire_rows: rows must be a float32 CPU tensor, got float64"):
        encode_rows(rows.double(), "bf16")
    with pytest.raises(TypeError, match="wire_rows: message must be a uint8 CPU tensor, got float32"):
        decode_rows(rows, 3, "int8")
    with pytest.raises(ValueError, match="wire_rows: int8 rows of 3 elements take 7 message elements each, got 6"):
        decode_rows(torch.zeros(2, 6, dtype=torch.uint8), 3, "int8")
    with pytest.raises(ValueError, match="wire_rows: message must be contiguous, got strides"):
        decode_rows(torch.zeros(2, 9, dtype=torch.uint8)[:, :7], 3, "int8")
