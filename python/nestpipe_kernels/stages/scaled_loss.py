"""Losses that a GradScaler has multiplied where nothing divides the rows' gradients again: refused, by name.

`scaler.step(optimizer)` divides the gradients of the optimizer's parameters. Rows are no parameters, and are updated at
the end of backward. So a backward from `scaler.scale(loss)` is looked for: its root is a product with a constant, the
process has a scaler that is in use, and the loss, where a caller still holds it, is smaller by that scaler's factor.
Before backward the constant itself can be compared with the scaler's.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["refuse_scaled_backward", "refuse_scaled_loss"]

_MOST_NODES = 16
_MOST_FRAMES = 12
_MOST_PARTS = 64
"""A loss that is scaled may be divided by a number of batches."""


class _Scalers:
    """The GradScalers of the process. Looking for them visits every object, so it is done at the 1st, 2nd, 4th ... time
    that somebody asks on behalf of the same loop or model."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._asked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def in_use(self, behalf: Any) -> list[Any]:
        """Those that are enabled and have scaled something."""
        asked = self._asked[behalf] = self._asked.get(behalf, 0) + 1
        if asked & (asked - 1) == 0:
            kind = torch.amp.GradScaler
            for one in gc.get_objects():
                if issubclass(type(one), kind):
                    self._known.add(one)
        return [one for one in list(self._known) if one.is_enabled() and getattr(one, "_scale", None) is not None]


_scalers = _Scalers()
_last_passed: list[weakref.ref[Tensor]] = []
"""The root that was looked at last, as a backward reaches many modules."""


def refuse_scaled_backward() -> None:
    """To be called from inside a backward, with no pipeline open.

    Raises:
        RuntimeError: its loss has been scaled by a GradScaler; says what to do.
    """
    frame, roots = _running_backward(sys._getframe(1))
    for root in roots:
        node = next(_products(root), None)
        if node is None or frame is None or any(last() is root for last in _last_passed):
            continue
        scales = [float(scaler.get_scale()) for scaler in _scalers.in_use(frame.f_code)]
        if scales and _may_be_scaled(root, node, frame, scales):
            raise RuntimeError(
                "backward: the loss has been multiplied by a GradScaler, which divides gradients of its optimizer's "
                "parameters alone, so rows would be updated with gradients that many times too large; nothing was "
                "updated. Train through nk.NestedPipeline(model, dense_optimizer, loss_fn, grad_scaler=scaler) "
                "(schedule='sequential' and num_micro_batches=1 for one stage after another), or use bfloat16, which "
                "needs no scaler. If this loss is none of the scaler's, multiply by constants before it is reduced to "
                "a number"
            )
        _last_passed[:] = [weakref.ref(root)]


def refuse_scaled_loss(model: Any, loss: Tensor) -> None:
    """Of a loss that `model` gave to a pipeline. Raises ValueError if it has been scaled by a GradScaler."""
    factors = [factor for node in _products(loss) if (factor := _saved_factor(node)) is not None]
    if factors and any(factor is scaler._scale for scaler in _scalers.in_use(model) for factor in factors):
        raise ValueError(
            "the loss has been multiplied by a GradScaler, which knows nothing of rows: return the loss as it is, and "
            "pass the scaler to the pipeline: NestedPipeline(..., grad_scaler=scaler)"
        )


def _running_backward(frame: FrameType | None) -> tuple[FrameType | None, list[Tensor]]:
    """Who called the backward that is running, and the tensors that it started from: arguments of torch's Python
    functions further up."""
    starts = {torch.Tensor.backward.__code__: "self", torch.autograd.backward.__code__: "tensors"}
    roots: list[Tensor] = []
    while frame is not None and (not roots or frame.f_code in starts):  # a compiled backward has many frames of its own
        name = starts.get(frame.f_code)
        if name is not None:
            found = frame.f_locals.get(name)
            given: Iterable[Any] = [found] if isinstance(found, Tensor) else found or ()
            roots = [tensor for tensor in given if isinstance(tensor, Tensor)]
        frame = frame.f_back
    return frame, roots


def _products(root: Tensor) -> Iterator[Any]:
    """The last operations on a loss that multiply by something which has no gradient, divisions aside."""
    node: Any = root.grad_fn if root.numel() == 1 else None
    for _ in range(_MOST_NODES):
        if node is None or node.name() not in ("MulBackward0", "DivBackward0"):
            return
        inputs = [one for one, _ in node.next_functions]
        if node.name() == "MulBackward0" and None in inputs:
            yield node
        node = next((one for one in inputs if one is not None), None)


def _may_be_scaled(root: Tensor, node: Any, frame: FrameType | None, scales: Sequence[float]) -> bool:
    """Whether the factor of `node` is one of `scales`, divided by a small integer at most; True if nobody can tell,
    since no caller holds what was multiplied."""
    inner = next((one for one, _ in node.next_functions if one is not None), None)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        for value in list(frame.f_locals.values()):
            if isinstance(value, Tensor) and value.numel() == 1 and inner is not None and value.grad_fn is inner:
                before, after = float(value.detach()), float(root.detach())
                if before == 0 or after == 0:
                    return True
                parts = [scale * before / after for scale in scales]
                return any(0.5 < d < _MOST_PARTS and abs(d - round(d)) < 1e-3 for d in parts)
        frame = frame.f_back
    return True


def _saved_factor(node: Any) -> Tensor | None:
    for name in ("_saved_other", "_saved_self"):
        try:
            value = getattr(node, name, None)
        except RuntimeError:  # freed
            return None
        if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad:
            return value
    return None
