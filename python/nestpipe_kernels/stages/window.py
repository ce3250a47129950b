"""Stage 5 inside a batch: rows to the sources, the model on each micro-batch, gradients back to the owners."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..comm.router import Transfer
from ..errors import CaptureError
from ..ops.gather_rows import gather_rows
from ..ops.lookup_pool import pool_backward
from ..ops.scatter_add_rows import scatter_add_rows, scatter_rows
from ..ops.take_rows import take_rows
from ..ops.wire_rows import wire_dtype
from ..types import EmbeddingModule, LookupCall, PoolingType, StoreKeys
from .commit import sum_sources
from .counting import Sent
from .finite import as_read, largest, note_gradients
from .lookup_function import run_lookup
from .messages import join_rows, message_counts, split_rows
from .owner_pool import add_gradients, note_bounds, partial_rows
from .routing import concat_keys
from .state import BatchState, Inputs, MicroBatch, RankState, StorePlan
from .unused import warn_of_unused

__all__ = [
    "MicroContext",
    "accumulate_gradients",
    "forward",
    "forward_backward",
    "land_rows",
    "post_grads",
    "post_rows",
    "put_gradients",
    "recv_grads",
    "send_grads",
    "send_rows",
]


def _per_peer(transfers: list[Transfer]) -> list[list[int]]:
    return [t.per_peer for t in transfers]


def send_rows(rank: RankState, batch: BatchState, micro: int) -> None:
    """Embeddings that each source needs from here on for micro-batch `micro`, copied out of the buffer."""
    outgoing = [owner.rows[micro] for owner in batch.owner]
    incoming = [plan.rows[micro] for plan in batch.plans]
    outgoing += [owner.parts[micro].move for owner in batch.owner if owner.parts]
    incoming += [plan.parts[micro].move for plan in batch.plans if plan.parts]
    post_rows(rank, batch, "rows", ("rows", micro), micro, outgoing, incoming)


def _dims(rank: RankState) -> list[int]:
    """Row lengths of what a message of rows or gradients holds: of every store, then of parts, where owners pool."""
    return [b.store.dim for b in rank.bindings] + [b.store.dim for b in rank.bindings if b.pooled]


def post_rows(
    rank: RankState,
    batch: BatchState,
    purpose: str,
    name: tuple[str, int],
    micro: int,
    outgoing: list[Transfer],
    incoming: list[Transfer],
) -> None:
    """Send chosen rows of the buffer, of every store, then sums of rows that are pooled here; they land with
    micro-batch `micro`."""
    dims = _dims(rank)
    parts: list[Tensor] = []
    if batch.failure is None:
        with batch.guard(rank.communicator.rank, "send_rows", micro):
            for binding, owner, move in zip(rank.bindings, batch.owner, outgoing):
                assert owner.buffer is not None
                store = binding.store
                wanted = owner.slot[move.positions]
                parts.append(gather_rows(owner.buffer, wanted, store.dim, data_type=store.data_type))
            for binding, owner in zip(rank.bindings, batch.owner):
                if owner.parts:
                    parts.append(partial_rows(owner, micro, binding.store.dim, binding.store.data_type))
    if batch.failure is not None:  # peers expect rows of these sizes all the same
        device = rank.backend.device
        parts = [
            torch.zeros(len(m.positions), dim, dtype=torch.float32, device=device) for m, dim in zip(outgoing, dims)
        ]
    world, wire = rank.topology.num_shards, rank.row_wire
    group, message = rank.topology.group.group(purpose), join_rows(parts, _per_peer(outgoing), wire)
    sizes = message_counts(_per_peer(outgoing), dims, world, wire)
    counts = message_counts(_per_peer(incoming), dims, world, wire)
    received = rank.pool.empty((sum(counts),), message.dtype)
    handle = group.all_to_all(message, sizes, counts, f"{batch.tag}/{name[0]}/{name[1]}", received)
    batch.counts.sent.append(Sent.of(group.rank, _per_peer(outgoing), message, sizes))
    batch.post(*name, handle)
    batch.arrivals.setdefault(micro, []).append((name, incoming))


def land_rows(rank: RankState, batch: BatchState, micro: int) -> None:
    """Wait for the rows of a micro-batch and put them where its lookups find them."""
    dims = _dims(rank)
    plans = [*batch.plans, *(plan for plan in batch.plans if plan.parts)]
    for name, moves in batch.arrivals.pop(micro):
        message = batch.land(*name)
        rows, _ = split_rows(message, _per_peer(moves), dims, rank.row_wire, False, rank.topology.num_shards)
        for plan, move, pieces in zip(plans, moves, rows):
            for positions, part in _placed(move, pieces):
                scatter_rows(plan.received, positions, part)


def _placed(move: Transfer, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of a message, each with its part of the positions."""
    return zip(move.positions.split_with_sizes([len(piece) for piece in pieces]), pieces)


