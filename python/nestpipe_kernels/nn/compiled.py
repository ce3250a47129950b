"""Lookups as nodes of what torch.compile makes.

While a model is traced, a lookup becomes one call of `torch.ops.nestpipe.look_up`: tensors in, tensors out, and rules
for shapes and gradients. When the compiled code runs, the operator asks the module, which answers as always, through
the pipeline or by itself. The backward of that answer is kept until the operator's own backward calls it, and found by
a `ticket` that the compiled code carries from one to the other.

The tables are neither arguments nor results, so a compiler would think two lookups of the same ids one, drop a lookup
whose rows are not used, or run lookups in any order; ranks that exchange keys then wait for different ones. So each
takes the `turn` that the one before it has returned, in whichever module, and the last one's is kept (`_turns`). A
table has no gradient either: the anchor gets one, so that backward reaches the lookup.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.jagged import JaggedTensor, KeyedJaggedTensor
from nestpipe_kernels.stages.lookup_function import PendingLookup, bare_answers

__all__ = ["Traced", "enroll", "traced_lookup"]


class Traced(Protocol):
    """What the operator needs of a module."""

    lookup_anchor: Tensor
    """float32 [1], of no value; requires a gradient if the module's rows are trained."""
    lookup_number: int
    """From `enroll`."""
    output_device: torch.device

    def answer(self, features: Any) -> Any: ...
    def output_keys(self, features: Any) -> list[Tensor]: ...


class _Turns:
    def __init__(self) -> None:
        self.last = torch.zeros(1, dtype=torch.int64)


_turns = _Turns()
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_pending: dict[int, PendingLookup] = {}


def enroll(module: Traced) -> int:
    """A number by which compiled code finds the module."""
    number = next(_numbers)
    _modules[number] = module
    return number


def traced_lookup(
    module: Traced,
    values: Tensor,
    lengths: Tensor | None,
    weights: Tensor | None,
    columns: Sequence[int],
    keys: Sequence[str] | None = None,
    pooled: bool = True,
    indices: bool = False,
) -> list[Tensor]:
    """The outputs of a lookup, float32, then the module's output keys, int64, as part of a graph.

    Args:
        values: ids of any shape; of bags, or of features, [n].
        lengths: of bags [B]; of features [F * B], with their names as `keys`; None: every id's row is asked for.
        weights: float32 [n], may require a gradient.
        columns: of every output.
        pooled: of features: whether outputs have a row for each sample, or one for each id.
        indices: whether the module has output keys.
    """
    train_weights = weights is not None and weights.requires_grad
    found: list[Tensor] = torch.ops.nestpipe.look_up(
        values,
        lengths,
        weights,
        module.lookup_anchor,
        _turns.last,
        None if keys is None else "\0".join(keys),  # lists of strings confuse torch's rules for gradients
        module.lookup_number,
        list(columns),
        pooled,
        indices,
        torch.is_grad_enabled(),
        train_weights,
        module.output_device,
    )
    _turns.last = found[1]
    return found[2:]


@torch.library.custom_op(
    "nestpipe::look_up",
    mutates_args=(),
    schema="(Tensor values, Tensor? lengths, Tensor? weights, Tensor anchor, Tensor turn, str? keys, int module, "
    "int[] columns, bool pooled, bool indices, bool grad, bool train_weights, Device device) -> Tensor[]",
)
def _look_up(
    values: Tensor,
    lengths: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor,
    turn: Tensor,
    keys: str | None,
    module: int,
    columns: Sequence[int],
    pooled: bool,
    indices: bool,
    grad: bool,
    train_weights: bool,
    device: torch.device,
) -> list[Tensor]:
    owner = _modules[module]
    with torch.set_grad_enabled(grad), bare_answers() as lookups:
        # Copies, as in backward.
        lengths = None if lengths is None else lengths.clone()
        weights = None if weights is None else weights.detach().clone().requires_grad_(train_weights and grad)
        features = _features(values.detach(), lengths, weights, keys)
        outputs = [*owner.answer(features), *owner.output_keys(features)]
    return [_ticket(lookups), torch.zeros(1, dtype=torch.int64), *(output.detach() for output in outputs)]


@_look_up.register_fake
def _(
    values: Tensor,
    lengths: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor,
    turn: Tensor,
    keys: str | None,
    module: int,
    columns: Sequence[int],
    pooled: bool,
    indices: bool,
    grad: bool,
    train_weights: bool,
    device: torch.device,
) -> list[Tensor]:
    if lengths is None:
        rows: list[Any] = [values.numel()]
    elif keys is None:
        rows = [lengths.numel()]
    elif pooled:
        rows = [lengths.numel() // len(_names(keys))]
    else:  # whatever turns out
        rows = [torch.library.get_ctx().new_dynamic_size() for _ in columns]
    outputs = [torch.empty((n, dim), dtype=torch.float32, device=device) for n, dim in zip(rows, columns)]
    outputs += [torch.empty(n, dtype=torch.int64) for n in (rows if indices else ())]
    return [torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64), *outputs]


@torch.library.custom_op(
    "nestpipe::look_up_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor ticket, Tensor? weights) -> (Tensor, Tensor)",
)
def _look_up_backward(grads: Sequence[Tensor], ticket: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    pending = _pending.get(int(ticket))
    if pending is None:
        raise RuntimeError(
            "backward of a compiled lookup: its forward is gone, because saved tensors were copied (offloading, "
            "saved_tensors_hooks); leave those out around lookups"
        )
    # Copies: compiled code writes other values to the memory of its tensors when their last use, this one, is over.
    kept = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
    found = pending.backward(kept, weights is not None)
    return torch.zeros(1, dtype=torch.float32), torch.zeros(0, dtype=torch.float32) if found is None else found


@_look_up_backward.register_fake
def _(grads: Sequence[Tensor], ticket: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty(1, dtype=torch.float32), torch.empty(
        0 if weights is None else weights.shape, dtype=torch.float32
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    weights, train_weights = inputs[2], inputs[-2]
    ctx.save_for_backward(output[0], weights if train_weights else None)
    ctx.is_output = [tensor.is_floating_point() for tensor in output]


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    ticket, weights = ctx.saved_tensors
    outputs = [grad for grad, is_output in zip(grads, ctx.is_output) if is_output]
    of_anchor, of_weights = torch.ops.nestpipe.look_up_backward(outputs, ticket, weights)
    of_weights = of_weights if weights is not None else None
    return None, None, of_weights, of_anchor, *(None,) * 9


_look_up.register_autograd(_backward, setup_context=_keep)


def _features(values: Tensor, lengths: Tensor | None, weights: Tensor | None, keys: str | None) -> Any:
    """The input as the module would get it without a compiler."""
    if lengths is None:
        return values
    if keys is None:
        return JaggedTensor._unchecked(values, weights, lengths, None)
    return KeyedJaggedTensor(_names(keys), values, weights, lengths=lengths)


def _names(keys: str | None) -> list[str]:
    return [] if keys is None else keys.split("\0")


def _ticket(lookups: Sequence[PendingLookup]) -> Tensor:
    """int64 [1], by which backward finds what was kept; that goes when the ticket's memory does."""
    memory = np.array([next(_numbers)], dtype=np.int64)
    for pending in lookups:
        number = int(memory[0])
        _pending[number] = pending
        weakref.finalize(memory, _pending.pop, number, None)
    return torch.from_numpy(memory)
