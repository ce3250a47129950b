"""Runs a stage graph on lanes: background lanes are filled in one topological order, caller nodes run where
`progress()` is called.

Who waits for what. A node's event is set when it has run; a lane waits for the events of the node's predecessors, in
order, then runs it. Lanes are filled batch after batch in the graph's topological order, the same on all ranks, so
first-in-first-out lanes cannot wait in a circle (`check_lanes` proves it for a graph) and every collective of a
purpose starts in the same order everywhere.

Plans. Which nodes a batch has, on which lanes, in which order and after which others never changes, so it is worked out
once for each graph; a step makes one event for each node and one queue entry for each background node, lane by lane.

Which nodes are submitted when. "Routing" nodes of a batch are submitted once it has been drawn, if the schedule
prefetches; "window" nodes of batch t when `progress()` for t begins; "retrieval" nodes (and sync) of batch t + 1 after
those, so that no lane sees sync(t + 1) before update(t).
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ..device import Event, Item, ThreadLane, create_lane
from ..errors import GraphError
from ..stages.counting import profiler_range
from ..stages.registry import run_stage
from ..stages.state import BatchState, RankState
from ..trace import COMPUTE_LANE, Timeline
from .graph import Graph, Node, Stage, Unrolled

__all__ = ["LaneScheduler", "check_lanes", "on_one_lane"]

_ROUTING = ("prefetch", "fetch", "copy", "route", "route_keys", "replicate_keys", "warm")
_RETRIEVAL = ("retrieve", "gather", "tell_kinds", "send_fresh", "send_soon", "send_urgent", "sync")
_AWAITED = "route_keys"
"""The background stage that the caller waits for before it draws: then all ranks know whether there is a batch."""
_HORIZON = 3


def on_one_lane(graph: Graph) -> Graph:
    """The graph for a device with collectives of its own: all that they carry is posted by the exchange lane, in plan
    order, as every rank must post them in one order."""
    stages = [replace(s, lane="exchange") if any(p.startswith("dense.") for p in s.posts) else s for s in graph.stages]
    return replace(graph, stages=type(graph.stages)(stages))


def check_lanes(graph: Graph, micro_batches: int) -> None:
    """Raise GraphError if first-in-first-out lanes, filled batch after batch, could wait in a circle."""
    unrolled = Unrolled(graph, _HORIZON + 2, micro_batches)
    per_lane: dict[str, list[Node]] = defaultdict(list)
    for t in range(unrolled.batches):
        for node in unrolled.nodes:
            lane = graph.by_name[node.stage].lane
            if node.batch == t and lane != "caller":
                per_lane[lane].append(node)
    for lane, nodes in per_lane.items():
        unrolled.edges[f"lane {lane}"] = list(zip(nodes, nodes[1:]))
    try:
        unrolled.topological()
    except GraphError as error:
        raise GraphError(f"graph {graph.name!r}: lanes would deadlock: {error}") from None


@dataclass(frozen=True, slots=True)
class _Planned:
    """A node of any batch. Other nodes are given as (shift of the batch, slot among the nodes of that batch)."""

    stage: Stage
    micro: int
    shown_micro: int | None
    """`micro` for the timeline; None where the stage has one node for each batch."""
    slot: int
    waits: tuple[tuple[int, int], ...]
    """What comes before it, earliest first."""
    blame: tuple[tuple[int, int, str], ...]
    """Of a caller node, and of one that the caller waits for: the background nodes that it waits for, directly or not,
    with their stages, earliest first. They tell what kind of work kept the caller waiting."""


def _abandon_lanes(lanes: list[ThreadLane]) -> None:
    for lane in lanes:
        with suppress(TimeoutError):
            lane.close(cancel=True, timeout_s=0.0)


class LaneScheduler:
    """One rank's lanes and events for one graph.

    Args:
        graph: validated stage graph.
        rank: what the stages work on.
        micro_batches: N.
        timeline: where spans go.
        timeout_s: limit of every wait on the caller's thread; exchanges have their own.
    """

    def __init__(
        self,
        graph: Graph,
        rank: RankState,
        micro_batches: int,
        timeline: Timeline,
        timeout_s: float,
    ) -> None:
        self._new_event = rank.backend.event if rank.backend.has_streams else Event
        self.graph = graph = on_one_lane(graph) if rank.backend.has_streams else graph
        self.rank = rank
        self.timeline = timeline
        self.timeout_s = timeout_s
        self.set_micro_batches(micro_batches)
        names = sorted({s.lane for s in graph.stages} - {"caller"})
        self.lanes = {name: create_lane(rank.backend, name, timeline) for name in names}
        # A scheduler that is dropped without close() must not leave its threads behind.
        dropped = weakref.finalize(self, _abandon_lanes, list(self.lanes.values()))
        dropped.atexit = False  # type: ignore[misc]
        self._events: dict[int, list[Event]] = {}
        """Of every batch that something may wait for, in the order of slots."""
        self._floor = 0
        self.spent_ns: dict[tuple[str, bool], int] = {}
        """Time of the caller's thread by (kind of stage, waited for it), since whoever reads it cleared it."""

    def set_micro_batches(self, micro_batches: int) -> None:
        """Plan for N micro-batches from the next batch on; nothing may be under way, and `reset` must follow or have
        been called.

        Raises:
            GraphError: lanes would wait in a circle.
        """
        self._plan = _plan_of(self.graph, micro_batches)
        self._routing = self._by_lane(lambda stage: stage.name in _ROUTING)
        self._retrieval = self._by_lane(lambda stage: stage.name in _RETRIEVAL)
        self._window = self._by_lane(lambda stage: stage.name not in (*_ROUTING, *_RETRIEVAL))

    def _by_lane(self, chosen: Callable[[Stage], bool]) -> list[tuple[str, list[_Planned]]]:
        """The chosen background nodes of each lane in the order in which it gets them."""
        lanes: dict[str, list[_Planned]] = {}
        for planned in self._plan.values():
            if planned.stage.lane != "caller" and chosen(planned.stage):
                lanes.setdefault(planned.stage.lane, []).append(planned)
        return list(lanes.items())

    # -------------------------------------------------------------------------------------------- events

    def _events_of(self, batch: int) -> list[Event] | None:
        """The events of a batch's nodes; None where it lies before the last reset (everything there has run)."""
        events = self._events.get(batch)
        if events is None and batch >= self._floor:
            events = [self._new_event((stage, batch, micro)) for stage, micro in self._plan]
            self._events[batch] = events
        return events

    def _event(self, stage: str, batch: int, micro: int = 0) -> Event | None:
        events = self._events_of(batch)
        return None if events is None else events[self._plan[stage, micro].slot]

    def _waits(self, planned: _Planned, index: int) -> list[Event]:
        found = []
        for shift, slot in planned.waits:
            events = self._events_of(index + shift)
            if events is not None:
                found.append(events[slot])
        return found

    def reset(self, next_batch: int) -> None:
        """Forget all events; everything submitted must have ended (`drain`). Batches from `next_batch` on are new."""
        self._events.clear()
        self._floor = next_batch

    def forget_before(self, batch: int) -> None:
        """Drop events of batches that nothing can wait for any more."""
        for old in [index for index in self._events if index < batch]:
            del self._events[old]
        self._floor = max(self._floor, batch)

    # ------------------------------------------------------------------------------------------ background

    def start_routing(self, batch: BatchState) -> None:
        """Queue the exchange of keys of a batch that has been drawn."""
        self._submit(batch, self._routing)

    def start_retrieval(self, batch: BatchState) -> None:
        """Queue retrieval (and sync) of a batch."""
        self._submit(batch, self._retrieval)

    def start_window(self, batch: BatchState) -> None:
        """Queue the rest of a batch."""
        self._submit(batch, self._window)

    def _submit(self, batch: BatchState, by_lane: list[tuple[str, list[_Planned]]]) -> None:
        index = batch.index
        events = self._events_of(index)
        assert events is not None
        for lane, nodes in by_lane:
            items = [
                Item(
                    partial(run_stage, p.stage.name, p.stage.function, self.rank, batch, p.micro),
                    self._waits(p, index),
                    events[p.slot],
                    p.stage.name,
                    index,
                    p.shown_micro,
                    p.stage.kind,
                )
                for p in nodes
                if not events[p.slot].is_set()  # done by the caller
            ]
            self.lanes[lane].submit_all(items)

    # -------------------------------------------------------------------------------------------- caller

    def run_caller(self, stage_name: str, batch: BatchState, micro: int = 0, report_as: int | None = None) -> None:
        """Run a node of the caller's lane here: wait for what it needs (counted as exposed), then work.

        `report_as`: batch index for the timeline, where work is done during another batch's step.
        """
        planned = self._plan[stage_name, micro]
        stage, shown = planned.stage, batch.index if report_as is None else report_as
        self._wait_exposed(planned, batch.index, shown)
        for purpose in stage.lands:
            handle = batch.handles.get((purpose, micro))
            if handle is not None:
                start = time.perf_counter_ns()
                with profiler_range(f"wait {purpose}"):
                    handle.wait(batch.timeout_s)
                self._record(f"wait {purpose}", shown, planned.shown_micro, start, "communication", True)
        start = time.perf_counter_ns()
        run_stage(stage_name, stage.function, self.rank, batch, micro)
        self._record(stage.name, shown, planned.shown_micro, start, stage.kind, False)
        self._set(stage_name, batch, micro)

    def _wait_exposed(self, planned: _Planned, index: int, shown: int) -> None:
        waits = self._waits(planned, index)
        if not all(event.is_set() for event in waits):
            self._wait_blaming(planned, index, shown)
        for event in waits:
            event.wait(self.timeout_s)

    def _wait_blaming(self, planned: _Planned, index: int, shown: int) -> None:
        for shift, slot, name in planned.blame:
            events = self._events_of(index + shift)
            if events is not None and not events[slot].is_set():
                self._wait(events[slot], name, shown, planned.shown_micro)

    def _set(self, stage_name: str, batch: BatchState, micro: int = 0) -> None:
        event = self._event(stage_name, batch.index, micro)
        assert event is not None
        event.set()

    def mark_done(self, stage_name: str, batch: BatchState) -> None:
        """Set the event of a caller node whose work was done before: a batch that was drawn earlier and parked."""
        self._set(stage_name, batch)

    def wait_for(self, stage_name: str, batch: BatchState) -> None:
        """Wait on the caller's thread until a background node has run (counted as exposed)."""
        event = self._event(stage_name, batch.index)
        if event is not None:
            if not event.is_set():
                self._wait_blaming(self._plan[stage_name, 0], batch.index, batch.index)
            if not event.is_set():
                self._wait(event, stage_name, batch.index, None)
            event.wait(self.timeout_s)

    def _wait(self, event: Event, name: str, batch: int, micro: int | None) -> None:
        start = time.perf_counter_ns()
        with profiler_range(f"wait {name}"):
            event.wait(self.timeout_s)
        self._record(f"wait {name}", batch, micro, start, self.graph.by_name[name].kind, True)

    def _record(self, name: str, batch: int, micro: int | None, start: int, kind: str, exposed: bool) -> None:
        end = time.perf_counter_ns()
        self.spent_ns[kind, exposed] = self.spent_ns.get((kind, exposed), 0) + end - start
        self.timeline.record(COMPUTE_LANE, name, batch, micro, start, end, kind, exposed)

    def abandon(self, batch: BatchState) -> None:
        """After the last batch: what only the caller, or a batch that will not come, could have done counts as done."""
        for index, events in list(self._events.items()):
            for planned, event in zip(self._plan.values(), events):
                by_caller = index == batch.index and planned.stage.lane == "caller"
                if by_caller or index > batch.index:
                    event.try_set()

    # --------------------------------------------------------------------------------------------- end

    def drain(self) -> None:
        """Wait until everything queued has run; raises the first error of a background node."""
        for lane in self.lanes.values():
            lane.synchronize(self.timeout_s)
        for events in list(self._events.values()):
            for event in events:
                if event.error is not None:
                    raise event.error

    def close(self, wait_s: float) -> bool:
        """Stop the lanes; what has not started is dropped. False if work was still under way after `wait_s` seconds."""
        _abandon_lanes(list(self.lanes.values()))  # all at once: then one limit holds for them together
        deadline = time.monotonic() + wait_s
        stopped = True
        for lane in self.lanes.values():
            try:
                lane.close(cancel=True, timeout_s=max(deadline - time.monotonic(), 0.0))
            except TimeoutError:  # it waits for another rank; the lane's thread ends with that exchange's time-out
                stopped = False
        return stopped


