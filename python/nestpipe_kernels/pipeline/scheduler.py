"""Runs a stage graph on lanes: background lanes are filled in one topological order, caller nodes run where
`progress()` is called.

Who waits for what. A node's event is set when it has run; a lane waits for the events of the node's predecessors, in
order, then runs it. Lanes are filled batch after batch in the graph's topological order, the same on all ranks, so
first-in-first-out lanes cannot wait in a circle (`check_lanes` proves it for a graph) and every collective of a
purpose starts in the same order everywhere.

Which nodes are submitted when. "Ahead" nodes (retrieval, and sync) of batch t + 1 are submitted once batch t + 1 has
been drawn, if the schedule prefetches; "window" nodes of batch t when `progress()` for t begins, before the ahead
nodes of t + 1, so that no lane sees sync(t + 1) before update(t).
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

from ..device import Event, ThreadLane, create_lane
from ..errors import GraphError
from ..stages.registry import run_stage
from ..stages.state import BatchState, RankState
from ..trace import COMPUTE_LANE, Timeline
from .graph import Graph, Node, Stage, Unrolled

__all__ = ["LaneScheduler", "check_lanes"]

_AHEAD = ("prefetch", "route", "route_keys", "retrieve", "gather", "sync")
_HORIZON = 3


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
        device: "cpu".
    """

    def __init__(
        self,
        graph: Graph,
        rank: RankState,
        micro_batches: int,
        timeline: Timeline,
        timeout_s: float,
        device: str = "cpu",
    ) -> None:
        check_lanes(graph, micro_batches)
        self.graph = graph
        self.rank = rank
        self.timeline = timeline
        self.timeout_s = timeout_s
        unrolled = Unrolled(graph, 2 * _HORIZON, micro_batches)
        steady = _HORIZON  # a batch whose neighbours on both sides are unrolled
        self._order = [n for n in unrolled.nodes if n.batch == steady]
        before = unrolled.predecessors()
        rank_of = {n: k for k, n in enumerate(unrolled.nodes)}
        self._before = {
            (n.stage, n.micro): [
                (p.stage, p.batch - steady, p.micro) for p in sorted(before[n], key=lambda p: rank_of[p])
            ]
            for n in self._order
        }
        self._blame = {(n.stage, n.micro): self._ancestors(n, before, rank_of, steady) for n in self._order}
        names = sorted({s.lane for s in graph.stages} - {"caller"})
        self.lanes = {name: create_lane(device, name, timeline) for name in names}
        # A scheduler that is dropped without close() must not leave its threads behind.
        dropped = weakref.finalize(self, _abandon_lanes, list(self.lanes.values()))
        dropped.atexit = False  # type: ignore[misc]
        self._events: dict[Node, Event] = {}
        self._floor = 0

    def _ancestors(
        self, node: Node, before: dict[Node, list[Node]], rank_of: dict[Node, int], steady: int
    ) -> list[tuple[str, int, int]]:
        """Background nodes that a caller node waits for, earliest first: tells what kind of work kept it waiting."""
        if self.graph.by_name[node.stage].lane != "caller":
            return []
        seen: set[Node] = set()
        todo = list(before[node])
        while todo:
            p = todo.pop()
            if p in seen or p.batch < steady - 1 or self.graph.by_name[p.stage].lane == "caller":
                continue
            seen.add(p)
            todo += before[p]
        return [(p.stage, p.batch - steady, p.micro) for p in sorted(seen, key=lambda p: rank_of[p])]

    # -------------------------------------------------------------------------------------------- events

    def _event(self, stage: str, batch: int, micro: int) -> Event | None:
        """The event of a node; None where it lies before the last reset (everything there has run)."""
        if batch < self._floor:
            return None
        node = Node(stage, batch, micro)
        event = self._events.get(node)
        if event is None:
            event = self._events[node] = Event(f"{stage}({batch}, {micro})")
        return event

    def reset(self, next_batch: int) -> None:
        """Forget all events; everything submitted must have ended (`drain`). Batches from `next_batch` on are new."""
        self._events.clear()
        self._floor = next_batch

    def forget_before(self, batch: int) -> None:
        """Drop events of batches that nothing can wait for any more."""
        for node in [n for n in self._events if n.batch < batch]:
            del self._events[node]
        self._floor = max(self._floor, batch)

    # ------------------------------------------------------------------------------------------ background

    def start_ahead(self, batch: BatchState) -> None:
        """Queue retrieval (and sync) of a batch that has been drawn."""
        self._submit(batch, lambda stage: stage.name in _AHEAD)

    def start_window(self, batch: BatchState) -> None:
        """Queue the rest of a batch."""
        self._submit(batch, lambda stage: stage.name not in _AHEAD)

    def _submit(self, batch: BatchState, chosen: Callable[[Stage], bool]) -> None:
        for node in self._order:
            stage = self.graph.by_name[node.stage]
            if stage.lane == "caller" or not chosen(stage):
                continue
            done = self._event(node.stage, batch.index, node.micro)
            assert done is not None

            def work(stage: Stage = stage, micro: int = node.micro) -> None:
                run_stage(stage.function, self.rank, batch, micro)

            self.lanes[stage.lane].submit(
                work,
                self._waits(node, batch.index),
                done,
                stage.name,
                batch=batch.index,
                micro=node.micro if stage.micro else None,
                kind=stage.kind,
            )

    def _waits(self, node: Node, index: int) -> list[Event]:
        found = (
            self._event(stage, index + shift, micro) for stage, shift, micro in self._before[node.stage, node.micro]
        )
        return [event for event in found if event is not None]

    # -------------------------------------------------------------------------------------------- caller

    def run_caller(self, stage_name: str, batch: BatchState, micro: int = 0, report_as: int | None = None) -> None:
        """Run a node of the caller's lane here: wait for what it needs (counted as exposed), then work.

        `report_as`: batch index for the timeline, where work is done during another batch's step.
        """
        stage = self.graph.by_name[stage_name]
        shown = batch.index if report_as is None else report_as
        for name, shift, i in self._blame[stage_name, micro]:
            event = self._event(name, batch.index + shift, i)
            if event is not None and not event.is_set():
                self._wait(event, name, shown, micro if stage.micro else None)
        for event in self._waits(Node(stage_name, batch.index, micro), batch.index):
            event.wait(self.timeout_s)
        for purpose in stage.lands:
            handle = batch.handles.get((purpose, micro))
            if handle is not None:
                start = time.perf_counter_ns()
                handle.wait(batch.timeout_s)
                self._record(f"wait {purpose}", shown, micro if stage.micro else None, start, "communication", True)
        start = time.perf_counter_ns()
        run_stage(stage.function, self.rank, batch, micro)
        self._record(stage.name, shown, micro if stage.micro else None, start, stage.kind, False)
        done = self._event(stage_name, batch.index, micro)
        assert done is not None
        done.set()

    def mark_done(self, stage_name: str, batch: BatchState) -> None:
        """Set the event of a caller node whose work was done before: a batch that was drawn earlier and parked."""
        event = self._event(stage_name, batch.index, 0)
        assert event is not None
        event.set()

    def wait_for(self, stage_name: str, batch: BatchState) -> None:
        """Wait on the caller's thread until a background node has run (counted as exposed)."""
        event = self._event(stage_name, batch.index, 0)
        if event is not None and not event.is_set():
            self._wait(event, stage_name, batch.index, None)
        if event is not None:
            event.wait(self.timeout_s)

    def _wait(self, event: Event, name: str, batch: int, micro: int | None) -> None:
        start = time.perf_counter_ns()
        event.wait(self.timeout_s)
        self._record(f"wait {name}", batch, micro, start, self.graph.by_name[name].kind, True)

    def _record(self, name: str, batch: int, micro: int | None, start: int, kind: str, exposed: bool) -> None:
        self.timeline.record(COMPUTE_LANE, name, batch, micro, start, time.perf_counter_ns(), kind, exposed)

    def abandon(self, batch: BatchState) -> None:
        """After the last batch: what only the caller, or a batch that will not come, could have done counts as done."""
        for node, event in list(self._events.items()):
            by_caller = node.batch == batch.index and self.graph.by_name[node.stage].lane == "caller"
            if (by_caller or node.batch > batch.index) and not event.is_set():
                event.set()

    # --------------------------------------------------------------------------------------------- end

    def drain(self) -> None:
        """Wait until everything queued has run; raises the first error of a background node."""
        for lane in self.lanes.values():
            lane.synchronize(self.timeout_s)
        for event in list(self._events.values()):
            if event.error is not None:
                raise event.error

    def close(self, wait_s: float) -> bool:
        """Stop the lanes; what has not started is dropped. False if work was still under way after `wait_s` seconds."""
        stopped = True
        for lane in self.lanes.values():
            try:
                lane.close(cancel=True, timeout_s=wait_s)
            except TimeoutError:  # it waits for another rank; the lane's thread ends with that exchange's time-out
                stopped = False
        return stopped
