"""Counters of a step, handed to callbacks when the step is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from ..ops.wire_rows import wire_dtype, wire_width
from ..stages.state import BatchState, RankState
from ..types import KeyStatus

__all__ = ["StepCallback", "StepCounters", "StepReports"]


@dataclass(frozen=True)
class StepCounters:
    """What one training step did on this rank. A row is a key of a table, counted once however often it occurs.

    Attributes:
        step: `Step.index`.
        rank: whose numbers these are.
        samples: this rank's samples.
        distinct_rows: rows that this rank's samples look up.
        rows_sent: embeddings that this rank sent as their owner, those to itself included. With row_transfer="once"
            the sum over ranks is that of distinct_rows (more, where rows are sent again after a bad batch).
        row_bytes: bytes of them that went to other ranks.
        gradients_sent: row gradients that this rank sends to their owners, itself included. The last of them may still
            be on their way.
        gradient_bytes: bytes of them for other ranks.
            What copies of the tables pass on to each other (sparse_groups) is in neither.
        owned_rows: rows of the batch, of all ranks' samples, that this rank owns: the fill of its row buffer.
        kept_rows: of those, the rows that the batch before has, too: kept from buffer to buffer, not read from the
            store. 0 in schedules without prefetch.
        new_rows: rows that the batch inserted on this rank.
        evicted_rows: rows that went to make room on this rank, or expired.
        rowless_keys: keys of the batch that this rank would own and that have no row (refused, or not admitted).
        skipped_rows: `Step.skipped_rows`, over all ranks.
        table_rows: rows of each table on this rank, after the batch was retrieved. Names of tables; of several
            modules, "module.table".
        step_ms: milliseconds in `progress()`.
        compute_ms: of those, the model's forward and backward, the dense optimizer.
        exposed_lookup_ms, exposed_communication_ms, exposed_other_ms: of those, waiting for routing, store and
            buffers; for rows, gradients and other ranks; for other work.
    """

    step: int
    rank: int
    samples: int
    distinct_rows: int
    rows_sent: int
    row_bytes: int
    gradients_sent: int
    gradient_bytes: int
    owned_rows: int
    kept_rows: int
    new_rows: int
    evicted_rows: int
    rowless_keys: int
    skipped_rows: int
    table_rows: Mapping[str, int]
    step_ms: float
    compute_ms: float
    exposed_lookup_ms: float
    exposed_communication_ms: float
    exposed_other_ms: float

    def scalars(self) -> dict[str, float]:
        """Everything but `step` and `rank` by name, for loggers; rows of tables as "table_rows/NAME"."""
        named: dict[str, float] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Mapping):
                named.update({f"{field.name}/{key}": float(number) for key, number in value.items()})
            elif field.name not in ("step", "rank"):
                named[field.name] = float(value)
        return named


StepCallback = Callable[[StepCounters], None]


class StepReports:
    """The callbacks of one pipeline, and the numbers of the step that is running."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._callbacks: list[StepCallback] = []
        self._ready: StepCounters | None = None
        self._begin_ns = 0

    def add(self, callback: StepCallback) -> None:
        """Raises TypeError unless it can be called."""
        if not callable(callback):
            raise TypeError(
                f"add_step_callback: expected a function of one StepCounters, got {type(callback).__name__}"
            )
        self._callbacks.append(callback)
        self._rank.counting = True

    def begin(self, spent_ns: dict[tuple[str, bool], int]) -> None:
        """A step begins: its times count from here."""
        self._ready, self._begin_ns = None, time.perf_counter_ns()
        spent_ns.clear()

    def collect(self, batch: BatchState, spent_ns: Mapping[tuple[str, bool], int]) -> None:
        """A batch has counted; `spent_ns` {(kind of stage, waited): time on the caller's thread}."""
        if self._callbacks and batch.counts.statuses is not None:
            self._ready = _counters(self._rank, batch, spent_ns, time.perf_counter_ns() - self._begin_ns)

    def tell(self) -> None:
        """Between steps: hand over what was collected."""
        counters, self._ready = self._ready, None
        if counters is not None:
            for callback in self._callbacks:
                callback(counters)


def _counters(
    rank: RankState, batch: BatchState, spent_ns: Mapping[tuple[str, bool], int], step_ns: int
) -> StepCounters:
    statuses, verdict = batch.counts.statuses, batch.verdict
    assert statuses is not None and verdict is not None
    rows = list(batch.counts.sent)
    gradients, gradient_bytes = _gradients(rank, batch)
    return StepCounters(
        step=batch.clock,
        rank=rank.communicator.rank,
        samples=batch.size,
        distinct_rows=sum(len(plan.source.lists.keys) for plan in batch.plans),
        rows_sent=sum(sent.rows for sent in rows),
        row_bytes=sum(sent.bytes_out for sent in rows),
        gradients_sent=gradients,
        gradient_bytes=gradient_bytes,
        owned_rows=sum(len(owner.keys) for owner in batch.owner),
        kept_rows=batch.counts.kept,
        new_rows=statuses[KeyStatus.INSERTED],
        evicted_rows=batch.counts.evicted,
        rowless_keys=statuses[KeyStatus.REFUSED] + statuses[KeyStatus.NOT_ADMITTED],
        skipped_rows=verdict.skipped_rows,
        table_rows=batch.counts.table_rows,
        step_ms=step_ns / 1e6,
        compute_ms=spent_ns.get(("compute", False), 0) / 1e6,
        exposed_lookup_ms=spent_ns.get(("lookup", True), 0) / 1e6,
        exposed_communication_ms=spent_ns.get(("communication", True), 0) / 1e6,
        exposed_other_ms=(spent_ns.get(("other", True), 0) + spent_ns.get(("compute", True), 0)) / 1e6,
    )


def _gradients(rank: RankState, batch: BatchState) -> tuple[int, int]:
    """Row gradients of a batch, and their bytes for other ranks: as planned, since not all need have been sent yet."""
    wire, own = rank.gradient_wire, rank.topology.shard
    count = size = 0
    for binding, plan in zip(rank.bindings, batch.plans):
        row_bytes = wire_width(binding.store.dim, wire) * wire_dtype(wire).itemsize
        for move in plan.grads:
            count += sum(move.per_peer)
            size += (sum(move.per_peer) - move.per_peer[own]) * row_bytes
    return count, size
