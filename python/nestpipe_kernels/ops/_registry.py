"""Which implementation of an operation serves a device: what was asked for, or else the first that its device has.

On the CPU that is native code. On an accelerator each operation has its order, with plain PyTorch last:

    native      the extension: `_core` for the CPU, `_cuda` for CUDA devices
    triton      CUDA devices, where triton can be imported
    reference   plain PyTorch, wherever the tensor is

NESTPIPE_KERNELS names one that accelerators have to use (config.py). What was asked for works, or is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .. import _native
from ..config import KERNELS, default_kernels
from . import _triton

__all__ = ["chosen", "why_not"]


def chosen(operation: str, device: torch.device, asked: str | None, order: Sequence[str], *, but: str = "") -> str:
    """The implementation for a call.

    Args:
        operation: its name, for messages.
        device: where the rows are.
        asked: the caller's word; None: automatic.
        order: what the operation has for accelerators beside plain PyTorch, best first.
        but: what Triton's kernels cannot do of this call, in words; empty: nothing.

    Raises:
        ValueError: an implementation that there is not, or that cannot serve that device; says why.
    """
    if asked is None:
        if device.type == "cpu":
            return "native"
        asked = _forced()
    if asked is None:
        usable = (name for name in order if not (name == "triton" and but) and why_not(name, device, order) is None)
        return next(usable, "reference")
    if asked not in KERNELS:
        raise ValueError(f"{operation}: unknown implementation {asked!r}: choose native, triton or reference")
    problem = but if asked == "triton" and but else why_not(asked, device, order)
    if problem is not None:
        raise ValueError(f"{operation}: implementation {asked!r} cannot be used here: {problem}")
    return asked


def why_not(name: str, device: torch.device, order: Sequence[str]) -> str | None:
    """Why an implementation cannot serve a device; None where it can."""
    if name == "reference" or (name == "native" and device.type == "cpu"):
        return None
    if name not in order:
        return f"it has none for tensors of {device.type} devices"
    if name == "triton":
        return _triton.why_not(device)
    if _native.kernels(device.type) is None:
        return f"this installation has no kernels for {device.type} (a build with NESTPIPE_CUDA=ON has, for cuda)"
    return None


@functools.cache
def _forced() -> str | None:
    return default_kernels()