class MicroContext:
    """Answers the model's lookups in one micro-batch from the rows received, and collects the output gradients."""

    def __init__(
        self, rank: RankState, inputs: Inputs | None, plans: list[StorePlan], micro: MicroBatch, number: int
    ) -> None:
        self._inputs = inputs
        self._micro = micro
        self._names = {id(module): name for name, module in rank.modules.items()}
        self._next = dict.fromkeys(rank.modules, 0)
        self.gradients: dict[tuple[str, int], list[list[Tensor | None]]] = {}
        """(module, call) -> per store, per segment: gradient of the segment's bags."""
        self.used: dict[tuple[str, int], LookupCall] = {}
        """Calls as they happened, where that differs from the plan."""
        self._rows: dict[str, list[Tensor]] = {name: [] for name in rank.modules}
        self._slots: dict[str, list[list[Tensor]]] = {name: [] for name in rank.modules}
        for binding, plan in zip(rank.bindings, plans):
            lengths = [len(call.stores[binding.index].keys) for _, _, call in binding.lookups(micro.calls)]
            slots = iter(torch.split(plan.source.slots[number], lengths))
            for name in (binding.module_name, *binding.sharers):
                self._rows[name].append(plan.received)
                self._slots[name].append(list(islice(slots, len(micro.calls.get(name, [])))))

    def lookup(self, module: EmbeddingModule, features: Any) -> Any:
        """Answer a module call of this micro-batch from the rows that were planned and received for it."""
        name = self._names[id(module)]
        call_index = self._next[name]
        planned = self._micro.inputs.get(name, [])
        if torch._C._current_graph_task_id() != -1:
            raise CaptureError(
                f"module {name!r} is called during backward (lookups inside torch.utils.checkpoint, or a compiler that "
                "saves memory?); its rows are at hand anyway: call it outside and checkpoint what follows"
            )
        if call_index >= len(planned):
            raise CaptureError(
                f"module {name!r} is called {call_index + 1} times in this batch, but {len(planned)} calls were "
                "planned from it; give the inputs of every call with PipelineConfig(sparse_inputs=...)"
            )
        assert self._inputs is not None
        self._inputs.check(name, call_index, planned[call_index], features)
        self._next[name] = call_index + 1
        call = self._micro.calls[name][call_index]
        call = self._with_live_weights(name, call_index, call, features)
        slots = [per_call[call_index] for per_call in self._slots[name]]

        def keep(_: LookupCall, grads: list[list[Tensor | None]]) -> None:
            before = self.gradients.get((name, call_index))  # a model may run a backward of its own before ours
            self.gradients[name, call_index] = grads if before is None else _added(before, grads)

        tables = [list(store.tables) for store in module.row_stores()]
        return run_lookup(call, self._rows[name], slots, keep, tables)

    def _with_live_weights(self, name: str, call_index: int, call: LookupCall, features: Any) -> LookupCall:
        """Only keys are known ahead; per-sample weights are the ones that the model passes now, with their graph."""
        if call.weights is None:
            return call
        weights = features.weights_or_none()
        stores = [
            keys if positions is None else replace(keys, weights=weights.detach().to(torch.float32)[positions])
            for keys, positions in zip(call.stores, call.weight_positions)
        ]
        self.used[name, call_index] = live = replace(call, stores=stores, weights=weights)
        return live

    def finish(self) -> None:
        """Every planned call must have happened: otherwise its rows would count as touched for nothing."""
        for name, calls in self._micro.inputs.items():
            if self._next[name] != len(calls):
                raise CaptureError(
                    f"module {name!r} was called {self._next[name]} times in this batch, but {len(calls)} calls were "
                    "planned from it; give the inputs of every call with PipelineConfig(sparse_inputs=...)"
                )


