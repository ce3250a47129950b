"""Modules without a pipeline: the same stages, run in place. Rows in forward, one update at the end of backward.

Order of a step, alike on all ranks: forward of each call exchanges keys and rows; when backward is through, all calls
of a module that it reached are one list (in call order) whose gradients are exchanged and applied once. Modules follow
one another as their first calls did: compiled code reaches them otherwise, by the sizes on each rank. The step count of
a module advances with every such update. Collectives happen in call order, so every rank must make the same calls, with
empty inputs if it has no data.

A process that owns all rows, in stores that can pool and update them in place, exchanges nothing (`local`).

Admission and eviction: all forwards since the last update are one batch, so a row that one of them looked up stays
until the update is done. The update reaches the keys that have a row by then. A forward that fails leaves the stores as
they were; one whose backward fails does not: its rows stay, not updated.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import Topology
from ..errors import NonFiniteGradientError, RemoteRankError
from ..ops.owners import default_slice_owner
from ..types import EmbeddingModule, LookupCall, PoolingType
from . import commit, local, replicas, retrieval, routing, window
from .lookup_function import KeyedRows, StoredRows, run_lookup
from .pool import TensorPool
from .scaled_loss import refuse_scaled_backward
from .state import BatchState, RankState, bind_stores

__all__ = ["EagerContext", "eager_context"]


_orders = itertools.count()


@dataclass
class _Reached:
    """A call that backward has reached."""

    order: int
    """Among all modules' calls."""
    call: LookupCall
    gradients: list[list[Tensor | None]]
    seen: Sequence[local.SeenRows] | None
    """Its rows, where this process owns all."""


@dataclass
class _Backward:
    """The calls that a backward has reached, by module. Only what autograd runs at its end keeps it, so it goes with a
    backward that fails."""

    reached: dict[EagerContext, list[_Reached]]

    def finish(self) -> None:
        """One update of every module."""
        for context, reached in sorted(self.reached.items(), key=lambda entry: min(one.order for one in entry[1])):
            context._finish(reached)


_running: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()
"""Those that have reached a call, by autograd's number."""


