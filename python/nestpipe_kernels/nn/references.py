"""Where a model holds given objects outside of its module tree: in attributes, and lists, dicts, objects in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe_kernels.nn.table_weight import TableWeight

__all__ = ["References"]

_ATOMS: tuple[Any, ...] = (
    *(str, bytes, int, float, complex, bool, type(None), type),
    *(Tensor, torch.dtype, torch.device, torch.Generator),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
)
_WANTED = (nn.Module, Tensor, TableWeight)
_TREE = frozenset(vars(nn.Module()))
_MOST_LEVELS = 20


class References:
    """References to some objects in the attributes of a model's modules.

    Args:
        model: what to search. Modules are searched by their own attributes, whatever refers to them.
        wanted: whether a module, tensor or table's weight is looked for.
    """

    def __init__(self, model: nn.Module, wanted: Callable[[Any], bool]) -> None:
        self._model, self._wanted = model, wanted
        self._seen: set[int] = set()
        self._new: Callable[[Any], Any] | None = None
        self.found: list[tuple[str, Any]] = []
        """(where, object), in the order of the search."""
        self.fixed: list[tuple[str, Any]] = []
        """The same for those that cannot be replaced: members of sets, keys of dicts, and what an optimizer holds."""
        self._walk()

    def replace(self, new: Callable[[Any], Any]) -> None:
        """Put new(object) in place of every object found, but for those that are `fixed`."""
        self._new = new
        self._walk()
        self._new = None

    def _walk(self) -> None:
        self._seen = set()
        for path, module in self._model.named_modules():
            for name, value in list(vars(module).items()):
                if name not in _TREE:
                    place = ".".join(part for part in ("model", path, name) if part)
                    changed = self._visit(value, place, 0)
                    if changed is not value:
                        vars(module)[name] = changed

    def _visit(self, value: Any, place: str, level: int) -> Any:
        """`value`, or what replaces it; containers are changed in place, tuples rebuilt."""
        if isinstance(value, _WANTED) and self._wanted(value):
            if self._new is None:
                self.found.append((place, value))
                return value
            return self._new(value)
        if isinstance(value, (*_ATOMS, nn.Module)) or level > _MOST_LEVELS:
            return value
        if isinstance(value, tuple):
            parts = [self._visit(item, f"{place}[{k}]", level + 1) for k, item in enumerate(value)]
            if all(new is old for new, old in zip(parts, value)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if id(value) in self._seen:
            return value
        self._seen.add(id(value))
        if isinstance(value, torch.optim.Optimizer):
            self._note_fixed(value.param_groups, place, level)
        elif isinstance(value, list):
            for k, item in enumerate(value):
                value[k] = self._visit(item, f"{place}[{k}]", level + 1)
        elif isinstance(value, dict):
            self._note_fixed(list(value), place, level)
            for key, item in list(value.items()):
                changed = self._visit(item, f"{place}[{key!r}]", level + 1)
                if changed is not item:
                    value[key] = changed
        elif isinstance(value, (set, frozenset)):
            self._note_fixed(list(value), place, level)
        else:
            self._attributes(value, place, level)
        return value

    def _attributes(self, value: Any, place: str, level: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or type(value).__module__.startswith("torch."):
            return
        for name, item in list(attributes.items()):
            changed = self._visit(item, f"{place}.{name}", level + 1)
            if changed is not item:
                attributes[name] = changed

    def _note_fixed(self, tree: Any, place: str, level: int) -> None:
        if self._new is None:
            self.fixed += [
                (place, item) for item in _members(tree, level) if isinstance(item, _WANTED) and self._wanted(item)
            ]


def _members(tree: Any, level: int) -> Iterator[Any]:
    if level > _MOST_LEVELS:
        return
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _members(item, level + 1)
    else:
        yield tree
