"""Capture: which inputs each embedding module will get for a batch, before the model runs.

A probe forward at two batch sizes, with zero rows, shows what each module receives and how it comes from the batch.
That is replayed ahead for later batches and compared with what the modules really receive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe_kernels.capture.align import Aligner, Unaligned
from nestpipe_kernels.capture.features import Received, receive, same_features
from nestpipe_kernels.capture.modules import model_generators, plain_name
from nestpipe_kernels.capture.probe import ModelState, eager_only, preserved_random_state
from nestpipe_kernels.capture.program import Call, Program
from nestpipe_kernels.capture.split import SplitBatch, batch_size_of, split
from nestpipe_kernels.capture.tape import Tape, TapeMode, tensors_in
from nestpipe_kernels.capture.tree import children, is_jagged, is_keyed_jagged, is_keyed_tensor
from nestpipe_kernels.errors import CaptureError
from nestpipe_kernels.ops._arrays import as_tensor

__all__ = ["CapturedInputs", "FunctionInputs", "SparseInputs", "capture_inputs", "from_function", "same_features"]

_REMEDY = "pass PipelineConfig(sparse_inputs=...) (a function `batch -> {module: [input per call]}`)"


class SparseInputs(ABC):
    """Source of the modules' inputs for batches that have not run yet."""

    @abstractmethod
    def replay(self, batch: Any) -> dict[str, list[Any]]:
        """The inputs of each module for a batch of at least one sample, per call in call order.

        Raises:
            CaptureError: the batch is not like the captured one; names the path, or the module.
        """

    def describe(self, name: str, call: int) -> str:
        """In words, where the planned input of a call comes from."""
        return "sparse_inputs"

    def check(self, name: str, call: int, planned: Any, actual: Any) -> None:
        """Compare a planned input with the one that the model passed: keys and bags, not the values of weights.

        Raises:
            CaptureError: they differ.
        """
        if not same_features(planned, actual, weights=False):
            raise CaptureError(
                f"capture: module '{name}' call {call} received other ids than planned from the batch (planned: "
                f"{self.describe(name, call)}): its input depends on something else than the batch, or on numbers read "
                f"from it, or the batch was changed after it was planned; {_REMEDY}"
            )

    def check_calls(self, name: str, planned: int, actual: int) -> None:
        """Compare the number of calls planned with the number of calls made.

        Raises:
            CaptureError: they differ.
        """
        if planned != actual:
            raise CaptureError(
                f"capture: module '{name}' was called {actual} times in a forward, planned were {planned}: control "
                f"flow depends on data; {_REMEDY}"
            )


class CapturedInputs(SparseInputs):
    """What `capture_inputs` found. Plain data: can be pickled for a rank that had no batch; `bind` it there."""

    def __init__(self, names: tuple[str, ...], program: Program, pairs: tuple[str, ...] = ()) -> None:
        self.names = names
        self._program = program
        self.pairs = pairs
        """Where the model, or its loss, computes something of every two samples of a batch."""

    @property
    def num_calls(self) -> dict[str, int]:
        """Calls per forward of each module."""
        return {name: sum(call.module == name for call in self._program.calls) for name in self.names}

    def replay(self, batch: Any) -> dict[str, list[Any]]:
        """As SparseInputs.replay."""
        features = self._program.run(batch, batch_size_of(batch))
        result: dict[str, list[Any]] = {name: [] for name in self.names}
        for call, item in sorted(zip(self._program.calls, features), key=lambda pair: pair[0].index):
            result[call.module].append(item)
        return result

    def describe(self, name: str, call: int) -> str:
        """As SparseInputs.describe."""
        found = [c for c in self._program.calls if c.module == name and c.index == call]
        return self._program.describe(found[0]) if found else "nothing"

    def bind(self, model: nn.Module) -> None:
        """Read the buffers that inputs depend on from `model`, after unpickling or after moving the model."""
        for number, name in self._program.buffers.items():
            self._program.constants[number] = model.get_buffer(name)


