"""The stage graph of a training step as data: stages, what they touch, and the edges that order them.

A graph is written for a general batch t and micro-batch i (templates) and unrolled over a number of batches
(`Unrolled`). Nothing here runs anything and nothing imports torch: the scheduler, the explorer and the validator all
read the same graph.

Accesses name a resource and a region of it. Regions are symbolic sets of rows; two accesses conflict when one of them
writes, the resource is the same instance and the regions can share a row. `disjoint` (validate) is the whole algebra:

- FRESH(t) are the rows of B_t that B_{t-1} does not have, SHARED(t) those that both have, BATCH(t) both together.
  FRESH(t) and BATCH(t-1) are disjoint by definition, and so are FRESH(t) and SHARED(t).
- NEW(t) are rows that retrieval t may create or recycle: never rows that B_{t-1} or B_t hold (they are pinned).
- FIRST(t, i) / LAST(t, i) are rows whose first / last micro-batch is i, USED(t, i) those that micro-batch i uses.
  LAST(t, i) and USED(t, j) are disjoint for j > i, FIRST(t, i) and FIRST(t, j) for i != j, likewise LAST.
- ALL is everything.

With early send (stages/early):

- EARLY(t), URGENT(t) and REST(t) are the parts of SHARED(t): rows that the first micro-batch of t needs and B_{t-1} is
  done with before its last one, other rows that it needs, and rows that it does not need. All are empty for batch 0.
- DONE(t, i) are rows of B_t that are updated with micro-batch i: for i < N - 1 they have no use after i and are not
  URGENT(t+1); DONE(t, N-1) are just URGENT(t+1). LEFT(t) are all others, so the first micro-batch of t + 1 needs none.
- CLOSING is everything in the last micro-batch and nothing in the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Access", "Cost", "Edge", "Graph", "Micro", "Node", "Region", "Stage", "Unrolled", "read", "write"]


class Region(Enum):
    """Symbolic set of rows of a resource; see the file's head."""

    ALL = "all"
    BATCH = "batch"
    FRESH = "fresh"
    SHARED = "shared"
    NEW = "new"
    FIRST = "first"
    LAST = "last"
    USED = "used"
    EARLY = "early"
    URGENT = "urgent"
    REST = "rest"
    DONE = "done"
    LEFT = "left"
    CLOSING = "closing"


@dataclass(frozen=True)
class Access:
    """One resource that a stage reads or writes.

    `per_batch`: "one" instance for the whole run, "each" batch has its own, or "parity": two instances used in turn.
    `shift` moves the batch: sync of batch t reads the buffer of batch t - 1 with shift = -1.
    """

    resource: str
    writes: bool
    region: Region = Region.ALL
    per_batch: str = "one"
    shift: int = 0

    def instance(self, batch: int) -> tuple[str, int]:
        """Which instance of the resource an access at `batch` touches."""
        at = batch + self.shift
        return self.resource, {"one": 0, "each": at, "parity": at % 2}[self.per_batch]


def read(resource: str, region: Region = Region.ALL, per_batch: str = "one", shift: int = 0) -> Access:
    """An access that only reads."""
    return Access(resource, False, region, per_batch, shift)


def write(resource: str, region: Region = Region.ALL, per_batch: str = "one", shift: int = 0) -> Access:
    """An access that writes (or reads and writes)."""
    return Access(resource, True, region, per_batch, shift)


@dataclass(frozen=True)
class Cost:
    """What a stage's time grows with: `quantity` (rows, keys, samples, bytes) served by `resource` (dram, network,
    compute...)."""

    resource: str
    quantity: str


@dataclass(frozen=True)
class Stage:
    """A node template.

    Attributes:
        name: unique in its graph.
        function: name of the stage function that does the work (stages/registry).
        lane: the ordered queue that runs it; "caller" is the thread that calls `progress()`.
        micro: one node for each micro-batch instead of one for each batch.
        accesses: what it reads and writes on its own rank.
        posts / lands: purposes of the collectives it starts / waits for. One lane posts all of a purpose.
        kind: "lookup", "communication", "compute" or "other": how the timeline counts it.
    """

    name: str
    function: str
    lane: str
    kind: str
    micro: bool = False
    accesses: tuple[Access, ...] = ()
    posts: tuple[str, ...] = ()
    lands: tuple[str, ...] = ()
    cost: Cost = Cost("none", "none")


class Micro(Enum):
    """How an edge pairs micro-batches: same i; i to i + 1; every i with the one batch node; only the first, the last,
    the one before the last, or all but the first i."""

    EACH = "each"
    NEXT = "next"
    ALL = "all"
    FIRST = "first"
    LAST = "last"
    LAST_BUT_ONE = "last but one"
    LATER = "later"


