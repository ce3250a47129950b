"""`nested` with early send and early update: the graph of `nested` with other stages between two windows.

What changes, seen from batch t: the rows of its first micro-batch leave in three messages during the window of t - 1,
each as soon as they are final; gradients of its last micro-batch leave in two, first those that batch t + 1 waits for;
rows are updated with the last micro-batch that uses them; only write-back waits for the verdict.
"""

from __future__ import annotations

from dataclasses import replace

from .graph import Access, Cost, Edge, Graph, Micro, Region, Stage, read, write

__all__ = ["with_early_send"]


def _each(resource: str, *, writes: bool = False, region: Region = Region.ALL, shift: int = 0) -> Access:
    return Access(resource, writes, region, "each", shift)


def _copies(kind: Region) -> tuple[Access, Access]:
    return read("buffer", kind, "parity", shift=-1), write("buffer", kind, "parity")


def _row_stages() -> list[Stage]:
    """From retrieval to the first micro-batch's rows, all on a lane of their own."""
    cost = Cost("network", "row_bytes")
    return [
        Stage("tell_kinds", "early_tell", "early", "communication", posts=("early.kinds",), accesses=(
            _each("owner_plan", writes=True), _each("owner_plan", shift=-1), _each("key_sizes", shift=-1),
            _each("urgent", writes=True, shift=-1), _each("kinds", writes=True)), cost=Cost("network", "keys")),
        Stage("send_fresh", "early_fresh", "early", "communication", lands=("early.kinds",), posts=("early.fresh",),
              accesses=(_each("owner_plan"), _each("kinds", writes=True), _each("urgent", writes=True, shift=-1),
                        read("buffer", Region.FRESH, "parity")), cost=cost),
        Stage("send_soon", "early_soon", "early", "communication", posts=("early.soon",), accesses=(
            _each("owner_plan"), _each("kinds"), *_copies(Region.EARLY)), cost=cost),
        Stage("send_urgent", "early_urgent", "early", "communication", posts=("early.urgent",), accesses=(
            _each("owner_plan"), _each("kinds"), *_copies(Region.URGENT)), cost=cost),
    ]  # fmt: skip


def _window_stages() -> dict[str, Stage]:
    """Stages that take the place of, or come beside, those of the same name."""
    stages = [
        Stage("begin", "early_begin", "caller", "other", posts=("resend",), accesses=(
            read("step_count"), write("dense.gradients"), _each("settings", writes=True),
            _each("resend", writes=True))),
        Stage("send_rows", "early_rows", "exchange", "communication", micro=True, lands=("resend",), posts=("rows",),
              accesses=(_each("owner_plan"), _each("resend"),
                        read("buffer", Region.FIRST, "parity")), cost=Cost("network", "row_bytes")),
        Stage("send_grads", "early_grads", "exchange", "communication", micro=True, posts=("grads",), accesses=(
            _each("plan"), _each("urgent", region=Region.CLOSING), _each("loss", region=Region.LAST),
            _each("gradients", writes=True, region=Region.LAST), _each("peaks", writes=True, region=Region.LAST),
            _each("remaining", writes=True, region=Region.CLOSING)), cost=Cost("network", "row_bytes")),
        Stage("recv_grads", "early_recv", "device", "communication", micro=True, lands=("grads",), accesses=(
            _each("owner_plan"), _each("urgent", region=Region.CLOSING), _each("settings"),
            _each("boxes", writes=True, region=Region.LAST), _each("boxes", region=Region.DONE),
            _each("updated", writes=True, region=Region.DONE), write("buffer", Region.DONE, "parity")),
            cost=Cost("hbm", "row_bytes")),
        Stage("send_rest", "early_rest", "exchange", "communication", posts=("grads.rest",), accesses=(
            _each("plan"), _each("urgent"), _each("remaining", writes=True), _each("loss")),
            cost=Cost("network", "row_bytes")),
        Stage("update", "early_update", "device", "communication", lands=("grads.rest",), accesses=(
            _each("owner_plan"), _each("urgent"), _each("settings"), _each("boxes", writes=True),
            _each("updated", writes=True), write("buffer", Region.LEFT, "parity")), cost=Cost("hbm", "row_bytes")),
        Stage("write_back", "write_back", "write_back", "lookup", accesses=(
            _each("owner_plan"), _each("verdict"), read("buffer", Region.BATCH, "parity"),
            write("store.rows", Region.BATCH)), cost=Cost("dram", "row_bytes")),
    ]  # fmt: skip
    return {stage.name: stage for stage in stages}


def _edges() -> list[Edge]:
    return [
        Edge("gather", "tell_kinds", "which rows the batch before has, too"),
        Edge("tell_kinds", "send_fresh", "the kinds", across=True),
        Edge("send_fresh", "send_soon", "what is in the message"),
        Edge("send_fresh", "send_urgent", "what is in the message"),
        Edge("send_fresh", "send_grads", "which gradients go first", -1, Micro.LAST),
        Edge("recv_grads", "send_soon", "rows of the batch before are final", 1, Micro.LAST_BUT_ONE),
        Edge("recv_grads", "send_urgent", "rows of the batch before are final", 1, Micro.LAST),
        Edge("send_soon", "gather", "gather refills the buffer that it copies from", 1),
        Edge("send_soon", "send_rows", "rows that are here"),
        Edge("send_urgent", "send_rows", "rows that are here; the first micro-batch's own", micro=Micro.FIRST),
        Edge("begin", "send_rows", "whether they go again", across=True),
        Edge("sync", "send_rows", "the rows", micro=Micro.LATER),
        Edge("send_urgent", "send_rest", "after what the next batch waits for", -1),
        Edge("send_grads", "send_rest", "which gradients are left", micro=Micro.LAST),
        Edge("send_rest", "update", "the gradients", across=True),
        Edge("recv_grads", "update", "which rows are left", micro=Micro.LAST),
        Edge("verdict", "write_back", "the verdict"),
    ]


_GONE = {
    "gather -> sync",
    "sync -> send_rows",
    "begin -> forward_backward[first]",
    "recv_grads -> reduce_grads[last]",
    "reduce_grads -> update",
    "verdict -> update",
}
"""Edges of `nested` that others stand for."""


def with_early_send(graph: Graph) -> Graph:
    """`nested` with rows sent once, turned into the schedule with early send."""
    ours = _window_stages()
    stages: list[Stage] = []
    for stage in graph.stages:
        if stage.name == "reduce_grads":
            stages.append(ours["send_rest"])
        elif stage.name == "sync":
            plans = (_each("owner_plan", region=Region.REST, shift=shift) for shift in (0, -1))
            stages += [*_row_stages(), replace(stage, accesses=(*plans, *_copies(Region.REST)))]
        else:
            stages.append(ours.get(stage.name, stage))
    edges = [edge for edge in graph.edges if edge.label not in _GONE]
    return Graph("nested with early send", tuple(stages), (*edges, *_edges()))
