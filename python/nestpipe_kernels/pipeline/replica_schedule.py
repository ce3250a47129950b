"""2D sparse parallelism in the stage graph: any schedule's graph, with the stages by which copies of the tables stay
alike (stages/replicas).

`replicated(graph, "exact")`: key lists go on to the replicas before retrieval, gradients before they are summed.
`replicated(graph, "average")`: key lists do; after each update the copies are averaged where that is due. What
averaging writes lies in the batch's buffer, in the store (rows of earlier batches) and, for rows that the next batch
has gathered by then, in what `sync` patches; so it comes after gather(t+1) and write_back(t-1), and before sync(t+1)
and write_back(t).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from .graph import Access, Cost, Edge, Graph, Micro, Region, Stage, read, write

__all__ = ["replicated"]


def replicated(graph: Graph, mode: str) -> Graph:
    """The graph for a world of several sparse groups; `mode` is "one" (unchanged), "exact" or "average".

    Raises ValueError for averaging in a schedule whose rows are stale.
    """
    if mode == "one":
        return graph
    graph = _with_lists(graph)
    if mode == "exact":
        return _with_gradients(graph)
    if "refresh" in graph.by_name:
        raise ValueError(
            f"schedule {graph.name!r} trains on stale rows, of which sparse groups that average cannot keep track: use "
            "another schedule, or SparseGroups(sync='exact')"
        )
    return _with_averaging(graph)


def _each(resource: str, *, writes: bool = False, region: Region = Region.ALL) -> Access:
    return Access(resource, writes, region, "each")


def _after(stages: Iterable[Stage], name: str, *new: Stage) -> list[Stage]:
    found: list[Stage] = []
    for stage in stages:
        found.append(stage)
        if stage.name == name:
            found += new
    return found


def _changed(stages: Iterable[Stage], name: str, change: Callable[[Stage], Stage]) -> list[Stage]:
    return [change(stage) if stage.name == name else stage for stage in stages]


def _with_lists(graph: Graph) -> Graph:
    lane = graph.by_name["route_keys"].lane
    merging = next(stage for stage in graph.stages if "keys.keys" in stage.lands)
    lists = Stage("replicate_keys", "replicate_keys", lane, "lookup", lands=("keys.keys",), posts=("replica_keys",),
                  accesses=(_each("key_sizes"), _each("group_keys", writes=True)),
                  cost=Cost("network", "key_bytes"))  # fmt: skip
    lands = tuple("replica_keys" if purpose == "keys.keys" else purpose for purpose in merging.lands)
    merging = replace(merging, lands=lands, accesses=(*merging.accesses, _each("group_keys", writes=True)))
    stages = _after(_changed(graph.stages, merging.name, lambda _: merging), "route_keys", lists)
    edges = [edge for edge in graph.edges if (edge.source, edge.target) != ("route_keys", merging.name)]
    edges += [
        Edge("route_keys", "replicate_keys", "keys of the group", across=True),
        Edge("replicate_keys", merging.name, "keys of all groups", across=True),
    ]
    return Graph(graph.name, tuple(stages), tuple(edges))


def _with_gradients(graph: Graph) -> Graph:
    returned = next(a.region for a in graph.by_name["recv_grads"].accesses if a.resource == "boxes")
    stages = _changed(
        graph.stages,
        "recv_grads",
        lambda one: replace(
            one,
            accesses=(
                *(
                    a for a in one.accesses if a.region is not Region.DONE
                ),  # no sum before all groups' gradients are here
                _each("group_grads", writes=True, region=Region.LAST),
            ),
        ),
    )
    stages = _changed(
        stages,
        "reduce_grads",
        lambda one: replace(one, accesses=(*one.accesses, _each("replica_boxes", writes=True))),
    )
    stages = _after(
        stages,
        "recv_grads",
        Stage("replicate_grads", "replicate_grads", "replica", "communication", micro=True, posts=("replica_grads",),
              accesses=(_each("owner_plan"), _each("group_grads", writes=True, region=Region.LAST)),
              cost=Cost("network", "row_bytes")),
        Stage("recv_replica_grads", "recv_replica_grads", "replica", "communication", micro=True,
              lands=("replica_grads",), accesses=(
                  _each("owner_plan"), _each("replica_boxes", writes=True, region=returned)),
              cost=Cost("hbm", "row_bytes")),
    )  # fmt: skip
    moved = ("recv_grads", "reduce_grads") if returned is Region.LAST else ("reduce_grads",)
    edges = [edge for edge in graph.edges if edge.source != "recv_grads" or edge.target not in moved]
    edges += [
        Edge("recv_grads", "replicate_grads", "the gradients", micro=Micro.EACH),
        Edge("replicate_grads", "recv_replica_grads", "gradients of all groups", micro=Micro.EACH, across=True),
    ]
    if returned is Region.LAST:
        edges.append(Edge("recv_replica_grads", "reduce_grads", "all gradients"))
    else:
        edges.append(Edge("recv_replica_grads", "recv_replica_grads", "sum order", micro=Micro.NEXT))
        edges.append(Edge("recv_replica_grads", "reduce_grads", "all gradients", micro=Micro.LAST))
    return Graph(graph.name, tuple(stages), tuple(edges))


def _with_averaging(graph: Graph) -> Graph:
    new = [
        Stage("average_announce", "average_announce", "device", "communication", posts=("replica_rows.sizes",),
              accesses=(_each("owner_plan"), _each("verdict"), write("touched"), _each("averaged", writes=True)),
              cost=Cost("network", "latency")),
        Stage("average_send", "average_send", "device", "communication", lands=("replica_rows.sizes",),
              posts=("replica_rows.rows",), accesses=(
                  _each("averaged", writes=True), read("store.rows"), read("buffer", Region.BATCH, "parity")),
              cost=Cost("network", "row_bytes")),
        Stage("average_rows", "average_rows", "device", "communication", lands=("replica_rows.rows",), accesses=(
                  _each("averaged", writes=True), write("store.rows"), write("buffer", Region.BATCH, "parity")),
              cost=Cost("hbm", "row_bytes")),
    ]  # fmt: skip
    stages = _after(graph.stages, "update", *new)
    overlapping = "sync" in graph.by_name
    if overlapping:
        averaged = read("averaged", per_batch="each", shift=-1)
        stages = _changed(stages, "sync", lambda one: replace(one, accesses=(*one.accesses, averaged)))
    moved = {("update", "sync"), ("update", "write_back"), ("write_back", "write_back")}
    edges = [edge for edge in graph.edges if (edge.source, edge.target) not in moved]
    edges += [
        Edge("update", "average_announce", "updated rows"),
        Edge("average_announce", "average_send", "sizes", across=True),
        Edge("average_send", "average_rows", "rows of all copies", across=True),
        Edge("average_rows", "write_back", "averaged rows"),
    ]
    if overlapping:
        edges += [
            Edge("gather", "average_send", "what is gathered is patched with what is averaged", -1),
            Edge("average_rows", "sync", "rows of the batch before are final", 1),
            Edge("write_back", "average_send", "rows of earlier batches are in the store", 1),
        ]
    return Graph(graph.name, tuple(stages), tuple(edges))