@functools.lru_cache(maxsize=64)
def _plan_of(graph: Graph, micro_batches: int) -> dict[tuple[str, int], _Planned]:
    """The nodes of a batch by stage and micro-batch, in the order in which lanes are filled: one for all schedulers."""
    check_lanes(graph, micro_batches)
    return {(p.stage.name, p.micro): p for p in _planned(Unrolled(graph, 2 * _HORIZON, micro_batches), _HORIZON)}


def _planned(unrolled: Unrolled, steady: int) -> list[_Planned]:
    """The nodes of batch `steady` (whose neighbours on both sides are unrolled), in the order in which lanes are
    filled."""
    before, by_name = unrolled.predecessors(), unrolled.graph.by_name
    rank_of = {n: k for k, n in enumerate(unrolled.nodes)}
    order = [n for n in unrolled.nodes if n.batch == steady]
    slots = {(n.stage, n.micro): slot for slot, n in enumerate(order)}

    def place(node: Node) -> tuple[int, int]:
        return node.batch - steady, slots[node.stage, node.micro]

    def ancestors(node: Node) -> list[Node]:
        seen: set[Node] = set()
        todo = list(before[node])
        while todo:
            p = todo.pop()
            if p in seen or p.batch < steady - 1 or by_name[p.stage].lane == "caller":
                continue
            seen.add(p)
            todo += before[p]
        return sorted(seen, key=lambda p: rank_of[p])

    return [
        _Planned(
            by_name[n.stage],
            n.micro,
            n.micro if by_name[n.stage].micro else None,
            slots[n.stage, n.micro],
            tuple(place(p) for p in sorted(before[n], key=lambda p: rank_of[p])),
            tuple((*place(p), p.stage) for p in ancestors(n))
            if by_name[n.stage].lane == "caller" or n.stage == _AWAITED
            else (),
        )
        for n in order
    ]
