"""Laying two probes of different batch sizes over each other: what is alike is the program, what differs symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nestpipe_kernels.capture.features import Received
from nestpipe_kernels.capture.program import Program, ProgramOperation, kind_of
from nestpipe_kernels.capture.recipes import (
    Affine,
    AffineTensor,
    BatchItem,
    Built,
    Container,
    Features,
    RepeatedTensor,
    Scalar,
    Traced,
)
from nestpipe_kernels.capture.tape import Operation, Reference, Tape, short_name
from nestpipe_kernels.capture.tree import format_path

__all__ = ["Aligner", "Unaligned"]

# Operations that place values elsewhere and change none: a result of these alone that equals some keys of a
# KeyedJaggedTensor is those keys, whose borders in memory are data and no function of the batch size.
_MOVES = frozenset(
    ("alias", "cat", "clone", "detach", "index_select", "narrow", "select", "slice", "split", "split_with_sizes")
    + ("squeeze", "unsqueeze", "view", "_unsafe_view", "_to_copy")
)


class Unaligned(Exception):
    """Why a value of one probe is not the same computation as in the other; becomes a CaptureError."""


class Aligner:
    """Builds the program of two tapes, call by call. Numbers and positions in the program are those of tape 0."""

    def __init__(self, tapes: tuple[Tape, Tape], sizes: tuple[int, int]) -> None:
        self.tapes, self.sizes = tapes, sizes
        self.program = Program()
        self._pairs: dict[int, int] = {}
        self._operations: dict[int, tuple[int, ProgramOperation]] = {}

    def finish(self) -> Program:
        """The program with its operations in the order in which the model ran them."""
        self.program.operations = [self._operations[place][1] for place in sorted(self._operations)]
        return self.program

    def recipe(self, received: tuple[Received, Received], positions: tuple[int, int]) -> Features:
        """How to make the features of one call.

        Raises:
            Unaligned: they cannot be made from a batch; carries the reason.
        """
        a, b = received
        if a.kind != b.kind:
            raise Unaligned(
                f"it is a {a.kind} for a batch of {self.sizes[0]} samples and a {b.kind} for one of {self.sizes[1]}"
            )
        if a.item is not None and a.item == b.item:
            self._check_unwritten(a.item, positions[0])
            return a.item
        if a.number is not None and b.number is not None:
            return self._from_bags_or(received, received, positions, lambda: self._trace((a, b), positions))
        if a.components is not None and b.components is not None:
            values = (a.components[0], b.components[0])
            return self._from_bags_or(received, values, positions, lambda: self._built(received, positions))
        if a.template is not None and b.template is not None:
            if a.steps != b.steps:
                raise Unaligned(f"the parts of a {a.kind} differ between two batch sizes")
            parts = tuple(self.recipe(pair, positions) for pair in zip(a.parts, b.parts))
            return Container(a.template, parts)
        if a.item is not None or b.item is not None:
            places = [format_path(r.item.path) if r.item else "no object of the batch" for r in received]
            raise Unaligned(f"it is {places[0]} for one batch size and {places[1]} for another")
        return Scalar(self._merge(a.scalar, b.scalar, f"a {a.kind}"))

    def _check_unwritten(self, item: BatchItem, position: int) -> None:
        storages = {
            value.storage
            for value in self.tapes[0].values
            if value.leaf is not None and value.leaf.path[: len(item.path)] == item.path
        }
        for operation in self.tapes[0].operations[:position]:
            if not storages.isdisjoint(operation.written):
                raise Unaligned(_written(operation, format_path(item.path)))

    def _from_bags_or(
        self,
        received: tuple[Received, Received],
        values: tuple[Received, Received],
        positions: tuple[int, int],
        trace: Callable[[], Features],
    ) -> Features:
        common = [bags for bags in received[0].bags if bags in received[1].bags]
        if common and self._only_moved(values, positions):
            return common[0]
        before = dict(self._pairs), dict(self._operations)
        try:
            return trace()
        except Unaligned:
            if not common:
                raise
            self._pairs, self._operations = before
            return common[0]

    def _only_moved(self, values: tuple[Received, Received], positions: tuple[int, int]) -> bool:
        for tape, value, position in zip(self.tapes, values, positions):
            assert value.number is not None
            functions = [tape.operations[place].function for place in tape.slice(value.number, position)]
            if not functions or not all(str(f).startswith("fbgemm.") or short_name(f) in _MOVES for f in functions):
                return False
        return True

    def _built(self, received: tuple[Received, Received], positions: tuple[int, int]) -> Features:
        a, b = received
        assert a.components is not None
        assert b.components is not None
        assert a.cls is not None
        if a.keys != b.keys:
            raise Unaligned(
                f"its keys are {list(a.keys or ())} for one batch size and {list(b.keys or ())} for another"
            )
        if (a.components[1] is None) != (b.components[1] is None):
            raise Unaligned("it has weights for one batch size only")
        values = self._trace((a.components[0], b.components[0]), positions, "values")
        lengths = self._trace((a.components[2], b.components[2]), positions, "lengths")
        weights, sides = None, (a.components[1], b.components[1])
        if sides[0] is not None and sides[1] is not None:
            before = dict(self._pairs), dict(self._operations)
            try:
                weights = self._trace((sides[0], sides[1]), positions, "weights")
            except Unaligned:  # taken from the model when it runs, see Built
                self._pairs, self._operations = before
        return Built(a.cls, a.keys, values, weights, lengths, sides[0] is not None)

    # ---------------------------------------------------------------------------------------------- operations

    def _trace(self, received: tuple[Received, Received], positions: tuple[int, int], part: str = "") -> Traced:
        """Align all operations that lead to a tensor."""
        a, b = received
        assert a.number is not None
        assert b.number is not None
        whose = f"its {part} depend on" if part else "it depends on"
        for side in received:
            if side.taint is not None:
                raise Unaligned(f"{whose} {side.taint}")
        slices = [t.slice(n, p) for t, n, p in zip(self.tapes, (a.number, b.number), positions)]
        names = [[tape.operations[p].name for p in places] for tape, places in zip(self.tapes, slices)]
        if names[0] != names[1]:
            raise Unaligned(
                f"{len(names[0])} operations lead to it for a batch of {self.sizes[0]} samples and {len(names[1])} (or "
                f"others) for one of {self.sizes[1]}: control flow depends on the batch"
            )
        for places in zip(*slices):
            self._align(*places)
        self._match(a.number, b.number, "the input")
        storage = self.tapes[0].values[a.number].storage
        copied = any(storage in operation.written for operation in self.tapes[0].operations[positions[0] :])
        return Traced(a.number, copied)

    def _align(self, place: int, other: int) -> None:
        if place in self._operations:
            if self._operations[place][0] != other:
                raise Unaligned("two calls share operations for one batch size only")
            return
        a, b = self.tapes[0].operations[place], self.tapes[1].operations[other]
        for tape, operation in zip(self.tapes, (a, b)):
            for value in tape.values if operation.written else ():
                if value.origin != "operation" and value.storage in operation.written:
                    raise Unaligned(_written(operation, str(value)))
        args = self._merge(a.args, b.args, a.name)
        kwargs = self._merge(a.kwargs, b.kwargs, a.name)
        if len(a.outputs) != len(b.outputs):
            raise Unaligned(
                f"{a.name} has {len(a.outputs)} results for one batch size and {len(b.outputs)} for another"
            )
        for number, partner in zip(a.outputs, b.outputs):
            if self._pairs.setdefault(number, partner) != partner:
                raise Unaligned(f"{a.name} returns different tensors for two batch sizes")
        self._operations[place] = (other, ProgramOperation(place, a.function, args, kwargs, a.outputs))

    def _merge(self, a: Any, b: Any, where: str) -> Any:
        """Arguments of both probes as one, integers that differ as Affine."""
        if type(a) is not type(b):
            raise Unaligned(f"{where} has an argument {a!r} for one batch size and {b!r} for another")
        if isinstance(a, Reference):
            self._match(a.number, b.number, where)
            return a
        if isinstance(a, list):
            if len(a) != len(b):
                raise Unaligned(f"{where} has {len(a)} arguments in a list for one batch size and {len(b)} for another")
            return [self._merge(x, y, where) for x, y in zip(a, b)]
        if isinstance(a, dict):
            return {key: self._merge(a[key], b.get(key), where) for key in a}
        if type(a) is int and a != b:
            return self._affine(a, b, where)
        if a is not b and a != b and not (a != a and b != b):
            raise Unaligned(f"{where} has an argument that is {a!r} for one batch size and {b!r} for another")
        return a

    def _affine(self, a: int, b: int, where: str) -> Affine:
        scale, rest = divmod(b - a, self.sizes[1] - self.sizes[0])
        if rest:
            raise Unaligned(
                f"an integer in {where} is {a} for a batch of {self.sizes[0]} samples and {b} for {self.sizes[1]}, "
                "no multiple of the batch size plus a constant (was it read from data, by .item() or .tolist()?)"
            )
        return Affine(scale, a - scale * self.sizes[0])

    def _match(self, number: int, partner: int, where: str) -> None:
        """Note that two values are the same one in both probes, or raise."""
        a, b = self.tapes[0].values[number], self.tapes[1].values[partner]
        if number in self._pairs:
            if self._pairs[number] != partner:
                raise Unaligned(f"{where} uses different tensors for two batch sizes")
            return
        if a.origin != b.origin or (a.leaf, a.buffer) != (b.leaf, b.buffer) or a.origin == "operation":
            raise Unaligned(f"{where} uses {a} for one batch size and {b} for another")
        if a.leaf is not None:
            found = next(item for item, path in self.tapes[0].objects.values() if path == a.leaf.path)
            self.program.leaves[number] = (a.leaf, kind_of(found))
        elif a.buffer is not None:
            self.program.constants[number] = a.tensor
            self.program.buffers[number] = a.buffer
        else:
            self.program.constants[number] = self._constant(a.tensor, b.tensor, where)
        self._pairs[number] = partner

    def _constant(self, a: torch.Tensor, b: torch.Tensor, where: str) -> torch.Tensor | AffineTensor | RepeatedTensor:
        if a is b:
            return a
        if a.shape == b.shape and a.dtype == b.dtype:
            if torch.equal(a, b):
                return a.detach().clone()
            if not a.is_floating_point() and not a.is_complex() and a.dtype != torch.bool:
                gap, step = b.to(torch.int64) - a.to(torch.int64), self.sizes[1] - self.sizes[0]
                if bool((gap % step == 0).all()):
                    scale = gap // step
                    return AffineTensor(scale, a.to(torch.int64) - scale * self.sizes[0], a.dtype)
        if _repeats(a, a, self.sizes[0]) and _repeats(b, a, self.sizes[1]):
            return RepeatedTensor(a[0].detach().clone())
        raise Unaligned(
            f"{where} uses a tensor that differs between two batch sizes and was not made by recorded operations on "
            f"the batch (but by numpy, or by torch.tensor(...) from numbers read out of the batch? NumPy arrays of ids "
            f"in a batch must be made tensors by the loader)"
        )


def _repeats(tensor: torch.Tensor, other: torch.Tensor, size: int) -> bool:
    """Whether a tensor is the first row of `other`, once for each of `size` samples."""
    if (
        tensor.dtype != other.dtype
        or tensor.dim() == 0
        or tensor.shape[0] != size
        or tensor.shape[1:] != other.shape[1:]
    ):
        return False
    return torch.equal(tensor, other[:1].expand_as(tensor))


def _written(operation: Operation, what: str) -> str:
    return f"{operation.name} changes {what} in place before it is used (clone it first)"
