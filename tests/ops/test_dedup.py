"""Dedup: values against the dictionary, thread counts, extremes, strides, messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe_kernels._native import core
from nestpipe_kernels.ops.dedup import DedupResult, dedup

EXTREMES = [0, -1, -2, -5, -(2**63), 2**63 - 1]


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = core().num_threads()
    core().set_num_threads(request.param)
    yield request.param
    core().set_num_threads(before)


def zipf(size: int, vocabulary: int, seed: int = 0) -> Tensor:
    weights = torch.arange(1, vocabulary + 1, dtype=torch.float64) ** -1.05
    uniform = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.searchsorted(torch.cumsum(weights / weights.sum(), 0), uniform)


def keys_of(kind: str, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    if kind == "zipf":
        return zipf(size, 5000) * 7919 - 3
    if kind == "equal":
        return torch.full((size,), -7)
    if kind == "distinct":
        return torch.randperm(size, generator=generator) * 2**40
    if kind == "rare":
        return torch.randint(1 + size // 2, (size,), generator=generator) << 20
    return torch.tensor(EXTREMES)[torch.randint(len(EXTREMES), (size,), generator=generator)]


def assert_same(got: DedupResult, expected: DedupResult) -> None:
    for name, left, right in zip(DedupResult._fields, got, expected):
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), name


@pytest.mark.parametrize("kind", ["zipf", "equal", "distinct", "rare", "extremes"])
@pytest.mark.parametrize("size", [0, 1, 63, 1000, 100_000])
@pytest.mark.parametrize("num_tables", [None, 3])
def test_equals_reference_at_any_thread_count(kind: str, size: int, num_tables: int | None, threads: int) -> None:
    keys = keys_of(kind, size)
    tables = None if num_tables is None else (torch.arange(size) % num_tables).to(torch.int32)
    got = dedup(keys, tables)
    assert got.unique_index.dtype == torch.int64
    assert got.inverse.dtype == torch.int32
    assert got.counts.dtype == torch.int64
    assert_same(got, dedup(keys, tables, implementation="reference"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*EXTREMES, 3, 2**32, 2**52]), st.integers(-2, 2)), max_size=200))
def test_property_equals_reference(pairs: list[tuple[int, int]]) -> None:
    keys = torch.tensor([key for key, _ in pairs], dtype=torch.int64)
    tables = torch.tensor([table for _, table in pairs], dtype=torch.int32)
    for argument in (None, tables):
        got = dedup(keys, argument)
        assert_same(got, dedup(keys, argument, implementation="reference"))
        assert torch.equal(keys[got.unique_index][got.inverse.long()], keys)


def test_fault_11_extreme_keys() -> None:
    keys = torch.tensor(EXTREMES * 2)
    got = dedup(keys)
    assert got.unique_index.tolist() == list(range(6))
    assert got.inverse.tolist() == list(range(6)) * 2
    assert got.counts.tolist() == [2] * 6


def test_fault_12_close_and_large_keys_stay_apart() -> None:
    base = 6221888200042590280
    keys = torch.tensor([base, base + 1, 5, 5 + 2**52, 5 + 2**32, base])
    assert dedup(keys).inverse.tolist() == [0, 1, 2, 3, 4, 0]


def test_fault_12_float_keys_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^dedup: keys must be int64, got float32 \(shape \[8, 3\]\)$"):
        dedup(torch.zeros(8, 3))


def test_fault_05_int32_keys_are_widened() -> None:
    keys = torch.tensor([-1, 2**31 - 1, -1], dtype=torch.int32)
    assert_same(dedup(keys), dedup(keys.long()))


@pytest.mark.parametrize("column", [0, 1, 2])
def test_fault_16_strided_equals_contiguous(column: int) -> None:
    matrix = zipf(30_000, 500).reshape(-1, 3)
    tables = (matrix % 2).to(torch.int32)
    strided = dedup(matrix[:, column], tables[:, column])
    assert_same(strided, dedup(matrix[:, column].clone(), tables[:, column].clone()))
    assert_same(strided, dedup(matrix[:, column], tables[:, column], implementation="reference"))


def test_fault_16_a_million_distinct_keys() -> None:
    size = 1_000_000
    got = dedup(torch.arange(size) * 2**20)
    assert torch.equal(got.unique_index, torch.arange(size))
    assert torch.equal(got.inverse, torch.arange(size, dtype=torch.int32))


def test_fault_25_repeated_runs_are_equal(threads: int) -> None:
    keys = torch.randint(10, (100_000,), generator=torch.Generator().manual_seed(1)) - 5
    first = dedup(keys)
    assert int(first.counts.sum()) == 100_000
    for _ in range(5):
        assert_same(dedup(keys), first)


def test_runs_of_any_length_equal_the_reference(threads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 150, (1000,), generator=generator)
    keys = torch.randint(6, (1000,), generator=generator).repeat_interleave(lengths)
    tables = torch.randint(2, (1000,), generator=generator).to(torch.int32).repeat_interleave(lengths)
    inside = torch.full_like(tables, 5)
    inside[40_001] = 4
    for argument in (None, tables, inside):
        assert_same(dedup(keys, argument), dedup(keys, argument, implementation="reference"))
    keys = torch.full((70_000,), -(2**63))
    keys[[1, 31, 32, 63, 40_000, 69_999]] = 0
    tables = torch.full((70_000,), 5, dtype=torch.int32)
    tables[[95, 96, 40_001]] = 4
    for argument in (None, tables):
        assert_same(dedup(keys, argument), dedup(keys, argument, implementation="reference"))


def keys_of_hashes(hashes: np.ndarray) -> Tensor:
    """The keys, of a list without tables, that native code hashes to these words: its mix, undone."""
    with np.errstate(over="ignore"):
        words = hashes ^ (hashes >> np.uint64(32))
        words *= np.uint64(pow(0xD6E8FEB86659FD93, -1, 2**64))
        words ^= (words >> np.uint64(29)) ^ (words >> np.uint64(58))
        words *= np.uint64(pow(0x9FB21C651E98DF25, -1, 2**64))
        words ^= words >> np.uint64(32)
    return torch.from_numpy(words.view(np.int64))


@pytest.mark.parametrize("shift", [0, 16, 45])
def test_keys_chosen_to_share_bits_of_the_hash_take_no_longer(shift: int) -> None:
    """Were they to share slots, each would be compared with all before it: 10^11 comparisons."""
    size = 400_000
    keys = keys_of_hashes(np.arange(size, dtype=np.uint64) << np.uint64(shift))
    begin = time.monotonic()
    got = dedup(torch.cat([keys, keys.flip(0)]))
    assert time.monotonic() - begin < 20
    assert torch.equal(got.unique_index, torch.arange(size))
    assert torch.equal(got.inverse, torch.cat([torch.arange(size), torch.arange(size).flip(0)]).to(torch.int32))
    assert torch.equal(got.counts, torch.full((size,), 2))


def test_calls_at_the_same_time_do_not_share_their_working_memory() -> None:
    lists = [keys_of(kind, size) for kind in ("zipf", "distinct", "rare") for size in (1000, 70_000)]
    expected = [dedup(keys) for keys in lists]
    with ThreadPoolExecutor(len(lists)) as pool:
        for _ in range(10):
            for got, right in zip(pool.map(dedup, lists), expected):
                assert_same(got, right)


def test_short_calls_of_many_threads() -> None:
    keys = torch.arange(20) % 7

    def calls(_: int) -> bool:
        return all(dedup(keys).counts.tolist() == [3] * 6 + [2] for _ in range(2000))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(calls, range(8)))


def test_equal_keys_of_different_tables_are_distinct() -> None:
    got = dedup(torch.tensor([4, 4, 4]), torch.tensor([0, 1, 0], dtype=torch.int32))
    assert got.inverse.tolist() == [0, 1, 0]


def test_results_do_not_share_memory_with_inputs() -> None:
    keys = torch.tensor([3, 3, 1])
    got = dedup(keys)
    keys.fill_(9)
    assert got.inverse.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2],), TypeError, "dedup: keys must be a int64 tensor, got list"),
        ((torch.zeros(2, 2, dtype=torch.int64),), ValueError, "dedup: keys must have one dimension, got shape [2, 2]"),
        ((torch.zeros(2, dtype=torch.int64, device="meta"),), ValueError, "dedup: keys must be on the CPU, got meta"),
        (
            (torch.zeros(1, dtype=torch.int64).expand(2**31),),
            ValueError,
            "dedup: keys must have at most 2147483647 entries, got 2147483648",
        ),
        ((torch.zeros(2, dtype=torch.int64), torch.zeros(2)), TypeError, "dedup: tables must be int32, got float32"),
        (
            (torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)),
            ValueError,
            "dedup: tables must have 2 entries, got 3",
        ),
    ],
)
def test_errors(arguments: tuple[Tensor, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        dedup(*arguments)
    assert message in str(raised.value)


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="dedup: unknown implementation 'fast': choose one of native, reference"):
        dedup(torch.zeros(1, dtype=torch.int64), implementation="fast")
