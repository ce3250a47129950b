"""With eviction on, the edges that order retrieval matter as before, and rules that no edge stands for do too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from policy_cases import bounded
from test_edges import graph_of
from test_policies import play, totals

from nestpipe_kernels.stages import commit, retrieval
from nestpipe_kernels.stages.registry import STAGE_FUNCTIONS
from nestpipe_kernels.testing.explorer import Orders, explore
from nestpipe_kernels.testing.scenario import Scenario

EDGES = [
    (name, transfer, label)
    for name, labels in {
        "sequential": ["route_keys -> retrieve", "retrieve -> gather", "write_back -> route(t+1)"],
        "fwp": ["write_back -> route(t+1)"],
        "dbp": ["retrieve -> retrieve(t+1)", "write_back -> retrieve(t+2)", "sync -> gather(t+1)"],
        "nested": [
            "route_keys -> retrieve",
            "retrieve -> retrieve(t+1)",
            "write_back -> retrieve(t+2)",
            "retrieve -> gather",
            "sync -> gather(t+1)",
            "gather -> sync",
            "update -> sync(t+1)",
            "write_back -> write_back(t+1)",
        ],
        "async": ["retrieve -> retrieve(t+1)", "write_back -> retrieve(t+2)"],
    }.items()
    for transfer in ("once", "per_micro_batch")
    for label in labels
]
EDGES += [
    ("nested", "early", label)
    for label in ("retrieve -> retrieve(t+1)", "write_back -> retrieve(t+2)", "send_soon -> gather(t+1)")
]


def tight(transfer: str = "once", **settings: Any) -> Scenario:
    """Rows go and come in every batch, some keys are refused, and most batches share keys with their neighbours."""
    return bounded(
        "all", "lru", **{"capacity": 9, "num_keys": 24, "batches": 7, "samples": 3, "uneven": False, "seed": 2,
                         "row_transfer": "once" if transfer == "early" else transfer, **settings}
    )  # fmt: skip


def test_the_scenario_evicts_and_refuses() -> None:
    seen = totals(play(tight()))
    assert seen["evicted"] > 12
    assert seen["refused"] > 12


@pytest.mark.parametrize(("name", "transfer", "label"), EDGES)
def test_removing_an_edge_is_seen(name: str, transfer: str, label: str) -> None:
    scenario, graph = tight(transfer), graph_of(name, transfer)
    assert label in {edge.label for edge in graph.edges}
    orders = Orders(graph, scenario.world_size, scenario.batches, scenario.micro_batches)
    expected = explore(graph, scenario.ranks(), orders.random(0), scenario.batches)
    assert not expected.broken
    for seed in range(200):
        order = orders.directed(label, seed)
        assert order is not None
        if expected.difference(explore(graph.without(label), scenario.ranks(), order, scenario.batches)):
            return
    pytest.fail(f"200 directed orders without {label} all gave the same result")


# --------------------------------------------------------------------------------- rules that no edge stands for


def shared_whatever_has_a_row(rank: Any, batch: Any, micro: int) -> None:
    """gather_fresh that synchronises keys of both batches even where a side has no row."""
    handles = [(owner, owner.retrieval.handles) for b in (batch, batch.previous) if b is not None for owner in b.owner]
    for owner, had in handles:
        owner.retrieval.handles = torch.where(had < 0, 0, had)
    original_gather_fresh(rank, batch, micro)
    for owner, had in handles:
        owner.retrieval.handles = had


def without_mask(rank: Any, batch: Any, micro: int) -> None:
    """update that also moves the buffer rows of keys without a row."""
    for owner in batch.owner:
        owner.retrieval.handles, kept = owner.retrieval.handles.clamp(min=0), owner.retrieval.handles
        owner.kept = kept
    original_update(rank, batch, micro)
    for owner in batch.owner:
        owner.retrieval.handles = owner.kept


def shifted(rank: Any, batch: Any, micro: int) -> None:
    """Gradients of the rows that are there, packed: every later key gets another's (fault 18)."""
    original_reduce(rank, batch, micro)
    for owner in batch.owner:
        there = owner.retrieval.handles >= 0
        packed = torch.zeros_like(owner.row_gradients)
        packed[: int(there.sum())] = owner.row_gradients[there]
        owner.row_gradients = packed


original_gather_fresh = retrieval.gather_fresh
original_update = commit.update
original_reduce = commit.reduce_grads


@pytest.mark.parametrize(
    ("stage", "mutation"), [("gather_fresh", shared_whatever_has_a_row), ("reduce_grads", shifted)]
)
def test_a_broken_rule_is_seen(monkeypatch: pytest.MonkeyPatch, stage: str, mutation: Callable[..., None]) -> None:
    expected = play(tight(), "nested")
    monkeypatch.setitem(STAGE_FUNCTIONS, stage, mutation)
    assert "differ" in expected.difference(play(tight(), "nested"))


def test_a_key_without_a_row_moves_nothing_even_in_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of the update is a second lock: write-back skips such rows too, and nothing synchronises them."""
    expected = play(tight(), "nested")
    monkeypatch.setitem(STAGE_FUNCTIONS, "update", without_mask)
    assert expected.difference(play(tight(), "nested")) == ""
