"""Intersect: values against the dictionary, thread counts, extremes, messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe_kernels._native import core
from nestpipe_kernels.ops.intersect import intersect

EXTREMES = [0, -1, -2, -5, -(2**63), 2**63 - 1, 3, 3 + 2**52]


def assert_same(arguments: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    got = intersect(*arguments)  # type: ignore[arg-type]
    expected = intersect(*arguments, implementation="reference")  # type: ignore[arg-type]
    for left, right in zip(got, expected):
        assert left.dtype == torch.int64
        assert torch.equal(left, right)
    return got


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("size_a", [0, 1, 63, 1000, 100_000])
@pytest.mark.parametrize("size_b", [0, 1, 1000, 100_000])
def test_equals_reference(size_a: int, size_b: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(size_a + size_b)
    keys_a = torch.randperm(size_a, generator=generator) * 3 - 50
    keys_b = torch.randperm(size_b, generator=generator) * 2 - 50
    before = core().num_threads()
    core().set_num_threads(threads)
    try:
        index_a, index_b = assert_same((keys_a, None, keys_b, None))
    finally:
        core().set_num_threads(before)
    assert torch.equal(keys_a[index_a], keys_b[index_b])


PAIRS = st.lists(st.tuples(st.sampled_from(EXTREMES), st.integers(-1, 2)), max_size=30)


@settings(max_examples=60, deadline=None)
@given(PAIRS, PAIRS)
def test_fault_11_property_with_tables(pairs_a: list[tuple[int, int]], pairs_b: list[tuple[int, int]]) -> None:
    def columns(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        keys = torch.tensor([key for key, _ in pairs], dtype=torch.int64)
        return keys, torch.tensor([table for _, table in pairs], dtype=torch.int32)

    keys_a, tables_a = columns(pairs_a)
    keys_b, tables_b = columns(pairs_b)
    index_a, index_b = assert_same((keys_a, tables_a, keys_b, tables_b))
    assert torch.equal(keys_a[index_a], keys_b[index_b])
    assert torch.equal(tables_a[index_a], tables_b[index_b])
    assert len(index_b) == sum(pair in set(pairs_a) for pair in pairs_b)


def test_tables_keep_equal_keys_apart() -> None:
    keys, zeros = torch.tensor([7]), torch.zeros(1, dtype=torch.int32)
    assert intersect(keys, zeros, keys, zeros + 1)[0].numel() == 0
    assert intersect(keys, zeros, keys, zeros)[0].tolist() == [0]


def test_strided_and_int32() -> None:
    matrix = torch.arange(60).reshape(-1, 3)
    index_a, index_b = intersect(matrix[:, 1], None, torch.tensor([4, 5, 7], dtype=torch.int32), None)
    assert index_a.tolist() == [1, 2]
    assert index_b.tolist() == [0, 2]


def test_errors() -> None:
    keys, tables = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"intersect: keys_b must be int64, got float64 \(shape \[2\]\)"):
        intersect(keys, None, keys.double(), None)
    with pytest.raises(TypeError, match="intersect: tables_a must be int32, got int64"):
        intersect(keys, keys, keys, tables)
    with pytest.raises(ValueError, match="intersect: tables_a is given but tables_b is None; give both or neither"):
        intersect(keys, tables, keys, None)
    with pytest.raises(ValueError, match="intersect: tables_b is given but tables_a is None; give both or neither"):
        intersect(keys, None, keys, tables)
    with pytest.raises(ValueError, match="intersect: tables_b must have 2 entries, got 1"):
        intersect(keys, tables, keys, tables[:1])
    with pytest.raises(ValueError, match=r"intersect: keys_a must have one dimension, got shape \[1, 2\]"):
        intersect(keys[None], None, keys, None)
    with pytest.raises(ValueError, match="intersect: keys_a must be on the CPU, got meta"):
        intersect(keys.to("meta"), None, keys, None)
    with pytest.raises(ValueError, match="intersect: unknown implementation 'x'"):
        intersect(keys, None, keys, None, implementation="x")
