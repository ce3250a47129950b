"""Bucketize: values against a stable sort, thread counts, messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe_kernels._native import core
from nestpipe_kernels.ops.bucketize import bucketize


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("size", [0, 1, 63, 1000, 100_000])
@pytest.mark.parametrize("num_buckets", [1, 8, 1000, 200_000])
def test_equals_reference(size: int, num_buckets: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(size)
    buckets = torch.randint(num_buckets, (size,), generator=generator, dtype=torch.int32)
    before = core().num_threads()
    core().set_num_threads(threads)
    try:
        order, counts = bucketize(buckets, num_buckets)
    finally:
        core().set_num_threads(before)
    expected_order, expected_counts = bucketize(buckets, num_buckets, implementation="reference")
    assert order.dtype == counts.dtype == torch.int64
    assert torch.equal(order, expected_order)
    assert torch.equal(counts, expected_counts)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=100))
def test_property_stable_permutation(values: list[int]) -> None:
    order, counts = bucketize(torch.tensor(values, dtype=torch.int32), 7)
    assert order.tolist() == sorted(range(len(values)), key=lambda at: (values[at], at))
    assert counts.tolist() == [values.count(bucket) for bucket in range(7)]


def test_fault_25_repeated_runs_are_equal() -> None:
    buckets = torch.randint(10, (100_000,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    first = bucketize(buckets, 10)[0]
    for _ in range(5):
        assert torch.equal(bucketize(buckets, 10)[0], first)


def test_strided() -> None:
    matrix = torch.randint(5, (900, 2), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    assert torch.equal(bucketize(matrix[:, 1], 5)[0], bucketize(matrix[:, 1].clone(), 5)[0])


def test_no_buckets_no_entries() -> None:
    for implementation in ("native", "reference"):
        order, counts = bucketize(torch.empty(0, dtype=torch.int32), 0, implementation=implementation)
        assert order.numel() == counts.numel() == 0


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("bad", [8, -1])
def test_out_of_range_names_first_position(implementation: str, bad: int) -> None:
    buckets = torch.zeros(100_000, dtype=torch.int32)
    buckets[[70_000, 99_000]] = bad
    with pytest.raises(ValueError) as raised:
        bucketize(buckets, 8, implementation=implementation)
    assert f"bucketize: buckets must be in [0, 8), got {bad} at position 70000; raise num_buckets" in str(raised.value)


def test_errors() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"bucketize: buckets must be int32, got int64 \(shape \[1\]\)"):
        bucketize(one.long(), 1)
    with pytest.raises(ValueError, match=r"bucketize: buckets must have one dimension, got shape \[1, 1\]"):
        bucketize(one[None], 1)
    with pytest.raises(ValueError, match="bucketize: buckets must be on the CPU, got meta"):
        bucketize(one.to("meta"), 1)
    with pytest.raises(ValueError, match="bucketize: num_buckets must be >= 0, got -2"):
        bucketize(one, -2)
    with pytest.raises(ValueError, match="bucketize: unknown implementation 'x'"):
        bucketize(one, 1, implementation="x")