class EagerContext:
    """Answers the lookups of one module by exchanging with the other ranks at once."""

    def __init__(self, module: EmbeddingModule, name: str = "embedding") -> None:
        self._module = module
        communicator = module.communicator
        modules = {name: module}
        topology = Topology(communicator, module.sparse_groups)
        topology.connect()
        owner = default_slice_owner(topology.num_shards)
        self._rank = RankState(
            communicator, modules, bind_stores(modules), owner, pool=TensorPool(keep=False), topology=topology
        )
        self._name = name
        self._exchanges = 0
        self._clock = 0

    @property
    def step_count(self) -> int:
        """Updates done so far."""
        return self._rank.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._rank.step_count = count

    def lookup(self, module: EmbeddingModule, features: Any) -> Any:
        """Exchange keys and rows for `features` and pool them. Collective."""
        training = torch.is_grad_enabled() and bool(getattr(module, "training", True))
        if local.is_local(self._rank):
            return self._lookup_here(features, training)
        batch, call = self._begin("forward", features)
        routing.exchange_keys(self._rank, batch, 0)
        self._check(batch)
        assert call is not None
        if training:
            self._replicate_keys(batch)
        (retrieval.retrieve if training else retrieval.find)(self._rank, batch, 0)
        if training and self._rank.topology.mode == "average":
            for binding, owner in zip(self._rank.bindings, batch.owner):
                replicas.forget_evicted(binding.store, owner)
        retrieval.gather_all(self._rank, batch, 0)
        window.send_rows(self._rank, batch, 0)
        window.land_rows(self._rank, batch, 0)
        if training and batch.failure is not None:
            retrieval.undo_retrieval(self._rank, batch)
        self._raise_own(batch)
        received = [plan.received for plan in batch.plans]
        return self._run(call, received, [plan.source.slots[0] for plan in batch.plans], None)

    def _lookup_here(self, features: Any, training: bool) -> Any:
        """The same where this process owns all rows: they stay in their stores."""
        batch = self._new_batch("forward")
        call = self._module.plan_call(features)
        if not torch.is_grad_enabled():
            by_key = local.keyed(self._rank, call)
            return self._run(call, by_key, [keys.keys for keys in call.stores], None)
        seen = local.look_up(self._rank, batch, call, training)
        self._raise_own(batch)
        rows: list[Tensor | StoredRows] = [found.rows for found in seen]
        try:
            if call.weights is not None and call.weights.requires_grad:  # backward must see them as they are now
                rows = [r.store.read_embeddings(r.handles, r.keys, r.tables) for r in (found.rows for found in seen)]
            return self._run(call, rows, [found.slots for found in seen], seen)
        except BaseException:  # a default row that a user's function gives, for one
            if training:
                retrieval.undo_retrieval(self._rank, batch)
            raise

    def _run(
        self,
        call: LookupCall,
        rows: Sequence[Tensor | StoredRows | KeyedRows],
        slots: Sequence[Tensor],
        seen: Sequence[local.SeenRows] | None,
    ) -> Any:
        """Pool the rows; a backward that reaches the outputs ends with an update."""
        order = next(_orders)

        def reached(which: LookupCall, grads: list[list[Tensor | None]]) -> None:
            number = torch._C._current_graph_task_id()
            backward = _running.get(number)
            if backward is None:
                refuse_scaled_backward()
                _running[number] = backward = _Backward({})
                torch.autograd.Variable._execution_engine.queue_callback(backward.finish)
            backward.reached.setdefault(self, []).append(_Reached(order, which, grads, seen))

        return run_lookup(call, rows, slots, reached, [list(b.store.tables) for b in self._rank.bindings])

    def _begin(self, stage: str, features: Any) -> tuple[BatchState, LookupCall | None]:
        """Plan a call and announce it; bad input is announced as a failure, so that no rank waits for this one."""
        batch = self._new_batch(stage)
        call: LookupCall | None = None
        with batch.guard(self._rank.communicator.rank, stage):
            call = self._module.plan_call(features)
        self._announce(batch, [call] if call is not None else [])
        return batch, call

    def average_copies(self) -> None:
        """Make rows whose copies in the sparse groups differ their mean. Collective."""
        if self._rank.topology.mode == "average":
            replicas.average_copies(self._rank, self._new_batch("average"))

    def _replicate_keys(self, batch: BatchState) -> None:
        if self._rank.topology.num_groups > 1:
            replicas.replicate_keys(self._rank, batch, 0)

    def _new_batch(self, stage: str) -> BatchState:
        self._exchanges += 1
        # Rows that a pipeline used since then count as this batch's: what is pinned may be too much, never too little.
        newest = max((binding.store.last_batch for binding in self._rank.bindings), default=-1)
        self._clock = max(self._clock, self._rank.step_count, newest)
        return BatchState(self._exchanges, f"eager/{stage}{self._exchanges}", self._clock, has_batch=True)

    def _announce(self, batch: BatchState, calls: Sequence[LookupCall]) -> None:
        batch.plans = routing.plan_keys(self._rank, [{self._name: list(calls)}])
        routing.announce(self._rank, batch)

    def _check(self, batch: BatchState) -> None:
        """After the announcements: raise what failed, here or elsewhere; nothing has changed."""
        self._raise_own(batch)
        if batch.remote is not None:
            raise RemoteRankError(batch.remote.rank, batch.remote.stage, batch.index, batch.remote.message)

    def _raise_own(self, batch: BatchState) -> None:
        if batch.failure is not None and batch.failure.error is not None:
            raise batch.failure.error

    def _finish(self, reached: list[_Reached]) -> None:
        """End of backward: gradients of every call that it reached, in call order, to the owners; one update."""
        reached.sort(key=lambda entry: entry.order)
        with torch.no_grad():
            if len(reached) == 1 and reached[0].seen is not None and self._update_here(reached[0], reached[0].seen):
                return
            self._update([one.call for one in reached], [one.gradients for one in reached])

    def _update_here(self, reached: _Reached, seen: Sequence[local.SeenRows]) -> bool:
        """The update of a single call whose rows are all here; False: nothing was done."""
        if not local.update(self._rank, self._new_batch("backward"), reached.call, seen, reached.gradients):
            return False
        self._clock += 1
        return True

    def _update(self, calls: list[LookupCall], gradients: list[list[list[Tensor | None]]]) -> None:
        rank, batch = self._rank, self._new_batch("backward")
        self._announce(batch, calls)
        routing.exchange_keys(rank, batch, 0)
        self._check(batch)
        self._replicate_keys(batch)
        commit.begin(rank, batch, 0)
        retrieval.find(rank, batch, 0)
        retrieval.gather_all(rank, batch, 0)
        if any(PoolingType.MAX.code in plan.occurrences[0].segment_modes for plan in batch.plans):
            # Max pooling must see its rows again: this exchange has its own slots.
            window.send_rows(rank, batch, 0)
            window.land_rows(rank, batch, 0)
        with batch.guard(rank.communicator.rank, "backward"):
            for k, plan in enumerate(batch.plans):
                grads = [grad for call in gradients for grad in call[k]]
                window.accumulate_gradients(plan, plan.occurrences[0], plan.source.slots[0], grads)
        window.send_grads(rank, batch, 0)
        window.recv_grads(rank, batch, 0)
        if rank.topology.mode == "exact":
            replicas.replicate_grads(rank, batch, 0)
            replicas.recv_replica_grads(rank, batch, 0)
        commit.reduce_grads(rank, batch, 0)
        commit.post_flags(rank, batch, 0)
        commit.verdict(rank, batch, 0)
        assert batch.verdict is not None
        if not batch.verdict.ok:
            self._raise_own(batch)
            if batch.verdict.failure is not None:
                failure = batch.verdict.failure
                raise RemoteRankError(failure.rank, failure.stage, batch.index, failure.message)
            raise NonFiniteGradientError(f"backward: {batch.verdict.non_finite} are not finite; no row was changed")
        commit.update(rank, batch, 0)
        if rank.topology.mode == "average":
            for stage in (replicas.average_announce, replicas.average_send, replicas.average_rows):
                stage(rank, batch, 0)
        retrieval.write_back(rank, batch, 0)
        self._clock += 1


def eager_context(module: EmbeddingModule) -> EagerContext:
    """The module's own context, made on first use."""
    context = getattr(module, "_eager_context", None)
    if context is None or context._rank.communicator is not module.communicator:
        context = EagerContext(module)
        object.__setattr__(module, "_eager_context", context)
    return context
