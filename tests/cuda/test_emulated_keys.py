"""Intersect on the emulator: the reference's matches in its order; and keys of a device taken by the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulated_cuda import EmulatedCuda, planted, seeds_that_see
from nestpipe_kernels.ops.intersect import cuda as intersect_cuda
from nestpipe_kernels.ops.intersect import reference

EXTREMES = torch.tensor([0, -1, -2, 2**63 - 1, -(2**63), 2**32, -(2**32)])


def assert_matches_are_right(
    size_a: int, size_b: int, distinct: int, with_tables: bool = False, device: str = "cpu"
) -> None:
    generator = torch.Generator().manual_seed(size_a + 3 * size_b + distinct)
    pool = torch.randint(-(2**63), 2**63 - 1, (distinct,), generator=generator)
    pool[: len(EXTREMES)] = EXTREMES[:distinct]
    keys_a, keys_b = (pool[torch.randint(0, distinct, (size,), generator=generator)] for size in (size_a, size_b))
    tables: list[Tensor | None] = [None, None]
    if with_tables:
        tables = [torch.randint(-2, 2, (size,), generator=generator).int() for size in (size_a, size_b)]
    given = (keys_a, tables[0], keys_b, tables[1])
    there = [None if part is None else part.to(device) for part in given]
    for found, expected in zip(intersect_cuda.intersect(*there), reference.intersect(*given)):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("with_tables", [False, True])
@pytest.mark.parametrize(("size_a", "size_b"), [(0, 0), (0, 5), (5, 0), (1, 1), (63, 300), (2300, 700)])
def test_emulated_cuda_intersect(cuda: EmulatedCuda, size_a: int, size_b: int, with_tables: bool) -> None:
    for distinct in (1, 40, 5000):
        assert_matches_are_right(size_a, size_b, distinct, with_tables)


# ----------------------------------------------------------------------------------------------------- planted bugs


def few_pairs_are_right(cuda: EmulatedCuda) -> bool:
    with cuda.used_for():
        assert_matches_are_right(900, 64, 60)
    return True


def test_emulated_cuda_intersect_sees_an_entry_for_the_first_position(
    emulated_objects: list[Path], emulated_library: Path, tmp_path: Path
) -> None:
    """Which position became a pair's entry depends on luck."""
    assert seeds_that_see(emulated_library, few_pairs_are_right) == 0
    bug = {"return chains.first[entry];": "return entry;"}
    bad = planted(emulated_objects, "keys/pair_chains.cuh", bug, tmp_path, "keys/intersect.cu")
    assert seeds_that_see(bad, few_pairs_are_right) >= 2
