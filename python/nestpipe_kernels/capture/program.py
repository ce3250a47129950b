"""What capture found, as a program: how to make each module's inputs from a batch of any size, without the model.

A program is plain data (it can be pickled and sent to a rank that had no data): recorded operations in program order,
batch tensors by path, constants, and per call the recipe of the features. Integers that scale with the batch size B
are `Affine`, a * B + b.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.capture.bags import make_jagged, make_keyed, take_keys
from nestpipe_kernels.capture.recipes import (
    Affine,
    AffineTensor,
    BatchItem,
    Built,
    Container,
    Features,
    FromBags,
    RepeatedTensor,
    Scalar,
    Traced,
)
from nestpipe_kernels.capture.tape import Leaf, Reference, short_name, tensors_in
from nestpipe_kernels.capture.tree import Path, children, format_path, is_jagged, is_keyed_jagged, rebuild
from nestpipe_kernels.errors import CaptureError

__all__ = ["Call", "Program", "ProgramOperation", "find", "kind_of"]


# ------------------------------------------------------------------------------------------------------ program


@dataclass
class ProgramOperation:
    """One operation to repeat. The function is looked up by name, so that programs can be pickled."""

    position: int
    function: Any
    args: Any
    kwargs: Any
    outputs: tuple[int, ...]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.function, torch._ops.OpOverload):
            state["function"] = (self.function.namespace, self.function._opname, self.function._overloadname)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["function"], tuple):
            namespace, name, overload = state["function"]
            packet = getattr(getattr(torch.ops, namespace), name, None)
            if packet is None and namespace == "fbgemm":
                importlib.import_module("fbgemm_gpu")
                packet = getattr(torch.ops.fbgemm, name)
            state["function"] = getattr(packet, overload or "default")
        self.__dict__.update(state)


@dataclass
class Call:
    """One lookup of a module: which, how often before, after how many operations, and what it receives."""

    module: str
    index: int
    position: int
    features: Features


@dataclass
class Program:
    """Operations and calls in program order, and where the values come from that no operation makes."""

    operations: list[ProgramOperation] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    leaves: dict[int, tuple[Leaf, str]] = field(default_factory=dict)
    constants: dict[int, Tensor | AffineTensor | RepeatedTensor] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)
    """Names of those constants that are buffers of the model."""

    def run(self, batch: Any, size: int) -> list[Any]:
        """The features of each call, in call order."""
        values: dict[int, Tensor] = {}
        results, place = [], 0
        with torch.no_grad():
            for call in self.calls:
                while place < len(self.operations) and self.operations[place].position < call.position:
                    self._apply(self.operations[place], values, batch, size)
                    place += 1
                results.append(self._make(call.features, values, batch, size))
        return results

    def _apply(self, operation: ProgramOperation, values: dict[int, Tensor], batch: Any, size: int) -> None:
        args = self._decode(operation.args, values, batch, size)
        kwargs = self._decode(operation.kwargs, values, batch, size)
        try:
            result = operation.function(*args, **kwargs)
        except Exception as error:
            raise CaptureError(
                f"capture: {operation.function}, on the way to an embedding input, failed for a batch of {size} "
                f"samples ({type(error).__name__}: {error}); make all batches alike, or "
                "pass PipelineConfig(sparse_inputs=...)"
            ) from error
        values.update(zip(operation.outputs, tensors_in(result)))

    def _decode(self, tree: Any, values: dict[int, Tensor], batch: Any, size: int) -> Any:
        if isinstance(tree, Reference):
            return self._value(tree.number, values, batch, size)
        if isinstance(tree, Affine):
            return tree.at(size)
        if isinstance(tree, list):
            return [self._decode(item, values, batch, size) for item in tree]
        if isinstance(tree, dict):
            return {key: self._decode(item, values, batch, size) for key, item in tree.items()}
        return tree

    def _value(self, number: int, values: dict[int, Tensor], batch: Any, size: int) -> Tensor:
        if number not in values:
            if number in self.leaves:
                values[number] = read_leaf(batch, *self.leaves[number])
            else:
                constant = self.constants[number]
                values[number] = constant if isinstance(constant, Tensor) else constant.at(size)
        return values[number]

    def _make(self, recipe: Features, values: dict[int, Tensor], batch: Any, size: int) -> Any:
        if isinstance(recipe, BatchItem):
            return find(batch, recipe.path, recipe.kind)
        if isinstance(recipe, FromBags):
            return _from_bags(recipe, batch)
        if isinstance(recipe, Traced):
            tensor = self._value(recipe.number, values, batch, size)
            return tensor.clone() if recipe.copied else tensor
        if isinstance(recipe, Scalar):
            return recipe.value.at(size) if isinstance(recipe.value, Affine) else recipe.value
        if isinstance(recipe, Container):
            return rebuild(recipe.template, [self._make(part, values, batch, size) for part in recipe.parts])
        parts = [None if p is None else self._make(p, values, batch, size) for p in (recipe.values, recipe.weights)]
        lengths = self._make(recipe.lengths, values, batch, size)
        assert parts[0] is not None
        if recipe.weighted and parts[1] is None:
            parts[1] = torch.ones(parts[0].shape[0], device=parts[0].device)
        if recipe.keys is None:
            return make_jagged(recipe.cls, parts[0], parts[1], lengths)
        return make_keyed(recipe.cls, recipe.keys, parts[0], parts[1], lengths)

    def describe(self, call: Call) -> str:
        """In words, where a call's features come from."""
        steps: list[str] = []
        for item in _recipe_parts(call.features):
            if isinstance(item, BatchItem):
                steps.append(format_path(item.path))
            elif isinstance(item, FromBags):
                steps.append(f"{', '.join(item.keys)} of {format_path(item.path)}")
            elif isinstance(item, Traced):
                steps.extend(self._describe_value(item.number))
        return ", ".join(dict.fromkeys(steps)) or "constants"

    def _describe_value(self, number: int) -> list[str]:
        sources, names, wanted = [], [], {number}
        for operation in reversed(self.operations):
            if wanted.isdisjoint(operation.outputs):
                continue
            names.append(short_name(operation.function))
            wanted.update(n for n in _references((operation.args, operation.kwargs)))
        for leaf in sorted(str(self.leaves[n][0]) for n in wanted if n in self.leaves):
            sources.append(leaf)
        return [" -> ".join([" and ".join(dict.fromkeys(sources)) or "constants", *dict.fromkeys(names[::-1])])]


