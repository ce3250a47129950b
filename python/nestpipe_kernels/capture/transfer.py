"""Moving and pinning batches of any class: every tensor and jagged object in them, wherever it sits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.capture.tree import (
    children,
    format_path,
    is_jagged,
    is_keyed_jagged,
    is_keyed_tensor,
    rebuild,
    walk,
)

__all__ = ["move_batch", "pin_batch"]


def move_batch(batch: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """The batch with all its tensors on `device`, of its own type; custom classes need no method for it.

    Tensors that are there already are shared with `batch`. Arrays, scalars and strings stay as they are. With
    `non_blocking` the copies may still be under way on return.
    """
    return _map(batch, lambda part: part.to(device, non_blocking=non_blocking))


def pin_batch(batch: Any) -> Any:
    """The batch with all its CPU tensors in pinned memory; the batch itself where there is no accelerator."""
    return _map(batch, _pin) if torch.accelerator.is_available() else batch


def _pin(part: Any) -> Any:
    pinned = part.pin_memory() if not isinstance(part, Tensor) or part.device.type == "cpu" else part
    return part if pinned is None else pinned


def _map(batch: Any, function: Callable[[Any], Any]) -> Any:
    for _ in walk(batch, lambda path: ValueError(f"batch: {format_path(path)} contains itself; expected a tree")):
        pass
    return _map_part(batch, function)


def _map_part(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor) or is_keyed_jagged(value) or is_jagged(value) or is_keyed_tensor(value):
        return function(value)
    parts = children(value)
    return value if parts is None else rebuild(value, [_map_part(child, function) for _, child in parts])
