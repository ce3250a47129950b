"""Calls the user's model or loss function and reads what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..capture.split import batch_size_of
from ..stages.scaled_loss import refuse_scaled_loss

__all__ = ["call_model", "replicas_in"]

_Replica = torch.nn.parallel.DistributedDataParallel


def replicas_in(model: torch.nn.Module) -> list[_Replica]:
    """The modules of a model (itself, too) that are wrapped in DistributedDataParallel."""
    return [module for module in model.modules() if isinstance(module, _Replica)]


@contextmanager
def _without_exchanges(replicas: Sequence[_Replica]) -> Iterator[None]:
    """Inside, wrapped modules neither average gradients nor send buffers: the pipeline does the former, and a rank may
    have no samples."""
    before = [(one.require_backward_grad_sync, one.require_forward_param_sync) for one in replicas]
    for one in replicas:
        one.require_backward_grad_sync = one.require_forward_param_sync = False
    try:
        yield
    finally:
        for one, (backward, forward) in zip(replicas, before):
            one.require_backward_grad_sync, one.require_forward_param_sync = backward, forward


def call_model(
    model: Any, loss_fn: Callable[[Any, Any], Any] | None, batch: Any, replicas: Sequence[_Replica] = ()
) -> tuple[Tensor, Any, float | None]:
    """(loss as a 0-dim tensor, output, weight or None). `replicas`: DDP modules, which run without their own averaging.

    Raises:
        TypeError: the model or loss function returns something else than `(loss, output)` or `(loss, output, weight)`,
            or a loss that is not reduced over samples. Several losses (one dimension) are added.
        ValueError: the weight is negative or not finite, or a GradScaler has scaled the loss.
    """
    torch.clear_autocast_cache()  # a caller's autocast around the whole loop would keep weights of before the update
    with _without_exchanges(replicas):
        returned = loss_fn(model, batch) if loss_fn is not None else model(batch)
    source = "loss_fn" if loss_fn is not None else "the model"
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        raise TypeError(f"{source} must return (loss, output) or (loss, output, weight), got {_describe(returned)}")
    loss, output = returned[0], returned[1]
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise TypeError(f"{source} must return a floating-point loss tensor first, got {_describe(loss)}")
    refuse_scaled_loss(model, loss)
    weight = _weight(returned[2], source) if len(returned) == 3 else None
    size = batch_size_of(batch) if loss.dim() else 0
    if loss.dim() and size > 1 and loss.shape[0] == size:
        raise TypeError(
            f"{source} returned one loss for each of the {size} samples (shape {list(loss.shape)}); return their mean, "
            "or their sum with PipelineConfig(loss_weighting='sum')"
        )
    return loss.sum() if loss.dim() else loss, output, weight


def _weight(value: Any, source: str) -> float:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{source} must return a number as the weight of its loss, got {_describe(value)}")
    weight = float(number)
    if not 0 <= weight < math.inf:
        raise ValueError(f"{source} must return a weight that is finite and >= 0, got {weight}")
    return weight


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} values"
    return type(value).__name__
