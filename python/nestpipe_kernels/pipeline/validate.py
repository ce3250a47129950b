"""Checks a stage graph: conflicting accesses need a path, every edge needs a reason, collectives need one order.

Three rules, all on the graph unrolled over a few batches (hazards reach at most two batches far):
1. two nodes with conflicting accesses have a path between them;
2. no edge is implied by the others, and without it some conflicting pair would lose its path (policy edges excepted
  from the latter);
3. a node that lands a collective has a path from the node that posts it, and each purpose is posted from one lane.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import combinations

from ..errors import GraphError
from .graph import Access, Graph, Node, Region, Unrolled

__all__ = ["conflicts_without_path", "disjoint", "redundant_edges", "unjustified_edges", "validate"]

_BATCHES = 5
_MICRO_BATCHES = 3


_OF_BATCH = {Region.FRESH, Region.SHARED, Region.EARLY, Region.URGENT, Region.REST}
"""Parts of a batch that its relation to the batch before tells apart; SHARED is the last three together."""


def disjoint(a: Access, na: Node, b: Access, nb: Node, micro_batches: int = _MICRO_BATCHES) -> bool:
    """Whether two accesses to one resource instance can never touch the same row."""
    if na.batch > nb.batch:
        a, na, b, nb = b, nb, a, na
    for access, node in ((a, na), (b, nb)):
        if access.region is Region.CLOSING and node.micro != micro_batches - 1:
            return True
        if access.region is Region.REST and micro_batches == 1:
            return True
        if access.region in _OF_BATCH and access.region is not Region.FRESH and not node.batch:
            return True
    if na.batch == nb.batch:
        return _disjoint_in_batch(a, na, b, nb)
    return nb.batch == na.batch + 1 and _disjoint_from_next(a, na, b, micro_batches)


def _disjoint_in_batch(a: Access, na: Node, b: Access, nb: Node) -> bool:
    pair = {a.region, b.region}
    if pair <= _OF_BATCH:
        return len(pair) == 2 and not (Region.SHARED in pair and Region.FRESH not in pair)
    if a.region is b.region and a.region in (Region.FIRST, Region.LAST, Region.DONE):
        return na.micro != nb.micro
    if pair == {Region.FIRST, Region.REST}:
        return (na if a.region is Region.FIRST else nb).micro == 0
    if Region.DONE in pair:
        done, other, region = (na, nb, b.region) if a.region is Region.DONE else (nb, na, a.region)
        if region is Region.REST:  # not needed first, so not done first
            return not done.micro
        return region is Region.LEFT or (region in (Region.FIRST, Region.LAST) and other.micro > done.micro)
    if pair == {Region.LAST, Region.USED}:
        last, used = (na, nb) if a.region is Region.LAST else (nb, na)
        return used.micro > last.micro
    return False


def _disjoint_from_next(a: Access, na: Node, b: Access, micro_batches: int) -> bool:
    if b.region in (Region.FRESH, Region.NEW):
        return a.region is Region.BATCH or a.region in _OF_BATCH
    if a.region is Region.LEFT:
        return b.region in (Region.EARLY, Region.URGENT)
    if a.region is Region.DONE and na.micro == micro_batches - 1:
        return b.region in (Region.EARLY, Region.REST)
    return a.region is Region.DONE and b.region is Region.URGENT


class _Order:
    """An unrolled graph with its nodes as numbers, in topological order: which of them comes before which."""

    def __init__(self, graph: Graph, batches: int, micro_batches: int) -> None:
        self.unrolled = Unrolled(graph, batches, micro_batches)
        self.index = {n: k for k, n in enumerate(self.unrolled.nodes)}
        self.edges = {
            label: [(self.index[a], self.index[b]) for a, b in instances]
            for label, instances in self.unrolled.edges.items()
        }

    def reachable(self, skip: str = "") -> list[int]:
        """For every node the bit set of nodes that it reaches without the edges of one label."""
        after: list[list[int]] = [[] for _ in self.index]
        for label, instances in self.edges.items():
            if label != skip:
                for a, b in instances:
                    after[a].append(b)
        reach = [0] * len(after)
        for a in reversed(range(len(after))):
            bits = 0
            for b in after[a]:
                bits |= reach[b] | 1 << b
            reach[a] = bits
        return reach

    @cached_property
    def conflicts(self) -> dict[tuple[int, int], list[str]]:
        """Pairs of nodes, the earlier in the order first, whose accesses conflict, with the resources."""
        by_instance: dict[tuple[str, int], list[tuple[int, Node, Access]]] = defaultdict(list)
        for k, node in enumerate(self.unrolled.nodes):
            for access in self.unrolled.graph.by_name[node.stage].accesses:
                by_instance[access.instance(node.batch)].append((k, node, access))
        pairs: dict[tuple[int, int], list[str]] = defaultdict(list)
        for (resource, _), users in by_instance.items():
            for (ka, na, a), (kb, nb, b) in combinations(users, 2):
                if ka != kb and (a.writes or b.writes) and not disjoint(a, na, b, nb, self.unrolled.micro_batches):
                    pairs[ka, kb].append(resource)
        return pairs

    def unordered(self, skip: str = "") -> Iterator[tuple[int, int]]:
        """Conflicting pairs that no path orders, without the edges of one label."""
        reach = self.reachable(skip)
        return (pair for pair in self.conflicts if not reach[pair[0]] >> pair[1] & 1)


def conflicts_without_path(graph: Graph, micro_batches: int = _MICRO_BATCHES) -> list[str]:
    """Descriptions of conflicting accesses that no path orders."""
    return _conflicts_without_path(_Order(graph, _BATCHES, micro_batches))


def _conflicts_without_path(order: _Order) -> list[str]:
    nodes = order.unrolled.nodes
    return [
        f"{nodes[a]} and {nodes[b]} both use {resource} and no path orders them"
        for a, b in order.unordered()
        for resource in order.conflicts[a, b]
    ]


def redundant_edges(graph: Graph, micro_batches: int = _MICRO_BATCHES) -> list[str]:
    """Labels of edges that the other edges imply."""
    return _redundant_edges(_Order(graph, _BATCHES, micro_batches))


def _redundant_edges(order: _Order) -> list[str]:
    found = []
    for label, instances in order.edges.items():
        reach = order.reachable(label)
        if instances and all(reach[a] >> b & 1 for a, b in instances):
            found.append(label)
    return found


def unjustified_edges(graph: Graph, micro_batches: int = _MICRO_BATCHES) -> list[str]:
    """Labels of edges that are no policy and whose removal leaves every conflict ordered."""
    return _unjustified_edges(_Order(graph, _BATCHES, micro_batches))


def _unjustified_edges(order: _Order) -> list[str]:
    edges = order.unrolled.graph.edges
    return [e.label for e in edges if not e.policy and next(order.unordered(e.label), None) is None]


def _collective_faults(graph: Graph) -> list[str]:
    faults = []
    lanes: dict[str, set[str]] = defaultdict(set)
    poster: dict[str, str] = {}
    for stage in graph.stages:
        for purpose in stage.posts:
            lanes[purpose.split(".")[0]].add(stage.lane)
            poster[purpose] = stage.name
    for purpose, used in lanes.items():
        if len(used) > 1:
            faults.append(f"collectives for {purpose} are posted from several lanes ({', '.join(sorted(used))})")
    order = _Order(graph, 2, _MICRO_BATCHES)
    reach = order.reachable()
    for k, node in enumerate(order.unrolled.nodes):
        for purpose in graph.by_name[node.stage].lands:
            post = poster.get(purpose)
            if post is None:
                faults.append(f"{node.stage} waits for {purpose}, which nothing posts")
                continue
            micro = node.micro if graph.by_name[post].micro else 0
            source = Node(post, node.batch, micro)
            if not reach[order.index[source]] >> k & 1:
                faults.append(f"{node} waits for {purpose} without a path from {source}")
    return faults


def validate(graph: Graph) -> None:
    """Raise GraphError that lists everything wrong with a graph."""
    order = _Order(graph, _BATCHES, _MICRO_BATCHES)
    problems = _conflicts_without_path(order)
    problems += [f"edge {label} is redundant: the other edges imply it" for label in _redundant_edges(order)]
    problems += [f"edge {label} orders nothing that conflicts" for label in _unjustified_edges(order)]
    problems += _collective_faults(graph)
    if problems:
        raise GraphError(f"graph {graph.name!r}: " + "; ".join(problems))
