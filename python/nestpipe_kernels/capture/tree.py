"""How a batch (or a model's output) is taken apart and put together: kinds of leaves, containers, paths for errors."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import functools
import pathlib
import types
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe_kernels.ops._arrays import as_tensor
from nestpipe_kernels.types import JaggedLike, KeyedJaggedLike

__all__ = [
    "Path",
    "Step",
    "arrays_as_tensors",
    "children",
    "format_path",
    "is_jagged",
    "is_keyed_jagged",
    "is_keyed_tensor",
    "is_namedtuple",
    "rebuild",
    "walk",
]

_OPAQUE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    range,
    set,
    frozenset,
    type,
    enum.Enum,
    np.generic,
    np.ndarray,
    np.dtype,
    np.random.Generator,
    datetime.date,
    datetime.timedelta,
    pathlib.PurePath,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.Generator,
    nn.Module,
    Tensor,
)


class Step(NamedTuple):
    """One step from a container to a child."""

    kind: str
    """"key", "index" or "attribute"."""
    name: Any


Path = tuple[Step, ...]


def format_path(path: Path, root: str = "batch") -> str:
    """`batch['mask'][1].ids`."""
    return root + "".join(f".{step.name}" if step.kind == "attribute" else f"[{step.name!r}]" for step in path)


@functools.lru_cache(maxsize=4096)
def _follows(cls: Any, protocol: Any) -> bool:
    """Whether a class has a protocol's methods; asked once per class, since isinstance with a protocol is slow."""
    return not issubclass(cls, Tensor) and issubclass(cls, protocol)


def is_keyed_jagged(value: Any) -> bool:
    """A KeyedJaggedTensor, ours or TorchRec's."""
    return _follows(type(value), KeyedJaggedLike)  # type: ignore[arg-type]


def is_jagged(value: Any) -> bool:
    """A JaggedTensor, ours or TorchRec's (and not a keyed one)."""
    return _follows(type(value), JaggedLike) and not hasattr(value, "stride")  # type: ignore[arg-type]


def is_keyed_tensor(value: Any) -> bool:
    """A KeyedTensor, ours or TorchRec's: keys, length_per_key, one matrix of values."""
    return all(hasattr(value, name) for name in ("keys", "values", "length_per_key", "regroup")) and not hasattr(
        value, "lengths"
    )


def is_namedtuple(value: Any) -> bool:
    """Whether a value is an instance of a namedtuple class."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _attribute_names(value: Any) -> list[str]:
    names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names.extend([slots] if isinstance(slots, str) else slots)
    names.extend(getattr(value, "__dict__", {}))
    hidden = ("__dict__", "__weakref__")
    return [name for name in dict.fromkeys(names) if name not in hidden and hasattr(value, name)]


def children(value: Any) -> list[tuple[Step, Any]] | None:
    """The children of a container in traversal order, or None for a leaf.

    Containers: dict and UserDict, list, tuple, namedtuple, dataclass (also frozen or with slots), and any other plain
    object with attributes. Tensors, arrays, jagged and keyed tensors, scalars, strings, functions, modules are leaves.
    """
    if isinstance(value, dict | UserDict):
        return [(Step("key", key), child) for key, child in value.items()]
    if is_namedtuple(value):
        return [(Step("attribute", name), getattr(value, name)) for name in value._fields]
    if isinstance(value, list | tuple):
        return [(Step("index", index), child) for index, child in enumerate(value)]
    if isinstance(value, _OPAQUE) or callable(value) or hasattr(value, "__array__"):
        return None
    if is_keyed_jagged(value) or is_jagged(value) or is_keyed_tensor(value):
        return None
    names = _attribute_names(value)
    return [(Step("attribute", name), getattr(value, name)) for name in names] if names else None


def rebuild(value: Any, new_children: list[Any]) -> Any:
    """A container like `value` with other children, in the order of `children(value)`."""
    if is_namedtuple(value):
        return type(value)(*new_children)
    if type(value) in (list, tuple):
        return type(value)(new_children)
    result = copy.copy(value)
    if isinstance(value, list):
        result[:] = new_children
    elif isinstance(value, tuple):
        return type(value)(new_children)
    elif isinstance(value, dict | UserDict):
        for key, child in zip(value, new_children):
            result[key] = child
    else:
        for name, child in zip(_attribute_names(value), new_children):
            object.__setattr__(result, name, child)
    return result


def arrays_as_tensors(value: Any, parents: tuple[int, ...] = ()) -> Any:
    """A batch with tensors in place of arrays that speak DLPack (CuPy's), of the same memory; NumPy's stay, as models
    may want them so. The batch itself, where it has none. Raises TypeError as as_tensor."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value
    if hasattr(value, "__dlpack__"):
        return as_tensor(value)
    parts = () if id(value) in parents else children(value) or ()
    after = [arrays_as_tensors(child, (*parents, id(value))) for _, child in parts]
    return rebuild(value, after) if any(new is not old for new, (_, old) in zip(after, parts)) else value


def walk(value: Any, cycle: Callable[[Path], Exception], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every container and leaf with its path, parents first.

    Args:
        cycle: makes the error to raise when an object contains itself.
    """
    yield from _walk(value, cycle, path, ())


def _walk(
    value: Any, cycle: Callable[[Path], Exception], path: Path, parents: tuple[int, ...]
) -> Iterator[tuple[Path, Any]]:
    if id(value) in parents:
        raise cycle(path)
    yield path, value
    for step, child in children(value) or ():
        yield from _walk(child, cycle, (*path, step), (*parents, id(value)))
