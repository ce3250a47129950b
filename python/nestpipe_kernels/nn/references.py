"""Where a model holds given objects outside of its module tree: in attributes, and lists, dicts, objects in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
_LEAVES = frozenset({str, bytes, int, float, bool, type(None)})
_WANTED = (nn.Module, Tensor, TableWeight)
_TREE = frozenset({*vars(nn.Module()), "origin", "_lender"})
_MOST_LEVELS = 20


@dataclass
class _Write:
    """What replaces a member of a list or dict."""

    container: Any
    key: Any
    old: Any
    value: Any
    place: str
    held: Any
    """An object to replace in `old`."""


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
        self._writes: list[_Write] = []
        self._place = "model"
        self._held: Any = None
        self.found: list[tuple[str, Any]] = []
        """(where, object), in the order of the search."""
        self.fixed: list[tuple[str, Any]] = []
        """The same for those that cannot be replaced: members of sets, keys of dicts, and what an optimizer holds."""
        self._walk()

    def replace(self, new: Callable[[Any], Any], refused: Callable[[Any, str], Exception]) -> None:
        """Put new(object) in place of every object found, but for those that are `fixed`: all of them, or none.

        Raises:
            What refused(object, why) returns: a container cannot be changed. Nothing has changed then.
        """
        self._new, self._writes = new, []
        done: list[_Write] = []
        try:
            self._walk()
            for write in self._writes:
                self._place, self._held = write.place, write.held
                done.append(write)
                write.container[write.key] = write.value
                if write.container[write.key] is not write.value:
                    raise TypeError("it does not keep what is assigned")
        except Exception as error:  # of a class of the user's
            for write in reversed(done):
                _put_back(write)
            kind = f"{type(error).__name__}: {error}"
            raise refused(self._held, f"{self._place} holds it in what cannot be changed ({kind})") from error
        finally:
            self._new, self._writes = None, []

    def _walk(self) -> None:
        self._seen = set()
        for path, module in self._model.named_modules():
            for name, value in list(vars(module).items()):
                if name not in _TREE:
                    place = ".".join(part for part in ("model", path, name) if part)
                    self._change(vars(module), name, value, place, 0)

    def _visit(self, value: Any, place: str, level: int) -> Any:
        """`value`, or what replaces it; what changes in containers is noted, tuples are rebuilt."""
        if isinstance(value, _WANTED) and self._wanted(value):
            if self._new is None:
                self.found.append((place, value))
                return value
            self._held = value
            return self._new(value)
        if isinstance(value, (*_ATOMS, nn.Module)) or level > _MOST_LEVELS:
            return value
        if isinstance(value, tuple):
            parts = [self._visit(item, f"{place}[{k}]", level + 1) for k, item in enumerate(value)]
            if all(new is old for new, old in zip(parts, value)):
                return value
            self._place = place
            return _rebuilt(value, parts)
        if id(value) in self._seen:
            return value
        self._seen.add(id(value))
        if isinstance(value, torch.optim.Optimizer):
            self._note_fixed(value.param_groups, place, level)
        elif isinstance(value, list):
            for k, item in enumerate(value):
                if type(item) in _LEAVES:  # lists of numbers may be long
                    continue
                self._change(value, k, item, f"{place}[{k}]", level + 1)
        elif isinstance(value, dict):
            self._note_fixed(list(value), place, level)
            for key, item in list(value.items()):
                self._change(value, key, item, f"{place}[{key!r}]", level + 1)
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
            self._change(attributes, name, item, f"{place}.{name}", level + 1)

    def _change(self, container: Any, key: Any, item: Any, place: str, level: int) -> None:
        """Note what is to be written into a container; nothing where its member stays."""
        changed = self._visit(item, place, level)
        if changed is not item:
            self._writes.append(_Write(container, key, item, changed, place, self._held))

    def _note_fixed(self, tree: Any, place: str, level: int) -> None:
        if self._new is None:
            self.fixed += [
                (place, item) for item in _members(tree, level) if isinstance(item, _WANTED) and self._wanted(item)
            ]


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    """A tuple of the same class with other members. Raises what its class raises, TypeError if it has others then."""
    made = type(value)._make(parts) if hasattr(value, "_fields") else type(value)(parts)
    if len(made) != len(parts) or any(new is not part for new, part in zip(made, parts)):
        raise TypeError(f"{type(value).__name__} has other members than it is made of")
    getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))
    return made


def _put_back(write: _Write) -> None:
    kind = next((base for base in (list, dict) if isinstance(write.container, base)), None)
    assert kind is not None
    kind.__setitem__(write.container, write.key, write.old)  # not the class's own, which may raise


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
