"""Lookups as nodes of what torch.compile makes.

While a model is traced, a lookup becomes one call of `torch.ops.nestpipe.look_up`: tensors in, tensors out, and rules
for shapes and gradients. When the compiled code runs, the operator asks the module, which answers as always, through
the pipeline or by itself. The backward of that answer is kept until the operator's own backward calls it, and found by
a `ticket` that the compiled code carries from one to the other.

The tables are neither arguments nor results, so a compiler would think two lookups of the same ids one, drop a lookup
whose rows are not used, or run lookups in any order; ranks that exchange keys then wait for different ones. So each
takes the `turn` that the one before it has returned, in whichever module, and the last one's is kept (`_turns`). A
table has no gradient either: the anchor gets one, so that backward reaches the lookup.

What is compiled may serve other modules, and other processes, which find it in the compiler's cache: it says all that
shapes depend on, and is told at run time, by a tensor, whose lookup it is.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nestpipe_kernels.jagged import JaggedTensor, KeyedJaggedTensor
from nestpipe_kernels.stages.lookup_function import PendingLookup, bare_answers, is_asked_for

__all__ = ["Traced", "enroll", "is_exporting", "new_anchor", "traced_lookup"]

_asked: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # new in torch 2.7
_TRACED_TRULY = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
"""Whether code that is traced gets a true answer: in torch 2.11 it is always yes."""


def is_exporting() -> bool:
    """Whether torch.export traces, as far as this torch can tell."""
    return (_TRACED_TRULY or not torch.compiler.is_dynamo_compiling()) and _asked()


class Traced(Protocol):
    """What the operator needs of a module."""

    lookup_anchor: Tensor
    lookup_leaf: Any
    """Both from `new_anchor`."""
    lookup_number: Tensor
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
_pending: dict[int, tuple[PendingLookup, Any]] = {}
"""By ticket, with the module's leaf."""


def new_anchor(trained: bool) -> tuple[Tensor, Any]:
    """float32 [1], of no value, which requires a gradient if the module's rows are trained; then its node in graphs."""
    anchor = torch.zeros(1, dtype=torch.float32, requires_grad=trained)
    with torch.enable_grad():
        return anchor, torch.autograd.graph.get_gradient_edge(anchor).node if trained else None


def enroll(module: Traced) -> Tensor:
    """A number, int64 [1], by which compiled code finds the module."""
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor([number])


def traced_lookup(
    module: Traced,
    dims: Sequence[int],
    values: Tensor,
    lengths: Tensor | None = None,
    weights: Tensor | None = None,
    keys: Sequence[str] | None = None,
    pooled: bool = True,
    with_keys: bool = False,
) -> list[Tensor]:
    """The outputs of a lookup, float32, then the module's output keys, int64, as part of a graph.

    Args:
        dims: columns of every output.
        values: ids of any shape; of bags, or of features, [n].
        lengths: of bags [B]; of features [F * B], with their names as `keys`; None: every id's row is asked for.
        weights: float32 [n], may require a gradient.
        pooled: False: outputs have as many rows as turn out.
        with_keys: whether there are output keys, as many as outputs.
    """
    train_weights = weights is not None and weights.requires_grad
    found: list[Tensor] = torch.ops.nestpipe.look_up(
        values,
        lengths,
        weights,
        module.lookup_anchor,
        _turns.last,
        module.lookup_number,
        None if keys is None else "\0".join(keys),  # lists of strings confuse torch's rules for gradients
        dims,
        pooled,
        with_keys,
        torch.is_grad_enabled(),
        train_weights,
        module.output_device,
    )
    _turns.last = found[1]
    return found[2:]


@torch.library.custom_op(
    "nestpipe::look_up",
    mutates_args=(),
    schema="(Tensor values, Tensor? lengths, Tensor? weights, Tensor anchor, Tensor turn, Tensor module, str? keys, "
    "int[] dims, bool pooled, bool with_keys, bool grad, bool train_weights, Device device) -> Tensor[]",
)
def _look_up(
    values: Tensor,
    lengths: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor,
    turn: Tensor,
    module: Tensor,
    keys: str | None,
    dims: Sequence[int],
    pooled: bool,
    with_keys: bool,
    grad: bool,
    train_weights: bool,
    device: torch.device,
) -> list[Tensor]:
    owner = _modules[int(module)]
    with torch.set_grad_enabled(grad), bare_answers() as lookups:
        # Copies, as in backward.
        lengths = None if lengths is None else lengths.clone()
        weights = None if weights is None else weights.detach().clone().requires_grad_(train_weights and grad)
        features = _features(values.detach(), lengths, weights, keys)
        outputs = [*owner.answer(features), *owner.output_keys(features)]
    ticket = _ticket(lookups, owner.lookup_leaf)
    return [ticket, torch.zeros(1, dtype=torch.int64), *(output.detach() for output in outputs)]


@_look_up.register_fake
def _(
    values: Tensor,
    lengths: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor,
    turn: Tensor,
    module: Tensor,
    keys: str | None,
    dims: Sequence[int],
    pooled: bool,
    with_keys: bool,
    grad: bool,
    train_weights: bool,
    device: torch.device,
) -> list[Tensor]:
    sizes: list[Any]
    if lengths is not None and not pooled:
        sizes = [torch.library.get_ctx().new_dynamic_size() for _ in dims]
    else:
        sizes = [values.numel() if lengths is None else lengths.numel() // max(1, len(_names(keys)))] * len(dims)
    outputs = [torch.empty((size, dim), dtype=torch.float32, device=device) for size, dim in zip(sizes, dims)]
    found = [torch.empty(size, dtype=torch.int64) for size in (sizes if with_keys else ())]
    return [torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64), *outputs, *found]


@torch.library.custom_op(
    "nestpipe::look_up_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor ticket, Tensor? weights) -> (Tensor, Tensor)",
)
def _look_up_backward(grads: Sequence[Tensor], ticket: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    pending, leaf = _pending.get(int(ticket), (None, None))
    if pending is None:
        raise RuntimeError(
            "backward of a compiled lookup: its forward is gone, because saved tensors were copied (offloading, "
            "saved_tensors_hooks); leave those out around lookups"
        )
    # Copies: compiled code writes other values to the memory of its tensors when their last use, this one, is over.
    kept = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
    found = pending.backward(kept, is_asked_for(leaf), weights is not None)
    return torch.zeros(1, dtype=torch.float32), torch.zeros(0, dtype=torch.float32) if found is None else found


@_look_up_backward.register_fake
def _(grads: Sequence[Tensor], ticket: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty(1, dtype=torch.float32), torch.empty(
        0 if weights is None else weights.shape, dtype=torch.float32
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    weights, train_weights = inputs[2], inputs[11]
    ctx.save_for_backward(output[0], weights if train_weights else None)
    ctx.is_output = [tensor.is_floating_point() for tensor in output]


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    ticket, weights = ctx.saved_tensors
    outputs = [grad for grad, is_output in zip(grads, ctx.is_output) if is_output]
    of_anchor, of_weights = torch.ops.nestpipe.look_up_backward(outputs, ticket, weights)
    of_weights = of_weights if weights is not None else None
    return None, None, of_weights, of_anchor, *([None] * 9)


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


def _ticket(lookups: Sequence[PendingLookup], leaf: Any) -> Tensor:
    """int64 [1], by which backward finds what was kept; that goes when the ticket's memory does."""
    memory = np.array([next(_numbers)], dtype=np.int64)
    for pending in lookups:
        number = int(memory[0])
        _pending[number] = pending, leaf
        weakref.finalize(memory, _pending.pop, number, None)
    return torch.from_numpy(memory)