class FunctionInputs(SparseInputs):
    """The user's own `sparse_inputs`, checked for shape."""

    def __init__(self, function: Callable[[Any], Mapping[Any, Any]], modules: Mapping[str, Any]) -> None:
        self.names = tuple(modules)
        self._function = function
        self._name_of: dict[Any, str] = {module: name for name, module in modules.items()}
        self._name_of.update({name: name for name in modules})

    def replay(self, batch: Any) -> dict[str, list[Any]]:
        """As SparseInputs.replay."""
        with torch.no_grad():
            returned = self._function(batch)
        if not isinstance(returned, Mapping):
            raise CaptureError(
                f"capture: sparse_inputs must return a dict {{module: [input per call]}}, got {type(returned).__name__}"
            )
        result: dict[str, list[Any]] = {}
        for key, inputs in returned.items():
            known = plain_name(key) if isinstance(key, str) else key
            name = self._name_of.get(known) if isinstance(known, str | nn.Module) else None
            if name is None:
                got = repr(key) if isinstance(key, str) else type(key).__name__
                raise CaptureError(
                    f"capture: sparse_inputs returned the key {got}, which is no embedding module of the model; "
                    f"expected the modules themselves or their names {list(self.names)}"
                )
            if not isinstance(inputs, list):
                raise CaptureError(
                    f"capture: sparse_inputs must return a list with one input per call for module '{name}', got "
                    f"{type(inputs).__name__}; for one call return [input]"
                )
            result[name] = [as_tensor(one) for one in inputs]
        missing = [name for name in self.names if name not in result]
        if missing:
            raise CaptureError(
                f"capture: sparse_inputs returned nothing for module '{missing[0]}'; return [] if it is not called"
            )
        return {name: result[name] for name in self.names}


def from_function(function: Callable[[Any], Mapping[Any, Any]], modules: Mapping[str, Any]) -> FunctionInputs:
    """Use `function(batch) -> {module or its name: [input per call]}` instead of a capture."""
    return FunctionInputs(function, modules)


# --------------------------------------------------------------------------------------------------------- probes


@dataclass
class _Probe:
    """One forward: the tape and, per module, what each call received after how many operations."""

    size: int
    tape: Tape = field(default_factory=Tape)
    calls: dict[str, list[tuple[Received, int]]] = field(default_factory=dict)


class _ProbeContext:
    """Answers lookups with zeros and notes their inputs."""

    def __init__(self, probe: _Probe, names: dict[int, str]) -> None:
        self._probe, self._names = probe, names

    def lookup(self, module: Any, features: Any) -> Any:
        name, tape = self._names[id(module)], self._probe.tape
        received = receive(tape, features)
        self._probe.calls[name].append((received, len(tape.operations)))
        with tape.pause():
            output = module.zero_output(features)
            for tensor in _output_tensors(output):
                tape.taint(tensor, f"the output of embedding module '{name}'")
        return output


def capture_inputs(
    model: nn.Module,
    modules: Mapping[str, Any],
    batch: Any,
    call_model: Callable[[nn.Module, Any], Any],
    split_batch: SplitBatch | None = None,
) -> CapturedInputs:
    """Find out how the inputs of embedding modules come from a batch.

    Runs `call_model(model, part)` twice (a third time if that is not conclusive), for copies of samples of `batch` at
    two batch sizes, in the model's modes and with gradients enabled, without a backward. Random state (that of
    torch.Generator objects in the model's modules included), buffers,
    parameters, gradients and modes are as before afterwards; nothing is looked up. Plain Python attributes that forward
    sets are not put back.

    Args:
        model: the user's model.
        modules: its embedding modules by qualified name (`embedding_modules`).
        batch: at least one sample.
        call_model: runs the forward (and the loss, if it calls modules).
        split_batch: the user's own split, see `split`.

    Raises:
        CaptureError: an input cannot be computed from a batch; names the module, what its input depends on, the remedy.
            Or a parameter of the model is not initialized yet (lazy modules).
        ValueError: the batch is empty or cannot be split.
    """
    size = batch_size_of(batch)
    if size < 1:
        raise ValueError("capture_inputs: expected a batch with at least one sample, got none; capture another batch")
    indices = [torch.arange(size), _other_samples(size)]
    names = tuple(modules)

    def probe(index: Tensor) -> _Probe:
        part = split(batch, [index], split_batch)[0]
        return _run_probe(model, modules, part, index.numel(), call_model, state)

    state = ModelState(model)
    try:
        with preserved_random_state(model_generators(model).values()), eager_only():
            first, second = (probe(index) for index in indices)
            try:
                return CapturedInputs(names, _program(first, second, names), _pairs(first, second))
            except CaptureError:
                # The first forward of a model may fill caches that later ones use. With those, it must be right.
                first = probe(indices[0])
                return CapturedInputs(names, _program(first, second, names), _pairs(first, second))
    finally:
        state.restore()