@dataclass(frozen=True)
class Edge:
    """`source` of batch t comes before `target` of batch t + `batches`.

    `micro` applies to whichever side has micro-batches. `policy` marks an edge that a schedule adds to forbid overlap
    (it needs no hazard to justify it). `across` marks a collective: the sources of all ranks come before the target of
    each.
    """

    source: str
    target: str
    why: str
    batches: int = 0
    micro: Micro = Micro.ALL
    policy: bool = False
    across: bool = False

    @property
    def label(self) -> str:
        """Readable name of the edge's class, unique in a graph."""
        shift = f"(t{self.batches:+d})" if self.batches else ""
        pair = {Micro.EACH: "", Micro.ALL: "", Micro.NEXT: "[i+1]", Micro.FIRST: "[first]", Micro.LAST: "[last]"}
        pair |= {Micro.LAST_BUT_ONE: "[last but one]", Micro.LATER: "[later]"}
        return f"{self.source} -> {self.target}{shift}{pair[self.micro]}"


@dataclass(frozen=True, order=True)
class Node:
    """One stage of one batch (and micro-batch; 0 for stages that have one node for each batch)."""

    stage: str
    batch: int
    micro: int = 0


@dataclass(eq=False)
class Graph:
    """Stages and edges of one schedule; never changed, and known by identity."""

    name: str
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        self.by_name = {stage.name: stage for stage in self.stages}

    def without(self, label: str) -> Graph:
        """The same graph less the edges of one class."""
        return Graph(self.name, self.stages, tuple(e for e in self.edges if e.label != label))

    def targets_of(self, edge: Edge, batch: int, micro_batches: int) -> Iterator[tuple[Node, Node]]:
        """Instances of an edge whose source is in `batch`."""
        source, target = self.by_name[edge.source], self.by_name[edge.target]
        there = batch + edge.batches
        picks: Iterable[tuple[int, int]]
        if source.micro and target.micro:
            if edge.micro is Micro.NEXT:
                picks = ((i, i + 1) for i in range(micro_batches - 1))
            elif edge.micro is Micro.EACH:
                picks = ((i, i) for i in range(micro_batches))
            else:  # from the last micro-batch to the first of another batch
                picks = ((micro_batches - 1, 0),)
        elif source.micro or target.micro:
            every = range(micro_batches)
            chosen = {
                Micro.FIRST: every[:1],
                Micro.LAST: every[-1:],
                Micro.LAST_BUT_ONE: every[:-1][-1:],
                Micro.LATER: every[1:],
            }.get(edge.micro, every)
            picks = ((i, 0) if source.micro else (0, i) for i in chosen)
        else:
            picks = ((0, 0),)
        for i, j in picks:
            yield Node(edge.source, batch, i), Node(edge.target, there, j)


@dataclass
class Unrolled:
    """A graph over batches 0 .. T - 1 on one rank: nodes in a topological order that lanes are filled in, with their
    edges."""

    graph: Graph
    batches: int
    micro_batches: int
    nodes: list[Node] = field(default_factory=list)
    edges: dict[str, list[tuple[Node, Node]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for t in range(self.batches):
            for stage in self.graph.stages:
                self.nodes += [Node(stage.name, t, i) for i in range(self.micro_batches if stage.micro else 1)]
        present = set(self.nodes)
        for edge in self.graph.edges:
            instances = self.edges.setdefault(edge.label, [])
            for t in range(self.batches):
                for a, b in self.graph.targets_of(edge, t, self.micro_batches):
                    if a in present and b in present:
                        instances.append((a, b))
        self.nodes = self.topological()

    def predecessors(self) -> dict[Node, list[Node]]:
        """Direct predecessors of every node."""
        before: dict[Node, list[Node]] = {n: [] for n in self.nodes}
        for instances in self.edges.values():
            for a, b in instances:
                before[b].append(a)
        return before

    def topological(self) -> list[Node]:
        """One topological order: by batch, then by the order in which stages are written, then by micro-batch."""
        rank = {stage.name: k for k, stage in enumerate(self.graph.stages)}
        return topological_order(self.nodes, self.edges.values(), lambda n: (n.batch, rank[n.stage], n.micro))


def topological_order(nodes: Sequence[Node], edges: Iterable[list[tuple[Node, Node]]], priority) -> list[Node]:  # type: ignore[no-untyped-def]
    """Kahn's algorithm; among ready nodes the smallest priority first. Raises GraphError on a cycle."""
    import heapq

    from ..errors import GraphError

    after: dict[Node, list[Node]] = defaultdict(list)
    missing = dict.fromkeys(nodes, 0)
    for instances in edges:
        for a, b in instances:
            after[a].append(b)
            missing[b] += 1
    ready = [(priority(n), n) for n in nodes if not missing[n]]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for b in after[node]:
            missing[b] -= 1
            if not missing[b]:
                heapq.heappush(ready, (priority(b), b))
    if len(order) != len(nodes):
        stuck = sorted(n for n in nodes if missing[n])[:4]
        raise GraphError(f"the stage graph has a cycle through {', '.join(map(str, stuck))}")
    return order
