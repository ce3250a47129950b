"""The dense side of a pipeline: which parameters it averages over ranks, and what its optimizer must be like."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from nestpipe_kernels.capture.modules import plain_name

__all__ = ["check_optimizer", "dense_parameters", "exchanged_at_once"]

_MOST_BYTES_AT_ONCE = 1 << 16


def dense_parameters(model: nn.Module, optimizer: Any) -> list[tuple[str, nn.Parameter]]:
    """The parameters whose gradients the pipeline averages, by name.

    Those of the model that require a gradient, and all that the optimizer holds: frozen ones may be unfrozen later,
    and a loss function may have its own.

    Raises:
        ValueError: a parameter is complex; names it.
    """
    held = {
        id(parameter): (f"dense_optimizer.param_groups[{g}][{k}]", parameter)
        for g, group in enumerate(getattr(optimizer, "param_groups", ()))
        for k, parameter in enumerate(group["params"])
    }
    found = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad or id(p) in held]
    own = {id(p) for p in model.parameters()}
    found += [named for key, named in held.items() if key not in own]
    for name, parameter in found:
        if parameter.is_complex():
            raise ValueError(
                f"NestedPipeline: parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}; dense gradients "
                "travel as real numbers: hold its torch.view_as_real as the parameter, use torch.view_as_complex of it"
            )
    return found


def exchanged_at_once(parameters: Sequence[tuple[str, nn.Parameter]], world_size: int) -> bool:
    """Whether averaging in one exchange sends no more than in two (up to two ranks), or little."""
    sent = sum(4 * parameter.numel() for _, parameter in parameters) * (world_size - 1)
    return world_size <= 2 or sent <= _MOST_BYTES_AT_ONCE


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot take a step by itself.

    Raises:
        TypeError: no `step` method, or one that needs arguments, as LBFGS needs a closure.
    """
    if optimizer is None:
        return
    step = getattr(optimizer, "step", None)
    if not callable(step):
        raise TypeError(
            f"NestedPipeline: dense_optimizer must have a step() method, got {type(optimizer).__name__}; "
            "row optimizers belong to the embedding modules; for several dense ones pass an object whose step() calls "
            "theirs"
        )
    if getattr(step, "_wrapped_by_lr_sched", False) and hasattr(step, "__wrapped__"):
        # torch's schedulers put a plain function into the optimizer, whose signature claims to need self
        step = step.__wrapped__.__get__(optimizer)
    try:
        wanted = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # written in C: the first step will tell
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [p.name for p in wanted if p.default is inspect.Parameter.empty and p.kind not in kinds]
    if missing:
        raise TypeError(
            f"NestedPipeline: {type(optimizer).__name__}.step() needs {', '.join(missing)}; a pipeline computes every "
            "batch once, so use an optimizer whose step() takes no arguments, such as torch.optim.Adam"
        )