def _other_samples(size: int) -> Tensor:
    """The samples of the second probe, int64 [m], m != size.

    The last ones first, so that numbers read from data differ. About half of them, never one (batch normalisation
    refuses that), and an odd number fewer, so that few such numbers look like multiples of the batch size.
    """
    if size < 6:
        return torch.arange(size + 5).flip(0) % size
    count = size // 2 - (size - size // 2 + 1) % 2
    return torch.arange(size - 1, size - 1 - count, -1)


def _run_probe(
    model: nn.Module,
    modules: Mapping[str, Any],
    batch: Any,
    size: int,
    call_model: Callable[[nn.Module, Any], Any],
    state: ModelState,
) -> _Probe:
    probe = _Probe(size, calls={name: [] for name in modules})
    probe.tape.on_write = state.before_write
    probe.tape.add_batch(batch)
    probe.tape.size = size
    probe.tape.add_model(model)
    context: Any = _ProbeContext(probe, {id(module): name for name, module in modules.items()})
    with ExitStack() as stack:
        for module in modules.values():
            stack.callback(setattr, module, "lookup_context", getattr(module, "lookup_context", None))
            module.lookup_context = context
        stack.enter_context(torch.enable_grad())
        stack.enter_context(TapeMode(probe.tape))
        try:
            call_model(model, batch)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"(in a probe forward of the model with {size} samples and zero embedding rows)")
            raise
    return probe


def _pairs(first: _Probe, second: _Probe) -> tuple[str, ...]:
    """Places where results scale with the square of the batch size: each once."""
    common = [(key, place) for key, place in first.tape.pairs.items() if second.tape.pairs.get(key) == place]
    return tuple({place: f"{key[0]} in {place}" for key, place in reversed(common)}.values())[::-1]


def _program(first: _Probe, second: _Probe, names: tuple[str, ...]) -> Program:
    aligner = Aligner((first.tape, second.tape), (first.size, second.size))
    for name in names:
        calls = first.calls[name], second.calls[name]
        if len(calls[0]) != len(calls[1]):
            raise CaptureError(
                f"capture: module '{name}' is called {len(calls[0])} times for a batch of {first.size} samples and "
                f"{len(calls[1])} times for one of {second.size}: control flow depends on the batch; {_REMEDY}"
            )
        for index, ((a, position), (b, other)) in enumerate(zip(*calls)):
            try:
                recipe = aligner.recipe((a, b), (position, other))
            except Unaligned as error:
                raise CaptureError(
                    f"capture: the input of module '{name}' (call {index}) cannot be computed from the batch: {error}; "
                    f"{_REMEDY}"
                ) from None
            aligner.program.calls.append(Call(name, index, position, recipe))
    aligner.program.calls.sort(key=lambda call: call.position)
    return aligner.finish()


def _output_tensors(output: Any) -> list[Tensor]:
    """All tensors in what an embedding module returns."""
    if isinstance(output, Tensor):
        return list(tensors_in(output))
    if is_keyed_jagged(output) or is_jagged(output):
        parts = [output.values(), output.lengths(), output.offsets(), output.weights_or_none()]
        return [part for part in parts if part is not None]
    if is_keyed_tensor(output):
        return [output.values()]
    return [tensor for _, child in children(output) or () for tensor in _output_tensors(child)]
