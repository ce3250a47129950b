"""The schedules: one list of stages, and for each schedule the edges that order them.

A schedule is three switches, turned into stages and edges; no stage function knows which one runs it.

- `prefetch`: retrieval of batch t + 1 overlaps the window of batch t (dual buffers, sync). Without it retrieval t + 1
  waits for write-back t.
- `overlap`: exchanges of micro-batches overlap compute (the frozen window). Without it micro-batches run one after
  another.
- `stale`: rows are read before the previous write-back and never synced (a baseline, not exact).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .dense_schedule import with_dense_at_once
from .early_schedule import with_early_send
from .graph import Access, Cost, Edge, Graph, Micro, Region, Stage, read, write
from .replica_schedule import replicated
from .warming import with_warming

__all__ = ["AHEAD", "EVALUATION", "SCHEDULES", "Schedule", "build_graph", "evaluation_graph"]


@dataclass(frozen=True)
class Schedule:
    """What a schedule allows to overlap."""

    prefetch: bool
    overlap: bool
    stale: bool = False


SCHEDULES = {
    "sequential": Schedule(prefetch=False, overlap=False),
    "dbp": Schedule(prefetch=True, overlap=False),
    "fwp": Schedule(prefetch=False, overlap=True),
    "nested": Schedule(prefetch=True, overlap=True),
    "async": Schedule(prefetch=True, overlap=True, stale=True),
}
EVALUATION = "evaluate"
AHEAD = 2
"""Batches that have been drawn, in every schedule, beyond the one that is trained."""


def _each(resource: str, *, writes: bool = False, region: Region = Region.ALL) -> Access:
    return Access(resource, writes, region, "each")


def _retrieval_stages(schedule: Schedule) -> list[Stage]:
    fresh = schedule.prefetch and not schedule.stale
    buffer = "parity"
    stages = [
        Stage("prefetch", "prefetch", "caller", "other", accesses=(
            write("loader"), write("random"), _each("batch", writes=True)), cost=Cost("loader", "samples")),
        Stage("route", "route", "routing", "lookup", posts=("keys.sizes",), accesses=(
            _each("batch"), _each("plan", writes=True)), cost=Cost("cpu", "occurrences")),
        Stage("route_keys", "route_keys", "routing", "lookup", lands=("keys.sizes",), posts=("keys.keys",), accesses=(
            _each("plan"), _each("key_sizes", writes=True)), cost=Cost("network", "key_bytes")),
        Stage("retrieve", "retrieve", "retrieval", "lookup", lands=("keys.keys",), accesses=(
            _each("key_sizes"), _each("owner_plan", writes=True), write("store.index"),
            write("store.rows", Region.NEW)), cost=Cost("dram", "received_keys")),
        Stage("gather", "gather_fresh" if fresh else "gather_all", "retrieval", "lookup", accesses=(
            *([read("owner_plan", per_batch="each", shift=-1)] if fresh else []), _each("owner_plan", writes=True),
            read("store.rows", Region.FRESH if fresh else Region.BATCH),
            write("buffer", Region.ALL, buffer)), cost=Cost("dram", "row_bytes")),
    ]  # fmt: skip
    if fresh:
        stages.append(Stage("sync", "sync", "device", "lookup", accesses=(
            _each("owner_plan"), read("owner_plan", per_batch="each", shift=-1),
            read("buffer", Region.SHARED, buffer, shift=-1),
            write("buffer", Region.SHARED, buffer)), cost=Cost("hbm", "shared_row_bytes")))  # fmt: skip
    return stages


def _window_stages(schedule: Schedule, once: bool, pooled: bool) -> list[Stage]:
    sent = Region.FIRST if once and not pooled else Region.USED
    returned = Region.LAST if once else Region.USED
    boxed = Region.USED if pooled else returned
    # A row is summed with the last micro-batch that uses it, unless owners pool: then all are in use to the end.
    summed = (
        () if pooled else (_each("boxes", region=Region.DONE), _each("row_gradients", writes=True, region=Region.DONE))
    )
    stages = [
        Stage("begin", "begin", "caller", "other", accesses=(
            read("step_count"), write("dense.gradients"), _each("settings", writes=True))),
        Stage("send_rows", "send_rows", "exchange", "communication", micro=True, posts=("rows",), accesses=(
            _each("owner_plan"), read("buffer", sent, "parity")), cost=Cost("network", "row_bytes")),
        Stage("forward_backward", "forward_backward", "caller", "compute", micro=True, lands=("rows",), accesses=(
            _each("plan"), write("random"), read("dense.parameters"), write("dense.gradients"),
            _each("received_rows", writes=True), _each("gradients", writes=True, region=Region.USED),
            _each("loss", writes=True, region=Region.USED)), cost=Cost("compute", "samples")),
        Stage("send_grads", "send_grads", "exchange", "communication", micro=True, posts=("grads",), accesses=(
            _each("plan"), _each("loss", region=Region.LAST), _each("gradients", writes=True, region=returned),
            _each("peaks", writes=True, region=returned)),
            cost=Cost("network", "row_bytes")),
        Stage("recv_grads", "recv_grads", "device", "communication", micro=True, lands=("grads",), accesses=(
            _each("owner_plan"), _each("boxes", writes=True, region=boxed), *summed), cost=Cost("hbm", "row_bytes")),
        Stage("reduce_grads", "reduce_grads", "device", "other", accesses=(
            _each("owner_plan"), _each("boxes", writes=True), _each("row_gradients", writes=True)),
            cost=Cost("hbm", "row_bytes")),
        Stage("dense_scatter", "dense_scatter", "dense", "communication", posts=("dense.slices",), accesses=(
            read("dense.gradients"), _each("loss"), _each("dense_taken", writes=True)),
            cost=Cost("network", "dense_bytes")),
        Stage("dense_sum", "dense_sum", "dense", "communication", lands=("dense.slices",), posts=("dense.gather",),
              accesses=(_each("dense_taken"), _each("dense_slice", writes=True)), cost=Cost("network", "dense_bytes")),
        Stage("commit", "commit", "dense", "communication", posts=("control",), accesses=(
            _each("peaks"), _each("dense_taken"), _each("dense_slice"), _each("loss"), _each("settings"),
            _each("word", writes=True)),
            cost=Cost("network", "latency")),
        Stage("verdict", "verdict", "caller", "communication", lands=("control",), accesses=(
            _each("word"), _each("verdict", writes=True), write("step_count"))),
        Stage("dense_step", "dense_step", "caller", "compute", lands=("dense.gather",), accesses=(
            _each("verdict"), write("dense.gradients"), write("dense.parameters")),
            cost=Cost("compute", "dense_bytes")),
    ]  # fmt: skip
    if schedule.stale:
        stages.append(Stage("refresh", "gather_all", "device", "other", accesses=(
            _each("verdict"), _each("owner_plan", writes=True), read("store.rows", Region.BATCH),
            write("buffer", Region.ALL, "parity")), cost=Cost("dram", "row_bytes")))  # fmt: skip
    stages += [
        Stage("update", "update", "device", "other", accesses=(
            _each("owner_plan"), _each("verdict"), _each("settings"), _each("row_gradients"),
            write("buffer", Region.BATCH, "parity")),
            cost=Cost("hbm", "row_bytes")),
        Stage("write_back", "write_back", "write_back", "lookup", accesses=(
            _each("owner_plan"), read("buffer", Region.BATCH, "parity"), write("store.rows", Region.BATCH)),
            cost=Cost("dram", "row_bytes")),
    ]  # fmt: skip
    return stages


def _retrieval_edges(schedule: Schedule) -> list[Edge]:
    ahead = 1 if schedule.prefetch else 0
    edges = [
        Edge("prefetch", "route", "the batch"),
        Edge("prefetch", "prefetch", "loader and random generators: one order in every schedule", 1),
        Edge("route", "route_keys", "sizes", across=True),
        Edge("route_keys", "retrieve", "keys", across=True),
        Edge("retrieve", "gather", "handles"),
    ]
    if not schedule.prefetch:
        edges.append(Edge("write_back", "route", "every row is read after the previous write-back", 1))
        return edges
    edges += [
        Edge("retrieve", "retrieve", "index and metadata", 1),
        Edge("write_back", "retrieve", "handles may be recycled, rows read", 1 + ahead),
    ]
    if schedule.stale:
        return [
            *edges,
            Edge("gather", "write_back", "exactly one step stale", -1),
            Edge("verdict", "refresh", "gradients apply to the rows as they are now"),
            Edge("write_back", "refresh", "rows as of the batch before", 1),
        ]
    return [
        *edges,
        Edge("sync", "gather", "gather refills the buffer that sync reads", 1),
        Edge("gather", "sync", "the buffer exists and its other rows are in"),
        Edge("update", "sync", "rows of the batch before are final", 1),
        Edge("write_back", "write_back", "rows of both batches", 1),
    ]


def _window_edges(schedule: Schedule, once: bool, pooled: bool) -> list[Edge]:
    ready = "sync" if schedule.prefetch and not schedule.stale else "gather"
    edges = [
        Edge(ready, "send_rows", "the rows"),
        Edge("send_rows", "forward_backward", "the rows", micro=Micro.EACH, across=True),
        Edge("forward_backward", "send_grads", "the gradients", micro=Micro.EACH),
        Edge("send_grads", "recv_grads", "the gradients", micro=Micro.EACH, across=True),
        Edge("prefetch", "forward_backward", "random generators", -AHEAD, Micro.FIRST),
        Edge("forward_backward", "prefetch", "random generators", AHEAD + 1, Micro.LAST),
        Edge("dense_step", "begin", "dense parameters; the step's number", 1),
        Edge("begin", "forward_backward", "dense gradients are cleared", micro=Micro.FIRST),
        Edge("forward_backward", "dense_scatter", "dense gradients", micro=Micro.LAST),
        Edge("dense_scatter", "dense_sum", "slices", across=True),
        Edge("dense_sum", "commit", "finite or not"),
        Edge("reduce_grads", "refresh" if schedule.stale else "update", "summed gradients"),
        Edge("commit", "verdict", "flags of all ranks", across=True),
        Edge("verdict", "dense_step", "the verdict"),
        Edge("refresh" if schedule.stale else "verdict", "update", "the verdict"),
        Edge("update", "write_back", "updated rows"),
    ]
    if not schedule.overlap:
        edges.append(Edge("recv_grads", "send_rows", "one micro-batch after another", micro=Micro.NEXT, policy=True))
        edges.append(Edge("recv_grads", "reduce_grads", "all gradients", micro=Micro.LAST))
        edges.append(Edge("send_grads", "commit", "finite or not", micro=Micro.LAST))
    elif once:
        edges.append(Edge("forward_backward", "forward_backward", "sum order", micro=Micro.NEXT))
        edges.append(
            Edge("recv_grads", "recv_grads", "a row's gradients end at different micro-batches", micro=Micro.NEXT)
        )
        edges.append(Edge("recv_grads", "reduce_grads", "all gradients", micro=Micro.LAST))
        edges.append(Edge("send_grads", "commit", "finite or not"))
    else:
        edges.append(Edge("send_grads", "forward_backward", "accumulators are free again", micro=Micro.NEXT))
        edges.append(Edge("recv_grads", "recv_grads", "sum order", micro=Micro.NEXT))
        edges.append(Edge("recv_grads", "reduce_grads", "all gradients", micro=Micro.LAST))
        edges.append(Edge("send_grads", "commit", "finite or not", micro=Micro.LAST))
    return edges


def _with_fetch(stages: Sequence[Stage], edges: Sequence[Edge], ahead: bool) -> tuple[list[Stage], list[Edge]]:
    """The same with what is drawn fetched and copied before it is routed; `ahead`: before its turn."""
    first, *others = stages
    item = tuple(_each("item", writes=True) if a.resource == "batch" else a for a in first.accesses)
    added = [
        Stage("fetch", "fetch", "storage", "lookup", accesses=(
            _each("item"), write("storage"), _each("fetched", writes=True)), cost=Cost("storage", "samples")),
        Stage("copy", "copy", "copy", "lookup", accesses=(
            _each("fetched"), _each("batch", writes=True)), cost=Cost("pcie", "batch_bytes")),
    ]  # fmt: skip
    new = [
        Edge("prefetch", "fetch", "the item"),
        Edge("fetch", "copy", "the batch"),
        Edge("copy", "route", "the batch"),
    ]
    if ahead:
        new.append(Edge("fetch", "fetch", "one item after another", 1))
    for edge in edges:
        if (edge.source, edge.target) != ("prefetch", "route"):
            new.append(replace(edge, target="fetch") if edge.target == "route" and edge.batches else edge)
    return [replace(first, accesses=item), *added, *others], new


def build_graph(
    name: str,
    row_transfer: str = "once",
    *,
    fetch: bool = False,
    sparse_groups: str = "one",
    early_send: bool = False,
    tiers: bool = False,
    owner_pooling: bool = False,
    dense_at_once: bool = False,
) -> Graph:
    """The stage graph of a schedule; `row_transfer` and `early_send` as in PipelineConfig, `fetch`: it has that,
    `sparse_groups`: comm.Topology's mode, `tiers`: some store's rows lie in a file,
    `owner_pooling`: owners pool bags, so that each micro-batch reads all its rows and adds to all their gradients,
    `dense_at_once`: dense gradients are averaged in one exchange.

    Raises:
        ValueError: an unknown name, or early send or pooling at owners with what they do not go with.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    schedule, once = SCHEDULES[name], row_transfer == "once"
    stages = _retrieval_stages(schedule) + _window_stages(schedule, once, owner_pooling)
    edges = _retrieval_edges(schedule) + _window_edges(schedule, once, owner_pooling)
    if early_send and not (name == "nested" and once and sparse_groups == "one"):
        raise ValueError(
            "early_send needs schedule 'nested', row_transfer 'once' and tables without copies (sparse_groups), got "
            f"{name!r}, {row_transfer!r} and {sparse_groups!r}"
        )
    if owner_pooling and (early_send or not once or sparse_groups != "one"):
        raise ValueError(
            "owner_pooling needs row_transfer 'once', no early_send and tables without copies (sparse_groups), got "
            f"{row_transfer!r}, {early_send} and {sparse_groups!r}"
        )
    if fetch:
        stages, edges = _with_fetch(stages, edges, schedule.prefetch)
    graph = Graph(name, tuple(stages), tuple(edges))
    if early_send:
        graph = with_early_send(graph)
    if tiers:
        graph = with_warming(graph)
    if dense_at_once:
        graph = with_dense_at_once(graph)
    return replicated(graph, sparse_groups)


