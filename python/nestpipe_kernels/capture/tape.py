"""The tape: every tensor operation of one probe forward, and where each tensor comes from.

A dispatch mode sees each operation below autograd, with plain integers for sizes. Tensors are known by identity, so
the tape keeps all of them alive until the probe is over. What depends on parameters, embedding outputs or random
numbers is *tainted* with the name of its source and is not recorded. Writes in place are recorded like any other
operation: replaying the operations in program order repeats them, aliases included. The unit of a write is the storage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nestpipe_kernels.capture.tree import Path, format_path, is_jagged, is_keyed_jagged, walk

__all__ = ["Leaf", "Operation", "Reference", "Tape", "TapeMode", "Value", "short_name", "tensors_in"]

# Written by schema, yet no data changes.
_NO_WRITE = frozenset({"aten::detach_", "aten::lift_fresh", "aten::requires_grad_"})


class Leaf(NamedTuple):
    """A tensor of the batch: the object at `path` itself, or a component of the jagged object there."""

    path: Path
    component: str
    """"self", "values", "lengths", "offsets" or "weights"."""

    def __str__(self) -> str:
        return format_path(self.path) + ("" if self.component == "self" else f".{self.component}()")


class Reference(NamedTuple):
    """A tensor argument of a recorded operation: the number of its value."""

    number: int


@dataclass(eq=False)
class Value:
    """A tensor that a probe has seen."""

    tensor: Tensor
    origin: str
    """"batch", "buffer", "constant" or "operation"."""
    storage: int
    taint: str | None = None
    leaf: Leaf | None = None
    buffer: str | None = None

    def __str__(self) -> str:
        if self.leaf is not None:
            return str(self.leaf)
        return f"buffer '{self.buffer}'" if self.buffer is not None else "a constant tensor"


@dataclass(eq=False)
class Operation:
    """One recorded operation; tensors among the arguments are References."""

    function: Any
    args: Any
    kwargs: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    """Value numbers, in order of the flattened result."""
    created: frozenset[int]
    """The outputs that did not exist before."""
    written: frozenset[int]
    """Storages that it writes in place."""

    @property
    def name(self) -> str:
        return str(self.function).removesuffix(".default")


def short_name(function: Any) -> str:
    """`slice` of `aten.slice.Tensor`."""
    parts = str(function).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return -id(tensor)


@dataclass(eq=False)
class Tape:
    """What one probe has recorded."""

    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    objects: dict[int, tuple[Any, Path]] = field(default_factory=dict)
    """Containers, jagged objects and tensors of the batch by id."""
    taken: dict[tuple[int, str], Any] = field(default_factory=dict)
    """Single keys taken out of the batch's keyed jagged objects so far, by id of the object."""
    on_write: Callable[[Tensor], None] | None = None
    """Called with a parameter before an operation writes to it."""
    paused: bool = False
    size: int = 0
    """Samples of the probe's batch."""
    pairs: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """Results with two dims that are multiples of the batch size: (operation, the multiples) -> where."""
    _numbers: dict[int, int] = field(default_factory=dict)
    _storage_taints: dict[int, str] = field(default_factory=dict)
    _parameters: dict[int, Tensor] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------- registration

    def add_batch(self, batch: Any) -> None:
        """Make the batch's objects known."""
        for path, item in walk(batch, lambda p: ValueError(f"capture: {format_path(p)} contains itself")):
            keyed = is_keyed_jagged(item) or is_jagged(item)
            if isinstance(item, Tensor):
                self._add(item, "batch", leaf=Leaf(path, "self"))
            elif keyed:
                parts = {"values": item.values(), "lengths": item.lengths(), "weights": item.weights_or_none()}
                parts["offsets"] = item.offsets()
                for component, tensor in parts.items():
                    if tensor is not None:
                        self._add(tensor, "batch", leaf=Leaf(path, component))
            if (
                keyed
                or isinstance(item, Tensor)
                or (hasattr(item, "__dict__") or isinstance(item, list | tuple | dict))
            ):
                self.objects.setdefault(id(item), (item, path))

    def add_model(self, model: nn.Module) -> None:
        """Make parameters (tainted) and buffers known."""
        for name, parameter in model.named_parameters():
            self.taint(parameter, f"parameter '{name}'")
            self._parameters[_storage(parameter)] = parameter
        for name, buffer in model.named_buffers():
            self._add(buffer, "buffer", buffer=name)

    def taint(self, tensor: Tensor, source: str) -> None:
        """Everything computed from a tensor not known so far depends on `source`."""
        if id(tensor) not in self._numbers:
            self._add(tensor, "constant", taint=source)
            self._storage_taints.setdefault(_storage(tensor), source)

    def _add(self, tensor: Tensor, origin: str, **more: Any) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = len(self.values)
            self.values.append(Value(tensor, origin, _storage(tensor), **more))
            self._numbers[id(tensor)] = number
        return number

    def number(self, tensor: Tensor) -> int:
        """The value number of a tensor; one that was never seen is a constant."""
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        trainable = "a trainable tensor that is not a parameter of the model" if tensor.requires_grad else None
        return self._add(tensor, "constant", taint=trainable)

    def taint_of(self, number: int) -> str | None:
        """Why a value cannot be replayed, or None."""
        value = self.values[number]
        return value.taint or self._storage_taints.get(value.storage)

    # ---------------------------------------------------------------------------------------------- recording

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Operations inside are not recorded."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation and record it."""
        targets = _write_targets(function, args, kwargs)
        for tensor in targets:
            parameter = self._parameters.get(_storage(tensor))
            if parameter is not None and self.on_write is not None:
                self.on_write(parameter)
        inputs = tuple(dict.fromkeys(self.number(tensor) for tensor in tensors_in((args, kwargs))))
        taint = next((source for source in map(self.taint_of, inputs) if source is not None), None)
        if taint is None and torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            taint = f"random numbers ({str(function).removesuffix('.default')})"
        result = function(*args, **kwargs)
        outputs = list(tensors_in(result))
        for tensor in outputs:
            if tensor.dim() > 1:
                self._note_pairs(function, tensor)
        written = frozenset(_storage(tensor) for tensor in targets)
        if taint is not None:
            for tensor in outputs:
                self._add(tensor, "operation", taint=taint)
            for storage in written:
                self._storage_taints.setdefault(storage, taint)
            return result
        created = {id(tensor) for tensor in outputs if id(tensor) not in self._numbers}
        numbers = tuple(self._add(tensor, "operation") for tensor in outputs)
        self.operations.append(
            Operation(
                function,
                self._encode(args),
                self._encode(kwargs),
                inputs,
                numbers,
                frozenset(self._numbers[key] for key in created),
                written,
            )
        )
        return result

    def _note_pairs(self, function: Any, tensor: Tensor) -> None:
        multiples = [n // self.size for n in tensor.shape if self.size and n and n % self.size == 0]
        for key in {(short_name(function), a, b) for k, a in enumerate(multiples) for b in multiples[k + 1 :]}:
            if key not in self.pairs:
                self.pairs[key] = _place()

    def _encode(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return Reference(self._numbers[id(tree)])
        if isinstance(tree, list | tuple):
            return [self._encode(item) for item in tree]
        if isinstance(tree, dict):
            return {key: self._encode(item) for key, item in tree.items()}
        return tree

    # ------------------------------------------------------------------------------------------------ slicing

    def slice(self, number: int, position: int) -> list[int]:
        """The operations before `position` that value `number` depends on, ascending; writes to its memory included."""
        values, storages, needed = {number}, {self.values[number].storage}, []
        for place in range(position - 1, -1, -1):
            operation = self.operations[place]
            if values.isdisjoint(operation.created) and storages.isdisjoint(operation.written):
                continue
            needed.append(place)
            values.update(operation.inputs)
            storages.update(self.values[n].storage for n in operation.inputs)
        return needed[::-1]


class TapeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operation of this thread to a tape."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, torch's default, imports the whole compiler at the first operation: seconds.

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tape.paused:
            return function(*args, **(kwargs or {}))
        return self.tape.run(function, args, kwargs or {})


def _place() -> str:
    """`Class.forward, model.py:31`: the innermost line on the stack that is neither torch's nor of this package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code, owner = frame.f_code, frame.f_locals.get("self")
        if not str(frame.f_globals.get("__name__", "")).startswith(("torch.", "nestpipe_kernels.capture")):
            kind = f"{type(owner).__name__}." if isinstance(owner, nn.Module) else ""
            return f"{kind}{code.co_name}, {os.path.basename(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the model"


def _write_targets(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    schema = getattr(function, "_schema", None)
    if schema is None or schema.name in _NO_WRITE or not schema.is_mutable:
        return []
    targets: list[Tensor] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name) if argument.name in kwargs else args[place] if place < len(args) else None
            targets.extend(tensors_in(given))
    return targets
