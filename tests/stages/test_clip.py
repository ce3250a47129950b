"""Clipping of row gradients: the length of each, whatever its size, and alike whatever rows are beside it."""

from __future__ import annotations

import math

import pytest
import torch

from nestpipe_kernels.stages.clip import clip_rows, limits_of
from nestpipe_kernels.types import TableSpec


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 64, 127])
def test_long_rows_get_the_limit_and_others_stay(dim):
    gradients = torch.randn(50, dim, generator=torch.Generator().manual_seed(dim))
    gradients[0] = 0
    gradients[1] = 3e38  # its square is beyond float32
    limits = torch.full((50,), 0.7 * math.sqrt(dim), dtype=torch.float64)
    limits[::5] = math.inf
    clipped = gradients.clone()
    clip_rows(clipped, None, limits)
    norms = gradients.double().norm(dim=1)
    long = norms > limits
    assert 0 < int(long.sum()) < 50
    assert torch.equal(clipped[~long], gradients[~long])
    expected = gradients[long].double() * (limits[long] / norms[long])[:, None]
    assert torch.allclose(clipped[long].double(), expected, rtol=3e-7, atol=0)  # a product of rounded factors
    for rows in (torch.tensor([3, 1, 40]), torch.arange(49, -1, -1), torch.empty(0, dtype=torch.int64)):
        some = gradients.clone()
        clip_rows(some, rows, limits)
        assert torch.equal(some[rows], clipped[rows])
        rest = torch.ones(50, dtype=torch.bool)
        rest[rows] = False
        assert torch.equal(some[rest], gradients[rest])


def test_limits_of_tables():
    free, limited = TableSpec("a", 5, None, 0), TableSpec("b", 5, None, 0, max_grad_norm=0.5)
    assert limits_of([free, free]) is None
    limits = limits_of([free, limited])
    assert limits is not None and limits.tolist() == [math.inf, 0.5]
