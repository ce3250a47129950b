"""The parameter of a module that was converted: whoever still uses it is told so, and it can be put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["give_back", "take_away"]


class ReplacedWeight(nn.Parameter):
    """A parameter whose rows are in a store now; every operation on it raises."""

    table_name: str

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = [*args, *(kwargs or {}).values()]
        held += [item for group in held if isinstance(group, (list, tuple)) for item in group]
        name = next((item.table_name for item in held if isinstance(item, ReplacedWeight)), "?")
        if function is Tensor.__repr__:
            return f"ReplacedWeight({name!r})"
        raise RuntimeError(
            f"convert: the parameter of {name!r} has been replaced, its rows are in a store that nk.optim updates, but "
            "something still uses it. An optimizer: make it after nk.convert, or pass it there as dense_optimizer. A "
            f"loss or a layer: read model.{name}.weight where it is used"
        )


def take_away(parameter: nn.Parameter, name: str) -> None:
    """Free a parameter's values; what uses it from now on raises RuntimeError, naming module `name`."""
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=parameter.dtype)
    parameter.__class__ = ReplacedWeight
    parameter.table_name = name  # type: ignore[attr-defined]


def give_back(parameter: nn.Parameter, values: Tensor) -> None:
    """Make it an ordinary parameter with these values."""
    if isinstance(parameter, ReplacedWeight):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter.table_name
    parameter.data = values.to(parameter.dtype)