def _added(a: list[list[Tensor | None]], b: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
    return [[y if x is None else x if y is None else x + y for x, y in zip(xs, ys)] for xs, ys in zip(a, b)]


def _run_model(rank: RankState, batch: BatchState, number: int, training: bool) -> None:
    micro = batch.micro[number]
    context = MicroContext(rank, batch.inputs, batch.plans, micro, number)
    for module in rank.modules.values():
        module.lookup_context = context
    try:
        assert rank.call_model is not None
        with torch.set_grad_enabled(training):
            loss, output, weight = rank.call_model(rank.model, micro.batch)
            share = len(micro.indices) / batch.size
            if batch.weighted not in (None, weight is not None):
                raise TypeError(
                    "the model returned a weight with some micro-batches of a batch and none with others; return one "
                    "always or never"
                )
            batch.weighted = weight is not None
            if training:  # evaluation may return something else
                rank.weighted = batch.weighted
            if batch.weighted and batch.early is not None and batch.promised_plain:
                raise TypeError(
                    "the model returned a weight, after batches without one: with early_send it must return one always "
                    "or never, since rows are updated before the sum of weights is known. This batch, and those drawn "
                    "ahead, are not trained"
                )
            if weight is not None:
                coefficient = float(weight)
                batch.divisor = coefficient if number == 0 or not batch.losses else batch.divisor + coefficient
            else:
                coefficient = share if rank.loss_weighting == "mean" else 1.0
            if training:
                _backward(rank, batch, context, loss * coefficient)
    finally:
        for module in rank.modules.values():
            module.lookup_context = None
    context.finish()
    batch.losses.append((coefficient, loss.detach()))
    batch.outputs.append(output)
    if training:
        for binding, plan in zip(rank.bindings, batch.plans):
            calls = binding.lookups(micro.calls)
            grads: list[Tensor | None] = []
            for name, k, call in calls:
                given = context.gradients.get((name, k))
                if given and batch.scale != 1.0:
                    given = [[None if grad is None else grad * batch.unscale for grad in part] for part in given]
                grads += given[binding.index] if given else [None] * len(call.stores[binding.index].segment_modes)
                if given is None and len(call.stores[binding.index].keys):
                    warn_of_unused(rank, binding.store, name)
            keys = plan.occurrences[number]
            if context.used:
                live = [context.used.get((name, k), call) for name, k, call in calls]
                keys = concat_keys([call.stores[binding.index] for call in live])
            accumulate_gradients(plan, keys, plan.source.slots[number], grads)


def _backward(rank: RankState, batch: BatchState, context: MicroContext, loss: Tensor) -> None:
    if rank.loss_scale is not None:
        if context.gradients:
            raise ValueError(
                "the model ran a backward of its own, whose gradients a pipeline with grad_scaler would divide by the "
                "scale too: return that loss as part of the model's, or use bfloat16 without a scaler"
            )
        loss = rank.loss_scale.scaled(loss)
    loss.backward()  # type: ignore[no-untyped-call]


def accumulate_gradients(plan: StorePlan, keys: StoreKeys, slots: Tensor, grads: list[Tensor | None]) -> None:
    """Add one micro-batch's row gradients to the source's accumulators, in the order of its store's list."""
    needs_rows = PoolingType.MAX.code in keys.segment_modes
    pool_backward(
        grads,
        plan.received if needs_rows else None,
        slots,
        keys.bag_offsets,
        keys.segment_bags,
        keys.segment_modes,
        keys.weights,
        plan.gradients,
    )


def forward_backward(rank: RankState, batch: BatchState, micro: int) -> None:
    """Land the rows of this micro-batch and train the model on it; the lookup's gradients go to the accumulators."""
    land_rows(rank, batch, micro)
    if batch.failure is not None or not batch.has_batch or not len(batch.micro[micro].indices):
        return
    with batch.guard(rank.communicator.rank, "forward_backward", micro):
        _run_model(rank, batch, micro, training=True)


def forward(rank: RankState, batch: BatchState, micro: int) -> None:
    """Land the rows of this micro-batch and run the model without gradients."""
    land_rows(rank, batch, micro)
    if batch.failure is not None or not batch.has_batch or not len(batch.micro[micro].indices):
        return
    with batch.guard(rank.communicator.rank, "forward", micro):
        _run_model(rank, batch, micro, training=False)


def send_grads(rank: RankState, batch: BatchState, micro: int) -> None:
    """Summed gradients that are complete with this micro-batch, to their owners; their accumulators are free again."""
    pooled = [plan for plan in batch.plans if plan.parts]
    moves = [plan.grads[micro] for plan in batch.plans] + [plan.parts[micro].move for plan in pooled]
    incoming = [owner.grads[micro] for owner in batch.owner]
    incoming += [owner.parts[micro].move for owner in batch.owner if owner.parts]
    taken = [take_rows(plan.gradients, move.positions) for plan, move in zip([*batch.plans, *pooled], moves)]
    last = micro == rank.num_micro_batches - 1
    post_grads(rank, batch, ("grads", micro), [part for part, _ in taken], moves, incoming, last)
    read = [as_read(part, peaks, rank.gradient_wire) for part, peaks in taken]
    for plan, move, (part, peaks) in zip(batch.plans, moves, read):
        _judge_later(rank, plan, move, part, peaks, micro)
    for plan, (_, peaks) in zip(pooled, read[len(batch.plans) :]):
        note_bounds(plan.bounds[micro], plan.parts[micro], peaks)


def post_grads(
    rank: RankState,
    batch: BatchState,
    name: tuple[str, int],
    parts: list[Tensor],
    outgoing: list[Transfer],
    incoming: list[Transfer],
    last: bool,
) -> None:
    """Send gradients of every store, the last with this rank's divisor: the sum of weights is not known before."""
    dims = _dims(rank)
    world, wire = rank.topology.num_shards, rank.gradient_wire
    divisor = batch.loss_divisor if last else 1.0
    lead = torch.full((world,), divisor, dtype=torch.float32, device=rank.backend.device)
    sizes = message_counts(_per_peer(outgoing), dims, world, wire, lead=True)
    message = join_rows(parts, _per_peer(outgoing), wire, lead, rank.pool.empty((sum(sizes),), wire_dtype(wire)))
    group = rank.topology.group.group("grads")
    counts = message_counts(_per_peer(incoming), dims, world, wire, lead=True)
    received = rank.pool.empty((sum(counts),), message.dtype)
    handle = group.all_to_all(message, sizes, counts, f"{batch.tag}/{name[0]}/{name[1]}", received)
    batch.post(*name, handle)


def _judge_later(rank: RankState, plan: StorePlan, move: Transfer, part: Tensor, peaks: Tensor, micro: int) -> None:
    """Note what was sent, for the commit; where it goes in pieces, the sum of the pieces, as the owner adds them."""
    if plan.parts:
        plan.bounds[micro] = torch.zeros(len(plan.source.lists.keys), dtype=torch.float64)
        plan.bounds[micro][move.positions] = peaks.to(torch.float64)
    elif not rank.track_use:
        note_gradients(plan, move.positions, peaks)
    if plan.parts or not rank.track_use:
        return
    if plan.summed is None:
        plan.summed = torch.zeros_like(plan.gradients)
    scatter_add_rows(plan.summed, move.positions, part)
    if micro == rank.num_micro_batches - 1:
        note_gradients(plan, torch.arange(len(plan.summed)), largest(plan.summed))


def recv_grads(rank: RankState, batch: BatchState, micro: int) -> None:
    """Gradients from every source into its boxes; then the sums of rows that get no later gradient."""
    message = batch.land("grads", micro)
    served = slice(0, rank.topology.num_shards)
    if rank.topology.mode == "exact":
        batch.group_grads[micro] = message
        served = rank.topology.sources()
    moves = [owner.grads[micro] for owner in batch.owner]
    moves += [owner.parts[micro].move for owner in batch.owner if owner.parts]
    put_gradients(rank, batch, micro, message, moves, served)
    # Divisors are not known before the last micro-batch; an owner that pools adds to all rows in each.
    if rank.topology.mode == "exact" or batch.weighted_sources or any(owner.parts for owner in batch.owner):
        return
    for owner in batch.owner:
        sum_sources(rank, batch, owner, owner.last_use() == micro)


def put_gradients(
    rank: RankState, batch: BatchState, micro: int, message: Tensor, moves: list[Transfer], sources: slice
) -> None:
    """The message of some sources (one sparse group) into their boxes: of rows, then of parts that were pooled here."""
    dims = _dims(rank)
    parts, divisors = split_rows(message, _per_peer(moves), dims, rank.gradient_wire, True, rank.topology.num_shards)
    if micro == rank.num_micro_batches - 1:
        batch.divisors[sources] = divisors
    for owner, move, pieces in zip(batch.owner, moves, parts):
        assert owner.boxes is not None
        for positions, part in _placed(move, pieces):
            scatter_add_rows(owner.boxes, positions, part)
            if owner.bounds is not None:
                owner.bounds[positions] += largest(part)
    pooled = [owner for owner in batch.owner if owner.parts]
    for owner, pieces in zip(pooled, parts[len(batch.owner) :]):
        assert owner.bounds is not None
        part = torch.cat(pieces)
        add_gradients(owner, micro, part)
        note_bounds(owner.bounds, owner.parts[micro], largest(part))
