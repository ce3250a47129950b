"""Checks of what an update takes beside rows and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import SparseOptimizer
from .. import _row_checks as checks
from .reference import RULES

__all__ = ["OPERATION", "check_rule", "check_step", "checked_lr", "checked_mask"]

OPERATION = "row_update"
LARGEST_RATE = torch.finfo(torch.float32).max


def check_rule(optimizer: SparseOptimizer) -> None:
    """There is a rule for the optimizer."""
    if optimizer.name not in RULES:
        raise ValueError(f"{OPERATION}: no rule for optimizer {optimizer.name!r}: choose one of {', '.join(RULES)}")


def check_step(step: int) -> None:
    """The number of an update."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"{OPERATION}: step must be an integer >= 1 (1 for the first update), got {step!r}")


def checked_lr(lr: float | Tensor, num_rows: int) -> float | Tensor:
    """A number, or float32 [num_rows]."""
    if not isinstance(lr, Tensor):
        if not abs(lr) <= LARGEST_RATE:
            raise ValueError(f"{OPERATION}: lr must be finite in float32, got {lr!r}")
        return float(lr)
    if lr.dtype != torch.float32 or lr.device.type != "cpu":
        raise TypeError(f"{OPERATION}: lr must be a float or a float32 CPU tensor, got {checks.describe(lr)}")
    if lr.shape != (num_rows,):
        raise ValueError(f"{OPERATION}: lr must have one entry per row ({num_rows}), got shape {list(lr.shape)}")
    return lr.contiguous()


def checked_mask(mask: Tensor | None, num_rows: int, device: torch.device | None = None) -> Tensor | None:
    """bool or uint8 [num_rows] on the CPU (or on `device`), or None."""
    if mask is None:
        return None
    if mask.dtype not in (torch.bool, torch.uint8) or not (mask.is_cpu or mask.device == device):
        place = "CPU tensor" if device is None else f"tensor on the CPU or {device}"
        raise TypeError(f"{OPERATION}: mask must be a bool or uint8 {place}, got {checks.describe(mask)}")
    if mask.shape != (num_rows,):
        raise ValueError(f"{OPERATION}: mask must have one entry per row ({num_rows}), got shape {list(mask.shape)}")
    return mask.contiguous()
