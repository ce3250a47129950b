"""The stage graph of stores whose rows lie in files: keys are looked up once more, ahead, so that rows come in time."""

from __future__ import annotations

from dataclasses import replace

from .graph import Edge, Graph, Stage, read, write

__all__ = ["WARM_LANE", "with_warming"]

WARM_LANE = "warm"
"""A lane of its own: asking the disk, and waiting for it where room must be made, holds up nobody else."""


def with_warming(graph: Graph) -> Graph:
    """The graph with `warm` between the exchange of keys and retrieval.

    `warm` merges the keys, which `retrieve` would do otherwise, and asks for their rows. It searches the store's index
    under the store's own lock, at whatever time: what it finds decides only which pages are in memory, never a value.
    So it does not wait for the retrieval of the batch before, and reads, for the validator, the keys alone.
    """
    stages: list[Stage] = []
    for stage in graph.stages:
        if stage.name == "retrieve":
            keys = read("key_sizes", per_batch="each")
            stages.append(
                Stage("warm", "warm", WARM_LANE, "lookup", lands=stage.lands, accesses=(
                    keys, write("owner_plan", per_batch="each")), cost=replace(stage.cost, resource="disk"))
            )  # fmt: skip
            accesses = tuple(access for access in stage.accesses if access != keys)
            stage = replace(stage, lands=(), accesses=accesses)
        stages.append(stage)
    edges = [
        replace(e, target="warm") if (e.source, e.target) == ("route_keys", "retrieve") else e for e in graph.edges
    ]
    edges.append(Edge("warm", "retrieve", "merged keys"))
    return Graph(graph.name, tuple(stages), tuple(edges))