def evaluation_graph(fetch: bool = False) -> Graph:
    """Forward only, one batch after another; finds rows and inserts none. `fetch`: items are drawn, not batches."""
    stages: Sequence[Stage] = (
        *(s for s in _retrieval_stages(SCHEDULES["sequential"]) if s.name in ("prefetch", "route", "route_keys")),
        Stage("retrieve", "find", "retrieval", "lookup", lands=("keys.keys",), accesses=(
            _each("key_sizes"), _each("owner_plan", writes=True), read("store.index"))),
        Stage("gather", "gather_all", "retrieval", "lookup", accesses=(
            _each("owner_plan", writes=True), read("store.rows"), write("buffer", Region.ALL, "parity"))),
        Stage("send_rows", "send_rows", "exchange", "communication", micro=True, posts=("rows",), accesses=(
            _each("owner_plan"), read("buffer", Region.FIRST, "parity"))),
        Stage("forward", "forward", "caller", "compute", micro=True, lands=("rows",), accesses=(
            _each("plan"), write("random"), read("dense.parameters"), _each("received_rows", writes=True),
            _each("loss", writes=True))),
        Stage("commit", "commit", "exchange", "communication", posts=("control",), accesses=(_each("loss"),)),
        Stage("verdict", "check_failures", "caller", "communication", lands=("control",), accesses=(
            _each("loss", writes=True),)),
    )  # fmt: skip
    edges: Sequence[Edge] = (
        Edge("prefetch", "route", "the batch"),
        Edge("route", "route_keys", "sizes", across=True),
        Edge("route_keys", "retrieve", "keys", across=True),
        Edge("retrieve", "gather", "handles"),
        Edge("gather", "send_rows", "the rows"),
        Edge("send_rows", "forward", "the rows", micro=Micro.EACH, across=True),
        Edge("forward", "forward", "random generators", micro=Micro.NEXT),
        Edge("forward", "commit", "failed or not", micro=Micro.LAST),
        Edge("commit", "verdict", "flags of all ranks", across=True),
        Edge("verdict", "prefetch", "one batch after another", 1),
    )
    if fetch:
        stages, edges = _with_fetch(stages, edges, ahead=False)
    return Graph(EVALUATION, tuple(stages), tuple(edges))
