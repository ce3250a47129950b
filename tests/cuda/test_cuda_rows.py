"""What the emulator shows of operations on rows and keys, on a CUDA device: the bits of the references. On machines
that have one."""

from __future__ import annotations

import pytest
import test_emulated_keys as of_keys
import test_emulated_reduce as of_pools
import test_emulated_rows as of_gradients
import test_emulated_update as of_updates
import torch

from nestpipe_kernels import _native
from nestpipe_kernels.ops.row_storage import RowStorage
from nestpipe_kernels.types import DataType, SparseOptimizer

MODES = [of_pools.SUM, of_pools.MEAN, of_pools.MAX, of_pools.NONE]
HERE = torch.cuda.is_available() and _native.cuda() is not None

pytestmark = pytest.mark.skipif(not HERE, reason="no CUDA device, or no CUDA kernels")


@pytest.mark.parametrize("optimizer", [*of_updates.OPTIMIZERS, *of_updates.MORE], ids=repr)
def test_cuda_update(optimizer: SparseOptimizer) -> None:
    for size in ((1, 5), (7, 20), (37, 120), (64, 200), (2048, 6148)):
        of_updates.assert_same(optimizer, size, RowStorage(), device="cuda")
        for data_type in (DataType.FP16, DataType.BF16):
            for at_random in (False, True):
                of_updates.assert_same(optimizer, size, of_updates.storage_of(data_type, at_random), device="cuda")


@pytest.mark.parametrize(("dim", "stride"), [*of_pools.DIMS, (2048, 2048)])
def test_cuda_pools(dim: int, stride: int) -> None:
    for modes, weighted in ((MODES, False), ([of_pools.SUM, of_pools.NONE], True)):
        bags = of_pools.some_bags(modes, 150, 70, weighted=weighted, narrow=weighted)
        of_pools.assert_gradients_are_right(bags, 70, dim, stride, special=not weighted, device="cuda")
        of_pools.assert_pooling_is_right(bags, 70, dim, stride, device="cuda")
    of_pools.assert_weight_gradients_are_right(dim, stride, device="cuda")


@pytest.mark.parametrize("counts", [*of_pools.HOT_COUNTS, [20_000, 3, 1025]])
def test_cuda_gradients_of_hot_rows(counts: list[int]) -> None:
    for dim in (3, 64):
        of_pools.assert_gradients_are_right(of_pools.hot_bags(counts), len(counts), dim, dim, device="cuda")


@pytest.mark.parametrize(("num_rows", "dim"), [(1, 1), (40, 7), (40, 64), (13, 2048)])
def test_cuda_mean_sources(num_rows: int, dim: int) -> None:
    for per_source in ([0], [17], [30, 0, 50]):
        of_gradients.assert_means_are_right(num_rows, dim, per_source, chosen=num_rows, device="cuda")


@pytest.mark.parametrize(("num_rows", "dim", "stride"), of_gradients.FINITE)
def test_cuda_finite_rows(num_rows: int, dim: int, stride: int) -> None:
    of_gradients.assert_finite_is_right(num_rows, dim, stride, device="cuda")


@pytest.mark.parametrize("with_tables", [False, True])
def test_cuda_intersect(with_tables: bool) -> None:
    for size_a, size_b, distinct in ((0, 5, 1), (1, 1, 1), (2300, 700, 40), (20_000, 30_000, 25_000)):
        of_keys.assert_matches_are_right(size_a, size_b, distinct, with_tables, device="cuda")
