"""row_update in plain PyTorch: the order of operations that native code follows bit for bit, in float32.

The lines of every rule are in the docstring of its function below, per element: g is the row's gradient, p the
embedding, `lr` the row's learning rate as float32; a line is one or more float32 operations, left to right as the
parentheses say, each rounded. `lane_sum` is docs/architecture.md, rule 4. "g = decayed(g)" stands for

    g = g + weight_decay * p              only where weight_decay is not 0

Settings, `1 - x` of settings and bias factors are computed in double and rounded to float32 once; powers by squaring,
because libm's differ. With t the training's step, or the row's own count of updates, this one included
(bias_correction="row"):

    c1 = 1 / (1 - beta1^t)    c2 = 1 / sqrt(1 - beta2^t)    c = sqrt(1 - beta2^t) / (1 - beta1^t)

Then `updates` of the row grows by 1 and stops at 2^31 - 1. `apply_rule` also takes float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...types import SparseOptimizer
from ..lookup_pool.reference import lane_sum
from ..row_storage import RowStorage, embedding_words, pack_embeddings, unpack_embeddings

__all__ = ["RULES", "apply_rule", "bias_factors", "integer_power", "row_update"]

MAX_UPDATES = 2**31 - 1
SMALLEST_FTRL_RATE = 2.0**-100
"""With a smaller learning rate FTRL moves nothing: its reciprocal could overflow."""


def row_update(
    rows: Tensor,
    grads: Tensor,
    optimizer: SparseOptimizer,
    step: int,
    lr: float | Tensor,
    mask: Tensor | None,
    storage: RowStorage,
) -> None:
    """As the package's `row_update`, arguments as checked there."""
    num_rows, dim = grads.shape
    words = embedding_words(dim, storage.data_type)
    header = words + optimizer.state_floats(dim)
    updates = rows[:, header].contiguous().view(torch.int32)
    updates = torch.where(updates < MAX_UPDATES, updates + 1, updates)
    row_lr = lr if isinstance(lr, Tensor) else torch.full((num_rows,), lr, dtype=torch.float32, device=rows.device)
    start = unpack_embeddings(rows, dim, storage.data_type)
    embedding, state = apply_rule(start, rows[:, words:header], grads, optimizer, step, row_lr, updates)
    updated = rows.clone()
    pack_embeddings(embedding, updated, storage.data_type, storage, step, implementation="reference")
    updated[:, words:header] = state
    bits = updated.view(torch.int32)
    bits[:, header] = updates
    if mask is not None:
        bits = torch.where(mask.bool()[:, None], bits, rows.view(torch.int32))
    rows.view(torch.int32).copy_(bits)


def apply_rule(
    embedding: Tensor, state: Tensor, grads: Tensor, optimizer: SparseOptimizer, step: int, lr: Tensor, updates: Tensor
) -> tuple[Tensor, Tensor]:
    """New embedding [U, dim] and state [U, state_floats] of all rows; `updates` int32 [U] counts this update too."""
    return RULES[optimizer.name](embedding, state, grads, _Call(optimizer.hyper(), step, lr[:, None], updates))


@dataclass(frozen=True)
class _Call:
    """What a rule needs beside embedding, state and gradient."""

    hyper: dict[str, float]
    step: int
    lr: Tensor
    """[U, 1]"""
    updates: Tensor
    """int32 [U], this update included."""

    def scalar(self, name: str) -> Tensor:
        """A setting, rounded once to the precision of the arithmetic."""
        return _scalar(self.hyper[name], self.lr)

    def complement(self, name: str) -> Tensor:
        """1 - setting, rounded once."""
        return _scalar(1.0 - self.hyper[name], self.lr)

    def decayed(self, g: Tensor, p: Tensor) -> Tensor:
        return g + self.scalar("weight_decay") * p if self.hyper["weight_decay"] else g

    def bias(self) -> tuple[Tensor, Tensor, Tensor]:
        """c1, c2, c as [1, 1], or [U, 1] where rows count for themselves."""
        counts = self.updates.cpu().tolist() if self.hyper["bias_correction_by_row"] else [self.step]
        factors = [bias_factors(self.hyper["beta1"], self.hyper["beta2"], count) for count in counts]
        columns = torch.tensor(factors, dtype=torch.float64).view(-1, 3).to(self.lr.dtype).to(self.lr.device)
        return columns[:, 0:1], columns[:, 1:2], columns[:, 2:3]


