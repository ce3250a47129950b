"""Bringing a batch to an accelerator: the tensors that the dense model computes with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.capture.tree import children, rebuild

__all__ = ["to_device"]


def to_device(batch: Any, device: torch.device, moved: list[Tensor] | None = None) -> Any:
    """A batch with its floating-point tensors on `device`, on the current stream.

    Integers, jagged tensors and everything else stay: keys are routed and compared on the host. What had to be moved is
    added to `moved`.
    """
    if isinstance(batch, Tensor):
        if not batch.is_floating_point() or batch.device == device:
            return batch
        there = batch.to(device)
        if moved is not None:
            moved.append(there)
        return there
    parts = children(batch)
    if not parts:
        return batch
    after = [to_device(child, device, moved) for _, child in parts]
    unchanged = all(new is old for new, (_, old) in zip(after, parts))
    return batch if unchanged else rebuild(batch, after)
