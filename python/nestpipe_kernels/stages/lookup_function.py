"""The autograd node of a lookup: pools received rows into a module's outputs and hands their gradients on.

Rows are no autograd leaves: whoever exchanges rows also collects their gradients, through `on_gradient`. An empty
tensor that requires a gradient anchors the node, so that backward reaches it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from nestpipe_kernels.ops.lookup_pool import pool_forward, pool_weight_grad
from nestpipe_kernels.ops.on_device import place
from nestpipe_kernels.types import InPlaceStore, LookupCall, StoreKeys, TableSpec

__all__ = ["GradientSink", "KeyedRows", "PendingLookup", "StoredRows", "bare_answers", "is_asked_for", "run_lookup"]

GradientSink = Callable[[LookupCall, "list[list[Tensor | None]]"], None]
"""Receives the call and, per store and segment, the gradient of its bags float32 [bags, D]; None: no gradient."""


@dataclass
class StoredRows:
    """Rows that are pooled where they lie, in their store."""

    store: InPlaceStore
    handles: Tensor
    """int64 [U]"""
    keys: Tensor
    """int64 [U]"""
    tables: Tensor
    """int32 [U]"""


@dataclass
class KeyedRows:
    """Rows that are pooled by the call's keys, where they lie. For lookups without a backward."""

    store: InPlaceStore
    find: Callable[[], tuple[StoredRows, Tensor]]
    """Rows and slots (as `StoredRows` wants them), where some key has no row."""


@dataclass
class PendingLookup:
    """What one call's forward and backward need."""

    call: LookupCall
    rows: Sequence[Tensor | StoredRows | KeyedRows]
    slots: Sequence[Tensor]
    on_gradient: GradientSink
    trainable: list[list[bool]]
    """Per store and segment."""

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs, freshly allocated."""
        device = next((rows.device for rows in self.rows if isinstance(rows, Tensor)), None)
        outputs = tuple(torch.empty(shape, dtype=torch.float32, device=device) for shape in self.call.output_shapes)
        for store, keys in enumerate(self.call.stores):
            rows = self.rows[store]
            if not isinstance(rows, Tensor):
                _pool_in_place(rows, self.slots[store], keys, self._segments(store, outputs))
            elif keys.segment_modes:
                pool_forward(
                    rows,
                    self.slots[store],
                    keys.bag_offsets,
                    keys.segment_bags,
                    keys.segment_modes,
                    self._segments(store, outputs),
                    keys.weights,
                )
                for out, divisors in zip(self._segments(store, outputs), _divisors(keys)):
                    if divisors is not None:
                        out /= place(divisors, out)
        return outputs

    def backward(self, grads: Sequence[Tensor | None], rows_need: bool, weights_need: bool) -> Tensor | None:
        """Hands the segments' gradients on, if the rows' are asked for; returns that of the weights, if needed."""
        by_row = [None if grad is None else grad.contiguous() for grad in grads]
        per_store = [self._segments(store, by_row) for store in range(len(self.call.stores))]
        for keys, segments in zip(self.call.stores, per_store, strict=True):
            for segment, divisors in enumerate(_divisors(keys)):
                grad = segments[segment]
                if divisors is not None and grad is not None:
                    segments[segment] = grad / place(divisors, grad)
        weight_grad = self._weight_grad(per_store) if weights_need else None
        if rows_need and any(any(flags) for flags in self.trainable):
            self.on_gradient(
                self.call,
                [
                    [grad if flag else None for grad, flag in zip(segments, flags, strict=True)]
                    for segments, flags in zip(per_store, self.trainable, strict=True)
                ],
            )
        return weight_grad

    def _segments(self, store: int, matrices: Sequence[Tensor | None]) -> list[Any]:
        """The parts of `matrices` (outputs, or their gradients) that belong to the store's segments."""
        rows = self.rows[store]
        keys, dim = self.call.stores[store], rows.size(1) if isinstance(rows, Tensor) else rows.store.dim
        parts: list[Tensor | None] = []
        for segment, (output, column) in enumerate(self.call.views[store]):
            matrix = matrices[output]
            num_bags = keys.segment_bags[segment + 1] - keys.segment_bags[segment]
            parts.append(None if matrix is None else matrix[:num_bags, column : column + dim])
        return parts

    def _weight_grad(self, per_store: Sequence[Sequence[Tensor | None]]) -> Tensor:
        weights = self.call.weights
        assert weights is not None
        total = torch.zeros(weights.shape, dtype=torch.float32)
        for store, keys in enumerate(self.call.stores):
            positions = self.call.weight_positions[store]
            if positions is not None and positions.numel():
                rows = self.rows[store]
                assert isinstance(rows, Tensor)
                grad = pool_weight_grad(
                    per_store[store],
                    rows,
                    self.slots[store],
                    keys.bag_offsets,
                    keys.segment_bags,
                    keys.segment_modes,
                )
                total.index_add_(0, positions, grad.to(total.device))
        return total


