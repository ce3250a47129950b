"""The explorer: runs a stage graph of W ranks in one thread, without lanes, in any topological order one asks for.

A *directed* order for an edge u -> v that has been taken out puts v and everything v needs as early as possible and u,
with everything that needs u, as late as possible: if the edge mattered, the result differs (or something breaks) at
once.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import GraphError
from ..pipeline.graph import Graph, Node, Unrolled
from ..stages.registry import run_stage
from ..stages.state import BatchState, RankState

__all__ = ["Orders", "Outcome", "explore", "read_outcome", "read_policies", "read_store"]

Step = tuple[int, Node]


class Orders:
    """Topological orders of a graph over W ranks and T batches; collective edges join all ranks."""

    def __init__(self, graph: Graph, world_size: int, batches: int, micro_batches: int) -> None:
        unrolled = Unrolled(graph, batches, micro_batches)
        self.steps: list[Step] = [(r, n) for r in range(world_size) for n in unrolled.nodes]
        self._index = {step: k for k, step in enumerate(self.steps)}
        self._by_label: dict[str, list[tuple[int, int]]] = {}
        across = {e.label: e.across for e in graph.edges}
        for label, instances in unrolled.edges.items():
            pairs = self._by_label[label] = []
            for a, b in instances:
                for r in range(world_size):
                    sources = range(world_size) if across[label] else (r,)
                    pairs += [(self._index[s, a], self._index[r, b]) for s in sources]

    def _adjacency(self, skip: str) -> tuple[list[list[int]], list[list[int]]]:
        after: list[list[int]] = [[] for _ in self.steps]
        before: list[list[int]] = [[] for _ in self.steps]
        for label, pairs in self._by_label.items():
            if label != skip:
                for a, b in pairs:
                    after[a].append(b)
                    before[b].append(a)
        return after, before

    def _sort(self, after: list[list[int]], before: list[list[int]], priority: Sequence[float]) -> list[Step]:
        missing = [len(b) for b in before]
        ready = [(priority[k], k) for k, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, k = heapq.heappop(ready)
            order.append(self.steps[k])
            for b in after[k]:
                missing[b] -= 1
                if not missing[b]:
                    heapq.heappush(ready, (priority[b], b))
        if len(order) != len(self.steps):
            raise GraphError("the graph has a cycle over ranks")
        return order

    def random(self, seed: int, skip: str = "") -> list[Step]:
        """A random order; kinds of stages are shifted as a whole, so that some run very early or very late."""
        chance = random.Random(seed)
        shift: dict[tuple[str, int], float] = {}
        priority = []
        for _, node in self.steps:
            key = (node.stage, node.batch % 3)
            if key not in shift:
                shift[key] = chance.random() * 3 * (chance.random() < 0.6) + chance.random() * 0.3 * node.batch
            priority.append(shift[key] + chance.random())
        return self._sort(*self._adjacency(skip), priority)

    def directed(self, label: str, seed: int) -> list[Step] | None:
        """An order of the graph without the edges of one class that breaks one of them if it can; None: none can be
        broken."""
        chance = random.Random(seed)
        after, before = self._adjacency(label)
        for u, v in chance.sample(self._by_label[label], len(self._by_label[label])):
            needs = _closure(before, v)
            if u in needs:
                continue
            late = _closure(after, u)
            priority = [
                chance.random() + (0.0 if k in needs else 4.0 if k in late else 2.0) for k in range(len(self.steps))
            ]
            return self._sort(after, before, priority)
        return None


def _closure(neighbours: list[list[int]], start: int) -> set[int]:
    seen, todo = {start}, [start]
    while todo:
        for k in neighbours[todo.pop()]:
            if k not in seen:
                seen.add(k)
                todo.append(k)
    return seen


@dataclass
class Outcome:
    """What a run left behind: everything that must be equal, as plain values.

    `stores[rank]`: {(table, key): bytes of embedding, state and updates}; `metadata` likewise (last_used, frequency).
    """

    stores: list[dict[tuple[str, int], bytes]]
    metadata: list[dict[tuple[str, int], tuple[int, int]]]
    dense: list[list[bytes]]
    losses: list[list[float]]
    partition: list[list[list[list[int]]]]
    """[rank][batch][micro-batch] sample indices."""
    broken: str = ""
    policies: list[dict[str, Any]] = field(default_factory=list)
    """Per rank: what `read_policies` says of its tables."""

    def difference(self, other: Outcome) -> str:
        """The first difference in words, or an empty string. Partitions are not compared."""
        if self.broken or other.broken:
            return self.broken or other.broken
        for name in ("losses", "policies", "stores", "metadata", "dense"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "losses":  # NaN equals NaN
                mine, theirs = ([[repr(x) for x in per_rank] for per_rank in every] for every in (mine, theirs))
            if mine != theirs:
                return f"{name} differ: {_first_difference(mine, theirs)}"
        return ""


def _first_difference(a: object, b: object) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
        return f"at {keys[:4]}"
    if isinstance(a, list) and isinstance(b, list):
        for k, (x, y) in enumerate(zip(a, b)):
            if x != y:
                return f"[{k}] {_first_difference(x, y)}"
    return f"{str(a)[:60]} and {str(b)[:60]}"


def explore(graph: Graph, ranks: Sequence[RankState], order: Sequence[Step], batches: int) -> Outcome:
    """Run the nodes in `order`; whatever breaks ends the run and is the outcome."""
    states = [[BatchState(t, f"t{t}", t) for t in range(batches)] for _ in ranks]
    for per_rank in states:
        for before, batch in zip(per_rank, per_rank[1:]):
            batch.previous = before
    broken = ""
    with torch.no_grad():
        for r, node in order:
            batch = states[r][node.batch]
            try:
                run_stage(node.stage, graph.by_name[node.stage].function, ranks[r], batch, node.micro)
            except Exception as error:
                broken = f"{node} on rank {r}: {type(error).__name__}: {error}"
                break
            if batch.failure is not None:
                broken = f"{node} on rank {r}: {batch.failure.stage}: {batch.failure.message}"
                break
    return read_outcome(ranks, states, broken)


def read_outcome(ranks: Sequence[RankState], states: Sequence[Sequence[BatchState]], broken: str = "") -> Outcome:
    """Everything that a run must leave alike."""
    stores, metadata, policies = [], [], []
    for rank in ranks:
        policies.append({k: v for binding in rank.bindings for k, v in read_policies(binding.store).items()})
        rows: dict[tuple[str, int], bytes] = {}
        notes: dict[tuple[str, int], tuple[int, int]] = {}
        for binding in rank.bindings:
            read_store(binding.store, rows, notes)
        stores.append(rows)
        metadata.append(notes)
    return Outcome(
        stores,
        metadata,
        [[p.detach().numpy().tobytes() for _, p in rank.dense_parameters] for rank in ranks],
        [[_loss(batch) for batch in per_rank] for per_rank in states],
        [[[m.indices.tolist() for m in batch.micro] for batch in per_rank] for per_rank in states],
        broken,
        policies,
    )


def read_store(store: Any, rows: dict[tuple[str, int], bytes], notes: dict[tuple[str, int], tuple[int, int]]) -> None:
    """Every row of a store: embedding, state and `updates` as bytes; and its metadata."""
    used = store.embedding_words + store.optimizer.state_floats(store.dim) + 1
    for number, spec in enumerate(store.tables):
        keys, handles = store.export_table(spec.name)
        values = torch.empty(len(keys), store.row_floats, dtype=torch.float32)
        store.gather(handles, keys, torch.full((len(keys),), number, dtype=torch.int32), values, None)
        facts = store.read_metadata(handles)
        for k, key in enumerate(keys.tolist()):
            rows[spec.name, key] = values[k, :used].numpy().tobytes()
            notes[spec.name, key] = (int(facts.last_used[k]), int(facts.frequency[k]))


def read_policies(store: Any) -> dict[str, Any]:
    """Of every table with a limit or a rule: its size, counters, and counts of keys that are not admitted (yet)."""
    found = {}
    for spec in store.tables:
        if spec.capacity is None and spec.admission is None and spec.eviction is None:
            continue
        state = {name: values.tolist() for name, values in store.admission_state(spec.name).items()}
        if "keys" in state:
            counts = dict(zip(state["keys"], state["counts"]))
        else:
            blocks = zip(state.get("blocks", []), state.get("cells", []))
            counts = {block: tuple(cells) for block, cells in blocks if any(cells)}
        found[spec.name] = {"size": store.size(spec.name), "counters": store.counters(spec.name), "counts": counts}
    return found


def _loss(batch: BatchState) -> float:
    total = torch.zeros(())
    for coefficient, value in batch.losses:
        total = total + value * coefficient
    return float(total / batch.divisor)
