"""row_update in plain PyTorch: the order of operations that native code follows bit for bit, in float32.

Per element, with G the row's gradient, p the embedding (one line is one or more float32 operations, left to right,
each rounded; `lr` is the row's learning rate as float32):

- sgd               p = p - lr * G
- adagrad           s = s + G * G
                    p = p - lr * (G / (sqrt(s) + eps))
- row_wise_adagrad  s = s + lane_sum(G * G) / dim          (one s per row; lane_sum: docs/architecture.md, rule 4)
                    p = p - (lr / (sqrt(s) + eps)) * G
- adam              m = m + (G - m) * (1 - beta1)
                    v = v + (G * G - v) * (1 - beta2)
                    p = p - (lr * factor) * (m / (sqrt(v) + eps))
                    factor = sqrt(1 - beta2^t) / (1 - beta1^t)

`eps`, `1 - beta1`, `1 - beta2` and `factor` are computed in double and rounded to float32 once; powers by squaring,
because libm's differ. t is the training's step, or the row's own count of updates, this one included
(bias_correction="row"). Then `updates` of the row grows by 1 and stops at 2^31 - 1. eps is outside the root and, for
Adam, applies to the uncorrected root, as in torch.optim.SparseAdam. `apply_rule` also takes float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...types import SparseOptimizer
from ..lookup_pool.reference import lane_sum

__all__ = ["RULES", "adam_bias_factor", "apply_rule", "integer_power", "row_update"]

MAX_UPDATES = 2**31 - 1


def row_update(
    rows: Tensor, grads: Tensor, optimizer: SparseOptimizer, step: int, lr: float | Tensor, mask: Tensor | None
) -> None:
    """As the package's `row_update`, arguments as checked there."""
    num_rows, dim = grads.shape
    header = dim + optimizer.state_floats(dim)
    updates = rows[:, header].contiguous().view(torch.int32)
    updates = torch.where(updates < MAX_UPDATES, updates + 1, updates)
    row_lr = lr if isinstance(lr, Tensor) else torch.full((num_rows,), lr, dtype=torch.float32)
    embedding, state = apply_rule(rows[:, :dim], rows[:, dim:header], grads, optimizer, step, row_lr, updates)
    updated = rows.clone()
    updated[:, :dim] = embedding
    updated[:, dim:header] = state
    updated[:, header] = updates.view(torch.float32)
    if mask is not None:
        updated = torch.where(mask.bool()[:, None], updated, rows)
    rows.view(torch.int32).copy_(updated.view(torch.int32))


def apply_rule(
    embedding: Tensor, state: Tensor, grads: Tensor, optimizer: SparseOptimizer, step: int, lr: Tensor, updates: Tensor
) -> tuple[Tensor, Tensor]:
    """New embedding [U, dim] and state [U, state_floats] of all rows; `updates` int32 [U] counts this update too."""
    return RULES[optimizer.name](embedding, state, grads, optimizer.hyper(), step, lr[:, None], updates)


def _sgd(
    p: Tensor, state: Tensor, g: Tensor, hyper: dict[str, float], step: int, lr: Tensor, updates: Tensor
) -> tuple[Tensor, Tensor]:
    return p - lr * g, state


def _adagrad(
    p: Tensor, s: Tensor, g: Tensor, hyper: dict[str, float], step: int, lr: Tensor, updates: Tensor
) -> tuple[Tensor, Tensor]:
    s = s + g * g
    return p - lr * (g / (_sqrt(s) + _scalar(hyper["eps"], p))), s


def _row_wise_adagrad(
    p: Tensor, s: Tensor, g: Tensor, hyper: dict[str, float], step: int, lr: Tensor, updates: Tensor
) -> tuple[Tensor, Tensor]:
    s = s + (lane_sum(g * g) / _scalar(g.shape[1], p))[:, None]
    return p - (lr / (_sqrt(s) + _scalar(hyper["eps"], p))) * g, s


def _adam(
    p: Tensor, state: Tensor, g: Tensor, hyper: dict[str, float], step: int, lr: Tensor, updates: Tensor
) -> tuple[Tensor, Tensor]:
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    m, v = state[:, : p.shape[1]], state[:, p.shape[1] :]
    m = m + (g - m) * _scalar(1.0 - beta1, p)
    v = v + (g * g - v) * _scalar(1.0 - beta2, p)
    if hyper["bias_correction_by_row"]:
        factors = [adam_bias_factor(beta1, beta2, count) for count in updates.tolist()]
        factor = torch.tensor(factors, dtype=torch.float64).to(p.dtype)[:, None]
    else:
        factor = _scalar(adam_bias_factor(beta1, beta2, step), p)
    p = p - (lr * factor) * (m / (_sqrt(v) + _scalar(hyper["eps"], p)))
    return p, torch.cat([m, v], dim=1)


RULES: dict[str, Callable[[Tensor, Tensor, Tensor, dict[str, float], int, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "row_wise_adagrad": _row_wise_adagrad,
    "adam": _adam,
}


def integer_power(base: float, exponent: int) -> float:
    """base ** exponent by squaring, in double; exponent >= 0."""
    power = 1.0
    while exponent:
        if exponent & 1:
            power *= base
        base *= base
        exponent >>= 1
    return power


def adam_bias_factor(beta1: float, beta2: float, step: int) -> float:
    """sqrt(1 - beta2^step) / (1 - beta1^step) in double."""
    return math.sqrt(1.0 - integer_power(beta2, step)) / (1.0 - integer_power(beta1, step))


def _sqrt(x: Tensor) -> Tensor:
    """The root, correctly rounded as IEEE 754 demands: torch's own float32 root on the CPU is an ulp off at times.

    A double root rounded to float32 is exact: double has more than twice float32's digits and two to spare.
    """
    return x.double().sqrt().to(x.dtype)


def _scalar(value: float, like: Tensor) -> Tensor:
    """`value` rounded once to the dtype of `like`: torch would otherwise choose the precision of the operation."""
    return torch.tensor(value, dtype=torch.float64).to(like.dtype)
