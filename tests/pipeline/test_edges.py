"""Every edge matters: without it the explorer finds an order with another result in at most 200 directed orders."""

import pytest

from nestpipe_kernels.pipeline.graph import Graph
from nestpipe_kernels.pipeline.schedules import SCHEDULES, build_graph
from nestpipe_kernels.pipeline.validate import validate
from nestpipe_kernels.testing.explorer import Orders, explore
from nestpipe_kernels.testing.scenario import Scenario

KINDS = {
    "once": {},
    "per_micro_batch": {"row_transfer": "per_micro_batch"},
    "fetch": {"fetch": True},
    "early": {"early_send": True},
    "pooled": {"owner_pooling": True},
    "at_once": {"dense_at_once": True},
}
"""Settings that have graphs of their own, by name."""


OF_INTEREST = {"fetch": {"fetch", "copy"}, "at_once": {"dense_scatter", "dense_sum", "commit", "verdict", "dense_step"}}
"""Stages whose edges are another's business in other kinds."""


FAILS = ("at_once", "dense_scatter -> commit")
"""An edge that matters only to a batch that fails; it has a test of its own."""


def graph_of(name: str, kind: str) -> Graph:
    return build_graph(name, **KINDS[kind])


EDGES = [
    pytest.param(name, kind, edge.label, id=f"{name}-{kind}-{edge.label}")
    for name in SCHEDULES
    for kind in KINDS
    if name == "nested" or kind not in ("early", "pooled", "at_once")
    for edge in graph_of(name, kind).edges
    if not edge.policy
    and (kind, edge.label) != FAILS
    and (kind not in OF_INTEREST or {edge.source, edge.target} & OF_INTEREST[kind])
]


def scenario(kind: str) -> Scenario:
    """Every batch of every rank has samples, and keys are few: whatever can collide does."""
    settings = {"world_size": 2, "micro_batches": 2, "batches": 4, "uneven": False}
    if kind == "at_once":
        return Scenario(samples=4, num_keys=5, seed=3, **settings)
    if kind == "early":  # with keys that the next batch's first micro-batch does not need, and keys of two batches
        return Scenario(samples=6, num_keys=12, seed=2, **settings)
    return Scenario(samples=4, num_keys=5, seed=3, **settings, **KINDS[kind])


@pytest.fixture(scope="module")
def expected():
    """Outcome of each graph in its plain order."""
    known = {}

    def outcome(name, kind):
        if (name, kind) not in known:
            case, graph = scenario(kind), graph_of(name, kind)
            orders = Orders(graph, case.world_size, case.batches, case.micro_batches)
            known[name, kind] = explore(graph, case.ranks(), orders.random(0), case.batches), orders
            assert not known[name, kind][0].broken
        return known[name, kind]

    return outcome


@pytest.mark.parametrize("name, kind, label", EDGES)
def test_removing_an_edge_is_seen(expected, name, kind, label):
    want, orders = expected(name, kind)
    case, graph = scenario(kind), graph_of(name, kind).without(label)
    for seed in range(200):
        order = orders.directed(label, seed)
        assert order is not None, f"no order breaks {label}: it is implied by the others"
        if want.difference(explore(graph, case.ranks(), order, case.batches)):
            return
    pytest.fail(f"200 directed orders without {label} all gave the same result")


@pytest.mark.parametrize("name, kind", sorted({(case.values[0], case.values[1]) for case in EDGES}))
def test_every_order_of_the_whole_graph_gives_the_same(expected, name, kind):
    want, orders = expected(name, kind)
    case, graph = scenario(kind), graph_of(name, kind)
    for seed in range(1, 9):
        assert want.difference(explore(graph, case.ranks(), orders.random(seed), case.batches)) == ""


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_says_whether_its_dense_gradients_could_be_sent(name):
    """Its word goes to the others after that, whatever order the lanes keep."""
    kind, label = FAILS
    validate(graph_of(name, kind))
    with pytest.raises(ValueError, match="dense_taken"):
        validate(graph_of(name, kind).without(label))
