"""What an embedding module received in a probe, and comparing features."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.capture.bags import make_jagged, take_keys
from nestpipe_kernels.capture.program import kind_of
from nestpipe_kernels.capture.recipes import BatchItem, FromBags
from nestpipe_kernels.capture.tape import Tape
from nestpipe_kernels.capture.tree import children, is_jagged, is_keyed_jagged, rebuild

__all__ = ["Received", "receive", "same_features"]


def same_features(a: Any, b: Any, weights: bool = True) -> bool:
    """Whether two inputs of an embedding module ask for the same keys, bags and weights.

    The same object is the same at once; else tensors are compared by dtype and value (on a device this waits for it),
    jagged objects by keys, values, lengths and weights, containers part by part.

    Args:
        weights: False compares only whether jagged objects have weights, not which.
    """
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _same_tensor(a, b)
    if is_keyed_jagged(a) or is_jagged(a):
        if is_keyed_jagged(a) != is_keyed_jagged(b) or is_jagged(a) != is_jagged(b):
            return False
        if is_keyed_jagged(a) and list(a.keys()) != list(b.keys()):
            return False
        mine, other = a.weights_or_none(), b.weights_or_none()
        if (mine is None) != (other is None) or (weights and mine is not None and not _same_tensor(mine, other)):
            return False
        return _same_tensor(a.values(), b.values()) and _same_lengths(a.lengths(), b.lengths())
    parts, others = children(a), children(b)
    if parts is None or others is None:
        return type(a) is type(b) and bool(a == b)
    return (
        type(a) is type(b)
        and [step for step, _ in parts] == [step for step, _ in others]
        and all(same_features(x, y, weights) for (_, x), (_, y) in zip(parts, others))
    )


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.detach(), b.detach().to(a.device))


def _same_lengths(a: Tensor, b: Tensor) -> bool:
    # int32 in one object and int64 in the other mean the same.
    return _same_tensor(a.to(torch.int64), b.to(torch.int64))


@dataclass
class Received:
    """Features of one call in one probe: everything known about where they come from.

    Exactly one of the groups applies: `item` (an object of the batch), a tensor (`number`), a jagged object (`cls`,
    `keys`, `components`), a container (`template`, `parts`), or a scalar.
    """

    kind: str
    item: BatchItem | None = None
    bags: list[FromBags] = field(default_factory=list)
    """Keys of KeyedJaggedTensors of the batch that have the same values."""
    number: int | None = None
    taint: str | None = None
    """The tensor's source of taint at the time of the call."""
    cls: type | None = None
    keys: tuple[str, ...] | None = None
    components: tuple[Received, Received | None, Received] | None = None
    template: Any = None
    steps: tuple[Any, ...] = ()
    parts: list[Received] = field(default_factory=list)
    scalar: Any = None


def receive(tape: Tape, features: Any) -> Received:
    """Describe an input; operations that read lengths out of it are recorded."""
    kind = kind_of(features)
    if id(features) in tape.objects:
        path = tape.objects[id(features)][1]
        received = Received(kind, item=BatchItem(path, kind))
        if isinstance(features, Tensor):
            received.number = tape.number(features)
            received.taint = tape.taint_of(received.number)
        return received
    if isinstance(features, Tensor):
        received = _tensor(tape, features)
        received.bags = _matching(tape, features) if received.taint is None else []
        return received
    if is_keyed_jagged(features) or is_jagged(features):
        values, weights, lengths = features.values(), features.weights_or_none(), features.lengths()
        return Received(
            kind,
            bags=_matching(tape, features),
            cls=type(features),
            keys=tuple(features.keys()) if is_keyed_jagged(features) else None,
            components=(
                _tensor(tape, values),
                None if weights is None else _tensor(tape, weights),
                _tensor(tape, lengths),
            ),
        )
    opened = children(features)
    if opened is None:
        return Received(kind, scalar=features)
    parts_of = [receive(tape, child) for _, child in opened]
    template = rebuild(features, [None] * len(opened))
    return Received(kind, template=template, steps=tuple(step for step, _ in opened), parts=parts_of)


def _tensor(tape: Tape, tensor: Tensor) -> Received:
    number = tape.number(tensor)
    return Received("Tensor", number=number, taint=tape.taint_of(number))


def _matching(tape: Tape, features: Any) -> list[FromBags]:
    """Which keys of the batch's KeyedJaggedTensors hold exactly these features."""
    found: list[FromBags] = []
    with tape.pause(), torch.no_grad():
        for keyed, path in tape.objects.values():
            if not is_keyed_jagged(keyed):
                continue
            if is_keyed_jagged(features):
                keys = tuple(features.keys())
                if set(keys) <= set(keyed.keys()) and same_features(take_keys(keyed, keys), features):
                    found.append(FromBags(path, keys, "keyed"))
                continue
            for key in list(keyed.keys()):
                taken = tape.taken.get((id(keyed), key))
                if taken is None:
                    taken = tape.taken.setdefault((id(keyed), key), take_keys(keyed, [key]))
                found.extend(_matching_key(taken, features, path, key))
    return found


def _matching_key(taken: Any, features: Any, path: Any, key: str) -> list[FromBags]:
    if not isinstance(features, Tensor):
        as_jagged = make_jagged(type(features), taken.values(), taken.weights_or_none(), taken.lengths())
        return [FromBags(path, (key,), "jagged", type(features))] if same_features(as_jagged, features) else []
    components = {"values": taken.values(), "lengths": taken.lengths(), "weights": taken.weights_or_none()}
    return [
        FromBags(path, (key,), name)
        for name, tensor in components.items()
        if tensor is not None and _same_tensor(tensor, features)
    ]
