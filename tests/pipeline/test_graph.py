"""The stage graphs: valid as they stand, and the validator names what is taken out or put in wrongly."""

from dataclasses import replace

import pytest

from nestpipe_kernels.errors import GraphError
from nestpipe_kernels.pipeline.graph import Edge, Graph, Micro
from nestpipe_kernels.pipeline.scheduler import check_lanes
from nestpipe_kernels.pipeline.schedules import SCHEDULES, build_graph, evaluation_graph
from nestpipe_kernels.pipeline.validate import conflicts_without_path, redundant_edges, unjustified_edges, validate

GRAPHS = [
    *((name, {"row_transfer": transfer}) for name in SCHEDULES for transfer in ("once", "per_micro_batch")),
    *((name, {"fetch": True}) for name in SCHEDULES),
    ("nested", {"early_send": True}),
    ("nested", {"early_send": True, "fetch": True}),
    *((name, {"owner_pooling": True}) for name in ("dbp", "nested")),
    *((name, {"dense_at_once": True}) for name in SCHEDULES),
    ("nested", {"early_send": True, "dense_at_once": True, "fetch": True}),
]


@pytest.mark.parametrize("name, settings", GRAPHS)
def test_schedules_are_valid_and_lanes_cannot_deadlock(name, settings):
    """Valid with three micro-batches, which says that every hazard edge matters; without conflicts with fewer."""
    graph = build_graph(name, **settings)
    validate(graph)
    for micro_batches in (1, 2, 5):
        check_lanes(graph, micro_batches)
    for micro_batches in (1, 2):
        assert conflicts_without_path(graph, micro_batches) == []


@pytest.mark.parametrize("fetch", [False, True])
def test_evaluation_graph_is_valid(fetch):
    validate(evaluation_graph(fetch))


@pytest.mark.soak
@pytest.mark.parametrize("name, settings", GRAPHS)
def test_taking_out_any_hazard_edge_leaves_a_conflict(name, settings):
    graph = build_graph(name, **settings)
    for edge in graph.edges:
        if not edge.policy:
            assert conflicts_without_path(graph.without(edge.label)), edge.label


def with_edge(graph: Graph, edge: Edge) -> Graph:
    return Graph(graph.name, graph.stages, (*graph.edges, edge))


@pytest.mark.parametrize(
    "edge",
    [
        Edge("write_back", "gather", "not needed: retrieve comes between", 2),
        Edge("forward_backward", "commit", "implied by the gradients", micro=Micro.LAST),
        Edge("write_back", "send_rows", "receive buffers are fresh", 2),
    ],
)
def test_redundant_edges_are_named(edge):
    graph = with_edge(build_graph("nested"), edge)
    assert edge.label in redundant_edges(graph)
    with pytest.raises(GraphError, match="is redundant: the other edges imply it"):
        validate(graph)


def test_an_edge_without_a_hazard_is_named():
    edge = Edge("write_back", "verdict", "for no reason", 1)
    graph = with_edge(build_graph("nested"), edge)
    assert edge.label in unjustified_edges(graph)
    with pytest.raises(GraphError, match="orders nothing that conflicts"):
        validate(graph)


def test_conflict_names_both_nodes_and_the_resource():
    with pytest.raises(GraphError, match="both use buffer and no path orders them"):
        validate(build_graph("nested").without("update -> sync(t+1)"))


def test_cycle_is_named():
    graph = with_edge(build_graph("nested"), Edge("write_back", "gather", "backwards"))
    with pytest.raises(GraphError, match="cycle"):
        validate(graph)


def test_lanes_that_would_deadlock_are_named():
    graph = build_graph("nested")
    lanes = tuple(replace(s, lane="retrieval") if s.name == "write_back" else s for s in graph.stages)
    with pytest.raises(GraphError, match="lanes would deadlock"):
        check_lanes(Graph("one lane too few", lanes, (*graph.edges, Edge("gather", "forward_backward", "x", -1))), 2)


def test_collectives_of_one_purpose_come_from_one_lane():
    graph = build_graph("nested")
    moved = tuple(replace(s, lane="dense") if s.name == "route" else s for s in graph.stages)
    with pytest.raises(GraphError, match="collectives for keys are posted from several lanes"):
        validate(Graph("split", moved, graph.edges))


def test_landing_without_posting_is_named():
    graph = build_graph("nested")
    silent = tuple(replace(s, posts=()) if s.name == "commit" else s for s in graph.stages)
    with pytest.raises(GraphError, match="verdict waits for control, which nothing posts"):
        validate(Graph("silent", silent, graph.edges))


def test_unknown_schedule():
    with pytest.raises(ValueError, match="unknown schedule 'fast': choose one of sequential, dbp, fwp, nested, async"):
        build_graph("fast")
