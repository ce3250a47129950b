"""A GradScaler of torch under a pipeline: its scale, and its word on a batch after the verdict.

Rows' gradients leave the model divided by the scale, dense ones enter their exchange so. Whether one of them is not
finite the verdict knows, for all ranks alike, so the scaler is told by way of a parameter of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["LossScale", "loss_scale"]

_METHODS = ("scale", "get_scale", "unscale_", "update", "is_enabled")


def loss_scale(scaler: Any) -> LossScale | None:
    """None where there is no scaler, or one that is not enabled.

    Raises:
        TypeError: no GradScaler, or the class itself.
    """
    if scaler is None:
        return None
    if isinstance(scaler, type):
        raise TypeError(f"NestedPipeline: grad_scaler must be a GradScaler, got the class {scaler.__name__}; make one")
    missing = [name for name in _METHODS if not callable(getattr(scaler, name, None))]
    if missing:
        raise TypeError(
            f"NestedPipeline: grad_scaler must be a GradScaler such as torch.amp.GradScaler('cpu'), got "
            f"{type(scaler).__name__} without {missing[0]}()"
        )
    return LossScale(scaler) if scaler.is_enabled() else None


class LossScale:
    """What a pipeline does with a GradScaler that is enabled, through its public methods."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._stand_in = torch.nn.Parameter(torch.zeros((), dtype=torch.float32))
        self._optimizer = torch.optim.SGD([self._stand_in], lr=0.0)

    def current(self) -> float:
        """The factor of the next batch's loss.

        Raises:
            ValueError: it is no positive number any more.
        """
        scale = float(self._scaler.get_scale())
        if not (scale > 0 and math.isfinite(1.0 / scale)):
            raise ValueError(
                f"the scale of grad_scaler is {scale}: too many batches in a row had gradients that are not finite, so "
                "it is not the scale; look for the source in the model, and make a new GradScaler"
            )
        return scale

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the factor."""
        result: Tensor = self._scaler.scale(loss)
        return result

    def report(self, finite: bool) -> None:
        """A batch is over: the factor grows, stays or falls, as after `scaler.step(...)` and `scaler.update()`."""
        self._scaler.scale(torch.zeros((), dtype=torch.float32))  # a rank without samples has not begun
        self._stand_in.grad = torch.full((), 0.0 if finite else math.inf, dtype=torch.float32)
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()
