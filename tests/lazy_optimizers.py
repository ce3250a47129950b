"""Optimizers of torch's kind that step touched rows of sparse gradients only, in the parameter's own precision.

Where torch has the rule, it is torch's, with the other rows put back (`MaskedDense`). The rest are the papers' formulas
as they stand there, not in the order of operations of ops/row_update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, State, int], Tensor]
"""(touched rows of p, their gradient, their state (changed in place), step) -> their new p."""


class MaskedDense(torch.optim.Optimizer):
    """Steps a dense optimizer of torch, then puts untouched rows and their state back; a row's state starts at 0."""

    def __init__(self, params: Iterable[Any], make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(params, {})
        self.inner = make([p for group in self.param_groups for p in group["params"]])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        untouched, before = {}, {}
        for p in self.inner.param_groups[0]["params"]:
            mask = torch.ones(len(p), dtype=torch.bool)
            mask[p.grad.coalesce().indices()[0]] = False
            untouched[p] = mask
            before[p] = (p.clone(), {k: v.clone() for k, v in self._row_state(p)})
            p.grad = p.grad.to_dense()
        self.inner.step()
        for p, mask in untouched.items():
            old, state = before[p]
            p[mask] = old[mask]
            for name, now in self._row_state(p):
                now[mask] = state.get(name, torch.zeros_like(now))[mask]

    def _row_state(self, p: Tensor) -> list[tuple[str, Tensor]]:
        found = self.inner.state[p].items()
        return [(name, value) for name, value in found if torch.is_tensor(value) and value.shape == p.shape]


class LazyRule(torch.optim.Optimizer):
    """A rule of this file; `slots` are (name, whether per element instead of per row), all starting at `start`."""

    def __init__(self, params: Iterable[Any], rule: Rule, slots: Iterable[tuple[str, bool]], start: float = 0) -> None:
        super().__init__(params, {})
        self.rule, self.slots, self.start, self.steps = rule, list(slots), start, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            grad = p.grad.coalesce()
            rows, g = grad.indices()[0], grad.values()
            whole = self.state[p]
            for name, per_element in self.slots:
                width = p.shape[1] if per_element else 1
                whole.setdefault(name, torch.full((len(p), width), float(self.start), dtype=p.dtype))
            touched = {name: whole[name][rows] for name, _ in self.slots}
            p[rows] = self.rule(p[rows], g, touched, self.steps)
            for name, value in touched.items():
                whole[name][rows] = value


def row_wise_adagrad(params: Any, lr: float, start: float = 0.0, weight_decay: float = 0.0) -> LazyRule:
    """s += mean(g * g) of a row; p -= lr / (sqrt(s) + eps) * g."""

    def rule(p: Tensor, g: Tensor, state: State, t: int) -> Tensor:
        g = g + weight_decay * p
        state["sum"] += (g * g).mean(1, keepdim=True)
        return p - lr / (state["sum"].sqrt() + 1e-10) * g

    return LazyRule(params, rule, [("sum", False)], start)


def row_wise_adam(params: Any, lr: float, weight_decay: float = 0.0, eps: float = 1e-8) -> LazyRule:
    """Adam whose second moment is that of the row's mean square; decay beside the step."""

    def rule(p: Tensor, g: Tensor, state: State, t: int) -> Tensor:
        state["m"] = 0.9 * state["m"] + (1 - 0.9) * g
        state["v"] = 0.999 * state["v"] + (1 - 0.999) * (g * g).mean(1, keepdim=True)
        m_hat, v_hat = state["m"] / (1 - 0.9**t), state["v"] / (1 - 0.999**t)
        return p - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * p)

    return LazyRule(params, rule, [("m", True), ("v", False)])


def lamb(params: Any, lr: float, weight_decay: float = 0.0, eps: float = 1e-6) -> LazyRule:
    """Algorithm 2 of You et al., 2020, a row being a layer."""

    def rule(p: Tensor, g: Tensor, state: State, t: int) -> Tensor:
        state["m"] = 0.9 * state["m"] + (1 - 0.9) * g
        state["v"] = 0.999 * state["v"] + (1 - 0.999) * g * g
        m_hat, v_hat = state["m"] / (1 - 0.9**t), state["v"] / (1 - 0.999**t)
        update = m_hat / (v_hat.sqrt() + eps) + weight_decay * p
        ratio = p.norm(dim=1, keepdim=True) / update.norm(dim=1, keepdim=True)
        return p - lr * torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio)) * update

    return LazyRule(params, rule, [("m", True), ("v", True)])


def ftrl(
    params: Any, lr: float, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0, weight_decay: float = 0
) -> LazyRule:
    """Algorithm 1 of McMahan et al., 2013; z starts so that the closed form gives the initial value."""

    def rule(p: Tensor, g: Tensor, state: State, t: int) -> Tensor:
        n, fresh = state["n"], state["seen"] == 0
        state["seen"] += 1
        z = torch.where(fresh, -p * (beta / lr + l2) - p.sign() * l1, state["z"])
        g = g + weight_decay * p
        sigma = ((n + g * g).sqrt() - n.sqrt()) / lr
        state["z"] = z = z + g - sigma * p
        state["n"] = n = n + g * g
        closed = -(z - z.sign() * l1) / ((beta + n.sqrt()) / lr + l2)
        return torch.where(z.abs() <= l1, torch.zeros_like(z), closed)

    return LazyRule(params, rule, [("z", True), ("n", True), ("seen", False)])
