"""Owners: the shared hash against its PyTorch form, balance, messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe_kernels._native import core
from nestpipe_kernels.ops.owners import NUM_SLICES, default_slice_owner, owners

HASHES = torch.tensor([-(2**63), 123456789, -1])
PINNED_SLICES = [0, 15128, 56369, 54448, 63553, 26842]
INT64 = st.integers(-(2**63), 2**63 - 1)


def random_keys(size: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (size,), generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("size", [0, 1, 63, 1000, 100_000])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_equals_reference(size: int, world_size: int, threads: int) -> None:
    keys, slice_owner = random_keys(size), default_slice_owner(world_size)
    tables = (torch.arange(size) % 3).to(torch.int32)
    before = core().num_threads()
    core().set_num_threads(threads)
    try:
        for argument in (None, tables):
            got = owners(keys, argument, HASHES, slice_owner)
            expected = owners(keys, argument, HASHES, slice_owner, implementation="reference")
            assert got.dtype == expected.dtype == torch.int32
            assert torch.equal(got, expected)
    finally:
        core().set_num_threads(before)


def test_hash_is_pinned() -> None:
    """Checkpoints and routing rely on this function: its values must never change."""
    slices = torch.arange(NUM_SLICES, dtype=torch.int32)
    keys = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 42])
    for implementation in ("native", "reference"):
        got = owners(keys, None, torch.tensor([0]), slices, implementation=implementation)
        assert got.tolist() == PINNED_SLICES


@settings(max_examples=50, deadline=None)
@given(st.lists(INT64, max_size=50), INT64)
def test_fault_11_any_key_and_hash(values: list[int], table_hash: int) -> None:
    keys, hashes, slices = torch.tensor(values, dtype=torch.int64), torch.tensor([table_hash]), default_slice_owner(97)
    assert torch.equal(
        owners(keys, None, hashes, slices), owners(keys, None, hashes, slices, implementation="reference")
    )


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16])
def test_fault_13_multiples_of_the_world_size_are_balanced(world_size: int) -> None:
    keys = torch.arange(100_000) * world_size
    got = owners(keys, None, torch.tensor([987654321]), default_slice_owner(world_size))
    share = torch.bincount(got, minlength=world_size) * world_size / keys.numel()
    assert share.numel() == world_size
    assert (share - 1).abs().max() < 0.05


def test_default_slice_owner_is_even_and_ascending() -> None:
    for world_size in (1, 2, 3, 7, NUM_SLICES):
        slice_owner = default_slice_owner(world_size)
        assert slice_owner.dtype == torch.int32
        counts = torch.bincount(slice_owner, minlength=world_size)
        assert counts.numel() == world_size
        assert int(counts.max() - counts.min()) <= 1
        assert bool((slice_owner[1:] >= slice_owner[:-1]).all())


def test_slice_table_decides() -> None:
    slice_owner = torch.full((NUM_SLICES,), 5, dtype=torch.int32)
    assert owners(random_keys(100), None, HASHES, slice_owner).unique().tolist() == [5]


def test_strided_and_int32_keys() -> None:
    slices = default_slice_owner(4)
    wide = torch.arange(-600, 600)
    expected = owners(wide, None, HASHES, slices)
    assert torch.equal(owners(wide.to(torch.int32), None, HASHES, slices), expected)
    assert torch.equal(owners(wide.reshape(-1, 3)[:, 1], None, HASHES, slices), expected.reshape(-1, 3)[:, 1])


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("bad", [3, -1])
def test_bad_table_names_position(implementation: str, bad: int) -> None:
    tables = torch.zeros(50_000, dtype=torch.int32)
    tables[[40_000, 49_000]] = bad
    with pytest.raises(IndexError) as raised:
        owners(random_keys(50_000), tables, HASHES, default_slice_owner(2), implementation=implementation)
    assert f"owners: tables must be in [0, 3), got {bad} at position 40000; give table_hashes" in str(raised.value)


@pytest.mark.parametrize(
    ("replace", "error", "message"),
    [
        ({"keys": torch.zeros(2)}, TypeError, "owners: keys must be int64, got float32 (shape [2])"),
        ({"tables": torch.zeros(2, dtype=torch.int64)}, TypeError, "owners: tables must be int32, got int64"),
        ({"table_hashes": torch.zeros(1)}, TypeError, "owners: table_hashes must be int64, got float32"),
        ({"slice_owner": torch.zeros(8, dtype=torch.int32)}, ValueError, "slice_owner must have 65536 entries, got 8"),
        ({"keys": torch.zeros(1, 2, dtype=torch.int64)}, ValueError, "owners: keys must have one dimension"),
        ({"keys": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, "owners: keys must be on the CPU"),
        ({"table_hashes": torch.zeros(0, dtype=torch.int64), "tables": None}, IndexError, "tables must be in [0, 0)"),
        ({"implementation": "x"}, ValueError, "owners: unknown implementation 'x'"),
    ],
)
def test_errors(replace: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {
        "keys": torch.zeros(2, dtype=torch.int64),
        "tables": torch.zeros(2, dtype=torch.int32),
        "table_hashes": HASHES,
        "slice_owner": default_slice_owner(2),
        **replace,
    }
    with pytest.raises(error) as raised:
        owners(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)


@pytest.mark.parametrize("world_size", [0, -1, NUM_SLICES + 1])
def test_bad_world_size(world_size: int) -> None:
    with pytest.raises(ValueError, match=r"default_slice_owner: world_size must be in \[1, 65536\], got"):
        default_slice_owner(world_size)