def _references(tree: Any) -> Iterator[int]:
    if isinstance(tree, Reference):
        yield tree.number
    elif isinstance(tree, list | tuple) and not isinstance(tree, Affine):
        for item in tree:
            yield from _references(item)
    elif isinstance(tree, dict):
        yield from _references(list(tree.values()))


def _recipe_parts(recipe: Any) -> Iterator[Any]:
    if isinstance(recipe, Container):
        for part in recipe.parts:
            yield from _recipe_parts(part)
    elif isinstance(recipe, Built):
        yield from (part for part in (recipe.values, recipe.weights, recipe.lengths) if part is not None)
    else:
        yield recipe


# ------------------------------------------------------------------------------------------------ reading a batch


def kind_of(value: Any) -> str:
    """What a batch must have at a path: the kind of leaf, or the class of a container."""
    if isinstance(value, Tensor):
        return "Tensor"
    if is_keyed_jagged(value):
        return "KeyedJaggedTensor"
    if is_jagged(value):
        return "JaggedTensor"
    return "numpy array" if isinstance(value, np.ndarray) else type(value).__name__


def find(batch: Any, path: Path, kind: str) -> Any:
    """The object at a path of the batch.

    Raises:
        CaptureError: there is none, or it is of another kind.
    """
    value = batch
    for place, step in enumerate(path):
        parts = dict(children(value) or [])
        if step not in parts:
            has = [child.name for child in parts] if parts else "no parts"
            raise CaptureError(
                f"capture: {format_path(path[: place + 1])} is missing; expected the structure of the batch that was "
                f"captured, got {type(value).__name__} with {has}; make all batches alike, or "
                "pass PipelineConfig(sparse_inputs=...)"
            )
        value = parts[step]
    if kind_of(value) != kind:
        raise CaptureError(
            f"capture: {format_path(path)} must be a {kind}, as in the batch that was captured, got {kind_of(value)}; "
            f"make all batches alike, or "
            "pass PipelineConfig(sparse_inputs=...)"
        )
    return value


def read_leaf(batch: Any, leaf: Leaf, kind: str) -> Tensor:
    """A tensor of the batch."""
    item = find(batch, leaf.path, kind)
    if leaf.component == "self":
        return item  # type: ignore[no-any-return]
    tensor = item.weights_or_none() if leaf.component == "weights" else getattr(item, leaf.component)()
    if tensor is None:
        raise CaptureError(
            f"capture: {format_path(leaf.path)} must have weights, as in the batch that was captured, got none; make "
            f"all batches alike, or pass PipelineConfig(sparse_inputs=...)"
        )
    return tensor  # type: ignore[no-any-return]


def _from_bags(recipe: FromBags, batch: Any) -> Any:
    keyed = find(batch, recipe.path, "KeyedJaggedTensor")
    missing = [key for key in recipe.keys if key not in list(keyed.keys())]
    if missing:
        raise CaptureError(
            f"capture: {format_path(recipe.path)} has no key {missing[0]!r}, which the captured batch had; got keys "
            f"{list(keyed.keys())}; make all batches alike, or "
            "pass PipelineConfig(sparse_inputs=...)"
        )
    taken = take_keys(keyed, recipe.keys)
    if recipe.component == "keyed":
        return taken
    if recipe.component == "jagged":
        assert recipe.cls is not None
        return make_jagged(recipe.cls, taken.values(), taken.weights_or_none(), taken.lengths())
    return taken.weights_or_none() if recipe.component == "weights" else getattr(taken, recipe.component)()