def _pool_in_place(rows: StoredRows | KeyedRows, slots: Tensor, keys: StoreKeys, outs: list[Any]) -> None:
    if isinstance(rows, KeyedRows):
        if rows.store.pool_keys(keys, outs):
            return
        rows, slots = rows.find()
    rows.store.pool(rows.handles, rows.keys, rows.tables, slots, keys, outs)


class _Bare(threading.local):
    lookups: list[PendingLookup] | None = None


_bare = _Bare()


@contextmanager
def bare_answers() -> Iterator[list[PendingLookup]]:
    """Inside, in this thread, `run_lookup` returns bare outputs, without a graph, and leaves to the caller to run the
    backward of the lookups that get into this list."""
    before, _bare.lookups = _bare.lookups, []
    try:
        yield _bare.lookups
    finally:
        _bare.lookups = before


def run_lookup(
    call: LookupCall,
    rows_per_store: Sequence[Tensor | StoredRows | KeyedRows],
    slots_per_store: Sequence[Tensor],
    on_gradient: GradientSink,
    tables: Sequence[Sequence[TableSpec]] | None = None,
) -> Any:
    """Answer a call from rows that are at hand.

    Args:
        call: what to look up; its outputs are covered by its views.
        rows_per_store: float32 [U, D] embeddings per store; must not change before backward ends if `call.weights`
            requires a gradient. Or where they lie, if it requires none.
        slots_per_store: int32 or int64 [n], the row of each occurrence; -1 for padding.
        on_gradient: called once per backward with the gradients of all segments, unless every table is frozen.
        tables: per store its tables, for `trainable`; None: all are trainable.

    Returns:
        `call.finish(outputs)`, outputs float32. They carry a graph where gradients are enabled, and some table is
        trainable or `call.weights` requires a gradient. Inside of `bare_answers`, the outputs as they are.
    """
    trainable = [_trainable_segments(call, store, tables) for store in range(len(call.stores))]
    lookup = PendingLookup(call, rows_per_store, slots_per_store, on_gradient, trainable)
    trains = any(any(flags) for flags in trainable)
    if _bare.lookups is not None:
        if torch.is_grad_enabled() and (trains or (call.weights is not None and call.weights.requires_grad)):
            _bare.lookups.append(lookup)
        return lookup.forward()
    anchor = torch.empty(0, dtype=torch.float32, requires_grad=trains)
    apply: Callable[..., tuple[Tensor, ...]] = _LookupFunction.apply
    outputs = apply(lookup, anchor, call.weights)
    return call.finish(outputs)


def is_asked_for(leaf: Any) -> bool:
    """Whether the backward that is running goes to that node, if any.

    torch.autograd.grad and `inputs=` name the ends of theirs; nodes on the way are run as ever.
    """
    return leaf is None or torch._C._current_graph_task_id() == -1 or torch._C._will_engine_execute_node(leaf)


def _divisors(keys: StoreKeys) -> list[Tensor | None]:
    """Per segment float32 [bags, 1], what divides its bags' sums; None where nothing does."""
    if keys.divisors is None:
        return [None] * len(keys.segment_modes)
    pieces = [keys.divisors[start:stop, None] for start, stop in pairwise(keys.segment_bags)]
    return [piece if bool((piece != 1).any()) else None for piece in pieces]


class _LookupFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lookup: PendingLookup, anchor: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        ctx.lookup = lookup
        ctx.set_materialize_grads(False)
        return lookup.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[None, None, Tensor | None]:
        lookup: PendingLookup = ctx.lookup  # type: ignore[attr-defined]
        anchor, weights_need = ctx.next_functions[0][0], ctx.needs_input_grad[2]  # type: ignore[attr-defined]
        return None, None, lookup.backward(grads, is_asked_for(anchor), weights_need)


def _trainable_segments(call: LookupCall, store: int, tables: Sequence[Sequence[TableSpec]] | None) -> list[bool]:
    """Whether each segment's table is trainable; a segment without keys counts as its store's other tables do."""
    keys = call.stores[store]
    num_segments = len(keys.segment_modes)
    if tables is None or all(spec.trainable for spec in tables[store]):
        return [True] * num_segments
    if not any(spec.trainable for spec in tables[store]):
        return [False] * num_segments
    bounds = keys.bag_offsets[list(keys.segment_bags)].tolist()
    return [start == stop or tables[store][int(keys.tables[start])].trainable for start, stop in pairwise(bounds)]
