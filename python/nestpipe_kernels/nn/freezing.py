"""requires_grad_ of modules that contain tables: torch's would skip the tables, which are no parameters."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from nestpipe_kernels.nn.drop_in import TableModule

__all__ = ["unwatch", "watch"]


def requires_grad_(self: nn.Module, requires_grad: bool = True) -> Any:
    """As nn.Module.requires_grad_. Raises TypeError if a table in it is not so already; nothing has changed then."""
    for module in self.modules():
        if isinstance(module, TableModule):
            module.check_trainable(requires_grad)
    return type(self).requires_grad_(self, requires_grad)


def watch(model: nn.Module) -> None:
    """Have every module of `model` that contains a table refuse to freeze or thaw it."""
    for module in model.modules():
        inside = any(isinstance(part, TableModule) for part in module.modules())
        if inside and not isinstance(module, TableModule):
            vars(module).setdefault("requires_grad_", MethodType(requires_grad_, module))


def unwatch(model: nn.Module) -> None:
    """Undo `watch`."""
    for module in model.modules():
        if getattr(vars(module).get("requires_grad_"), "__func__", None) is requires_grad_:
            del vars(module)["requires_grad_"]