def _sgd(p: Tensor, b: Tensor, g: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """
    g = decayed(g)
    p = p - lr * g                                           without momentum; with it:

    b = keep * b + take * g                                  keep = 0, take = 1 at the row's first update,
    p = p - lr * b                                           else momentum and 1 - dampening
    p = p - lr * (g + momentum * b)                          instead, with nesterov
    """
    g = call.decayed(g, p)
    if not call.hyper["momentum"]:
        return p - call.lr * g, b
    momentum = call.scalar("momentum")
    first = (call.updates == 1)[:, None]
    keep = torch.where(first, torch.zeros_like(momentum), momentum)
    take = torch.where(first, torch.ones_like(momentum), call.complement("dampening"))
    b = keep * b + take * g
    return p - call.lr * (g + momentum * b if call.hyper["nesterov"] else b), b


def _adagrad(p: Tensor, s: Tensor, g: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """
    g = decayed(g)
    s = s + g * g
    p = p - lr * (g / (sqrt(s) + eps))
    """
    g = call.decayed(g, p)
    s = s + g * g
    return p - call.lr * (g / (_sqrt(s) + call.scalar("eps"))), s


def _row_wise_adagrad(p: Tensor, s: Tensor, g: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """
    g = decayed(g)
    s = s + lane_sum(g * g) / dim                            one s per row
    p = p - (lr / (sqrt(s) + eps)) * g
    """
    g = call.decayed(g, p)
    s = s + (lane_sum(g * g) / _scalar(g.shape[1], p))[:, None]
    return p - (call.lr / (_sqrt(s) + call.scalar("eps"))) * g, s


def _adam(p: Tensor, state: Tensor, g: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """
    g = decayed(g)
    m = m + (g - m) * (1 - beta1)
    v = v + (g * g - v) * (1 - beta2)
    p = p - (lr * c) * (m / (sqrt(v) + eps))                 eps beside the uncorrected root: torch.optim.SparseAdam
    """
    g = call.decayed(g, p)
    m, v = _moments(state, g, call)
    _, _, c = call.bias()
    p = p - (call.lr * c) * (m / (_sqrt(v) + call.scalar("eps")))
    return p, torch.cat([m, v], dim=1)


def _adamw(p: Tensor, state: Tensor, g: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """
    m = m + (g - m) * (1 - beta1)
    v = v + (g * g - v) * (1 - beta2)
    p = (p - (lr * weight_decay) * p) - (lr * c1) * (m / (sqrt(v) * c2 + eps))
    """
    m, v = _moments(state, g, call)
    c1, c2, _ = call.bias()
    shrunk = p - (call.lr * call.scalar("weight_decay")) * p
    p = shrunk - (call.lr * c1) * (m / (_sqrt(v) * c2 + call.scalar("eps")))
    return p, torch.cat([m, v], dim=1)


def _row_wise_adam(p: Tensor, state: Tensor, g: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """
    v = v + (lane_sum(g * g) / dim - v) * (1 - beta2)        one v per row
    m = m + (g - m) * (1 - beta1)
    p = (p - (lr * weight_decay) * p) - ((lr * c1) / (sqrt(v) * c2 + eps)) * m
    """
    dim = p.shape[1]
    m, v = state[:, :dim], state[:, dim:]
    v = v + ((lane_sum(g * g) / _scalar(dim, p))[:, None] - v) * call.complement("beta2")
    m = m + (g - m) * call.complement("beta1")
    c1, c2, _ = call.bias()
    shrunk = p - (call.lr * call.scalar("weight_decay")) * p
    p = shrunk - ((call.lr * c1) / (_sqrt(v) * c2 + call.scalar("eps"))) * m
    return p, torch.cat([m, v], dim=1)


def _ftrl(p: Tensor, state: Tensor, g: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """
    g = decayed(g)
    n = n + g * g
    q = (beta + sqrt(n)) / lr + l2
    c = sign(p) * l1                                         where p is not 0, else -clamp(z, l1)
    t = p + (c - g) / q                                      clamp(x, k): the nearest number to x in [-k, k]
    z = -(t * q)
    p = t - clamp(t, l1 / q)                                 nothing of all this where lr < 2^-100
    """
    dim = p.shape[1]
    z, n = state[:, :dim], state[:, dim:]
    l1 = call.scalar("l1")
    g = call.decayed(g, p)
    squares = n + g * g
    q = (call.scalar("beta") + _sqrt(squares)) / call.lr + call.scalar("l2")
    c = torch.where(p > 0, l1, torch.where(p < 0, -l1, -_clamp(z, l1)))
    t = p + (c - g) / q
    updated = torch.cat([-(t * q), squares], dim=1)
    still = call.lr < SMALLEST_FTRL_RATE
    return torch.where(still, p, t - _clamp(t, l1 / q)), torch.where(still, state, updated)


def _lamb(p: Tensor, state: Tensor, g: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """
    m = m + (g - m) * (1 - beta1)
    v = v + (g * g - v) * (1 - beta2)
    u = (m * c1) / (sqrt(v) * c2 + eps)
    u = u + weight_decay * p                                 only where weight_decay is not 0
    ratio = sqrt(lane_sum(p * p)) / sqrt(lane_sum(u * u))    1 where either root is 0
    p = p - (lr * ratio) * u
    """
    m, v = _moments(state, g, call)
    c1, c2, _ = call.bias()
    u = call.decayed((m * c1) / (_sqrt(v) * c2 + call.scalar("eps")), p)
    weight, length = _sqrt(lane_sum(p * p))[:, None], _sqrt(lane_sum(u * u))[:, None]
    ratio = torch.where((weight > 0) & (length > 0), weight / length, torch.ones_like(weight))
    return p - (call.lr * ratio) * u, torch.cat([m, v], dim=1)


RULES: dict[str, Callable[[Tensor, Tensor, Tensor, _Call], tuple[Tensor, Tensor]]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "row_wise_adagrad": _row_wise_adagrad,
    "adam": _adam,
    "adamw": _adamw,
    "row_wise_adam": _row_wise_adam,
    "ftrl": _ftrl,
    "lamb": _lamb,
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


def bias_factors(beta1: float, beta2: float, t: int) -> tuple[float, float, float]:
    """c1, c2, c of update t, in double."""
    one = 1.0 - integer_power(beta1, t)
    root = math.sqrt(1.0 - integer_power(beta2, t))
    return 1.0 / one, 1.0 / root, root / one


def _moments(state: Tensor, g: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """First and second moments per element, updated."""
    m, v = state[:, : g.shape[1]], state[:, g.shape[1] :]
    m = m + (g - m) * call.complement("beta1")
    return m, v + (g * g - v) * call.complement("beta2")


def _clamp(x: Tensor, limit: Tensor) -> Tensor:
    return torch.where(x > limit, limit, torch.where(x < -limit, -limit, x))


def _sqrt(x: Tensor) -> Tensor:
    """The root, correctly rounded as IEEE 754 demands: torch's own float32 root on the CPU is an ulp off at times.

    A double root rounded to float32 is exact: double has more than twice float32's digits and two to spare.
    """
    return x.double().sqrt().to(x.dtype)


def _scalar(value: float, like: Tensor) -> Tensor:
    """`value` rounded once to the dtype of `like`: torch would otherwise choose the precision of the operation."""
    return torch.tensor(value, dtype=torch.float64).to(like.dtype)
