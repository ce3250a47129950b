"""Every edge matters: without it the explorer finds an order with another result in at most 200 directed orders."""

import pytest

from nestpipe_kernels.pipeline.schedules import SCHEDULES, build_graph
from nestpipe_kernels.testing.explorer import Orders, explore
from nestpipe_kernels.testing.scenario import Scenario

EDGES = [
    pytest.param(name, transfer, edge.label, id=f"{name}-{transfer}-{edge.label}")
    for name in SCHEDULES
    for transfer in ("once", "per_micro_batch")
    for edge in build_graph(name, transfer).edges
    if not edge.policy
]


def scenario(transfer: str) -> Scenario:
    """Every batch of every rank has samples, and keys are few: whatever can collide does."""
    return Scenario(
        world_size=2, micro_batches=2, batches=4, uneven=False, samples=4, num_keys=5, row_transfer=transfer, seed=3
    )


@pytest.fixture(scope="module")
def expected():
    """Outcome of each graph in its plain order."""
    known = {}

    def outcome(name, transfer):
        if (name, transfer) not in known:
            case, graph = scenario(transfer), build_graph(name, transfer)
            orders = Orders(graph, case.world_size, case.batches, case.micro_batches)
            known[name, transfer] = explore(graph, case.ranks(), orders.random(0), case.batches), orders
            assert not known[name, transfer][0].broken
        return known[name, transfer]

    return outcome


@pytest.mark.parametrize("name, transfer, label", EDGES)
def test_removing_an_edge_is_seen(expected, name, transfer, label):
    want, orders = expected(name, transfer)
    case, graph = scenario(transfer), build_graph(name, transfer).without(label)
    for seed in range(200):
        order = orders.directed(label, seed)
        assert order is not None, f"no order breaks {label}: it is implied by the others"
        if want.difference(explore(graph, case.ranks(), order, case.batches)):
            return
    pytest.fail(f"200 directed orders without {label} all gave the same result")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfer", ["once", "per_micro_batch"])
def test_every_order_of_the_whole_graph_gives_the_same(expected, name, transfer):
    want, orders = expected(name, transfer)
    case, graph = scenario(transfer), build_graph(name, transfer)
    for seed in range(1, 9):
        assert want.difference(explore(graph, case.ranks(), orders.random(seed), case.batches)) == ""
