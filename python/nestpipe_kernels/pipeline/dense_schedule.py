"""Averaging small dense gradients in one exchange: every rank gets all gradients whole and sums them itself, where
otherwise each sums a slice and gives it to the others.

More bytes with more than two ranks, but one exchange less to wait for; and every rank sees by itself whether the mean
is finite, so its word to the others (commit) need not wait for the sum. The same sums in the same order.
"""

from __future__ import annotations

from dataclasses import replace

from .graph import Access, Edge, Graph, Stage, read

__all__ = ["with_dense_at_once"]


def with_dense_at_once(graph: Graph) -> Graph:
    """The graph of a schedule with its dense gradients exchanged at once."""
    mean = read("dense_slice", per_batch="each")

    def accesses(stage: Stage, *more: Access) -> tuple[Access, ...]:
        return (*(access for access in stage.accesses if access != mean), *more)

    by_name, stages = graph.by_name, []
    for stage in graph.stages:
        if stage.name == "dense_scatter":
            stages.append(replace(stage, function="dense_send", posts=("dense.whole",)))
            # Before the sum, which waits for the other ranks on the same lane.
            stages.append(replace(by_name["commit"], accesses=accesses(by_name["commit"])))
        elif stage.name == "dense_sum":
            stages.append(replace(stage, function="dense_mean", lands=("dense.whole",), posts=()))
        elif stage.name == "verdict":
            stages.append(replace(stage, accesses=accesses(stage, mean)))
        elif stage.name == "dense_step":
            stages.append(replace(stage, lands=(), accesses=accesses(stage, mean)))
        elif stage.name != "commit":
            stages.append(stage)
    edges = [edge for edge in graph.edges if (edge.source, edge.target) != ("dense_sum", "commit")]
    edges.append(Edge("dense_scatter", "commit", "failed or not"))
    edges.append(Edge("dense_sum", "verdict", "finite or not; the mean"))
    return Graph(graph.name, tuple(stages), tuple(edges))
