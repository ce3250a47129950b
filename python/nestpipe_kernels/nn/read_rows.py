"""Rows read from a table as a tensor whose in-place changes, which would be lost, are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ReadRows", "guarded", "written"]

_ALLOWED = ("requires_grad_", "share_memory_")
_AUGMENTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")


class ReadRows(Tensor):
    """A copy of rows, or a view of one. What is computed from it is an ordinary tensor; views of it are such again."""

    refused: Callable[[str], Exception]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(function, "__name__", str(function))
        for one in written(name, args, given):
            if isinstance(one, ReadRows):
                raise one.refused(name)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **given)
            return _views(result, [one for one in (*args, *given.values()) if isinstance(one, ReadRows)])

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _augmented(name: str) -> Callable[[ReadRows, Any], Any]:
    def refuse(self: ReadRows, other: Any) -> Any:
        raise self.refused(name)  # in torch's own method Python would go on without it, to a new tensor

    return refuse


for _name in _AUGMENTED:
    setattr(ReadRows, f"__i{_name}__", _augmented(f"__i{_name}__"))


def guarded(rows: Tensor, refused: Callable[[str], Exception]) -> Tensor:
    """The same tensor, refusing in-place operations with refused(name of the operation).

    In code that torch.compile traces, as it is: what is written to it there is written to a copy, and lost.
    """
    if torch.compiler.is_dynamo_compiling():
        return rows
    made = rows.as_subclass(ReadRows)
    made.refused = refused
    return made


def written(name: str, args: Any, given: Any) -> list[Any]:
    """What an operation of torch writes to, among its arguments."""
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    target = args[0] if args else next(iter(given.values()), None)
    found = [target] if in_place and name not in _ALLOWED else []
    found.append(given.get("out"))
    return [one for group in found for one in (group if isinstance(group, (list, tuple)) else [group])]


def _views(result: Any, rows: list[ReadRows]) -> Any:
    """A result, guarded where it has the memory of some rows."""
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        return type(result)(_views(one, rows) for one in result)
    if not isinstance(result, Tensor) or isinstance(result, ReadRows):
        return result
    for one in rows:
        if one.layout is result.layout is torch.strided and _memory(one) == _memory(result):
            return guarded(result, one.refused)
    return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
