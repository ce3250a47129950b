"""Row gradients that are too long are shortened, before the update. What becomes of a row depends on that row alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..types import TableSpec

__all__ = ["clip_rows", "limits_of"]


def limits_of(tables: list[TableSpec]) -> Tensor | None:
    """float64 [tables]: the longest gradient of a row of each, infinite where there is none; None if none has one."""
    limits = [math.inf if table.max_grad_norm is None else table.max_grad_norm for table in tables]
    return None if all(math.isinf(limit) for limit in limits) else torch.tensor(limits, dtype=torch.float64)


def clip_rows(gradients: Tensor, rows: Tensor | None, limits: Tensor) -> None:
    """Shorten gradients in place to their limit: `g *= limit / |g|` where |g| > limit.

    Squares are summed in float64, halves of a row onto each other, so a row's sum has one order whatever is beside it.

    Args:
        gradients: float32 [U, D].
        rows: int64 [n], the rows to look at; None: all.
        limits: float64 [U], infinite where a row has none.
    """
    chosen, bounds = (gradients, limits) if rows is None else (gradients[rows], limits[rows])
    squares = chosen.to(torch.float64).square()
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        folded = squares[:, :half] + squares[:, half : 2 * half]
        squares = folded if squares.shape[1] % 2 == 0 else torch.cat([folded, squares[:, -1:]], 1)
    norms = squares.squeeze(1).sqrt()
    long = torch.nonzero(norms > bounds).squeeze(1)
    factors = (bounds[long] / norms[long]).to(torch.float32).unsqueeze(1)
    gradients[long if rows is None else rows[long]] = chosen[long] * factors
