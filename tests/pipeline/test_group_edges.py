"""Every edge that sparse groups add matters: without it the explorer finds an order with another result."""

import pytest

from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.pipeline.schedules import build_graph
from nestpipe_kernels.pipeline.validate import conflicts_without_path, validate
from nestpipe_kernels.testing.explorer import Orders, explore
from nestpipe_kernels.testing.scenario import Scenario

GRAPHS = [
    ("nested", "once", "exact"),
    ("nested", "per_micro_batch", "exact"),
    ("nested", "once", "average"),
    ("fwp", "once", "average"),
]


def graph_of(name, transfer, mode):
    return build_graph(name, transfer, sparse_groups=mode)


def new_edges(name, transfer, mode):
    """Edges that the graph of one group does not have."""
    before = {edge.label for edge in build_graph(name, transfer).edges}
    return [edge.label for edge in graph_of(name, transfer, mode).edges if edge.label not in before]


def scenario(transfer, mode):
    """Two groups of one rank, every batch with samples, few keys; averaging over rows of several batches."""
    groups = SparseGroups(2, mode, 2 if mode == "average" else 1)
    return Scenario(batches=5, uneven=False, samples=4, num_keys=6, row_transfer=transfer, seed=3, sparse_groups=groups)


@pytest.fixture(scope="module")
def expected():
    """Outcome of each graph in its plain order."""
    known = {}

    def outcome(name, transfer, mode):
        key = (name, transfer, mode)
        if key not in known:
            case, graph = scenario(transfer, mode), graph_of(*key)
            orders = Orders(graph, case.world_size, case.batches, case.micro_batches)
            known[key] = explore(graph, case.ranks(), orders.random(0), case.batches), orders
            assert not known[key][0].broken
        return known[key]

    return outcome


RACE = "gather -> average_send(t-1)"
"""Averaging writes rows that gather may be reading: torn rows at worst, which a run of whole stages cannot show, since
`sync` patches what was gathered before."""

EDGES = [pytest.param(*g, label, id="-".join((*g, label))) for g in GRAPHS for label in new_edges(*g) if label != RACE]


def test_the_edge_that_only_keeps_two_threads_apart():
    graph = graph_of("nested", "once", "average")
    assert RACE in new_edges("nested", "once", "average")
    assert conflicts_without_path(graph) == []
    found = conflicts_without_path(graph.without(RACE))
    assert any("stage='gather'" in text and "stage='average_rows'" in text for text in found)


@pytest.mark.parametrize("name, transfer, mode, label", EDGES)
def test_removing_an_edge_is_seen(expected, name, transfer, mode, label):
    want, orders = expected(name, transfer, mode)
    case, graph = scenario(transfer, mode), graph_of(name, transfer, mode).without(label)
    for seed in range(200):
        order = orders.directed(label, seed)
        assert order is not None, f"no order breaks {label}: it is implied by the others"
        if want.difference(explore(graph, case.ranks(), order, case.batches)):
            return
    pytest.fail(f"200 directed orders without {label} all gave the same result")


@pytest.mark.parametrize("name, transfer, mode", GRAPHS)
def test_every_order_of_the_whole_graph_gives_the_same(expected, name, transfer, mode):
    want, orders = expected(name, transfer, mode)
    case, graph = scenario(transfer, mode), graph_of(name, transfer, mode)
    for seed in range(1, 4):
        assert want.difference(explore(graph, case.ranks(), orders.random(seed), case.batches)) == ""


def test_stale_rows_cannot_be_averaged():
    with pytest.raises(ValueError, match=r"schedule 'async' trains on stale rows.*SparseGroups\(sync='exact'\)"):
        build_graph("async", sparse_groups="average")
    validate(build_graph("async", sparse_groups="exact"))
