"""Evaluation: one batch forward through a small graph of its own, run in place on the caller's thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..stages.registry import run_stage
from ..stages.state import BatchState, RankState
from .drawn import DrawnBatches, copy_drawn
from .graph import Unrolled
from .position import Position
from .schedules import evaluation_graph

__all__ = ["Evaluation"]


class Evaluation:
    """Evaluates batches of one pipeline, without gradients, inserts or metadata; nothing may be under way.

    Args:
        rank: what the stages work on; its `source` is another one while a batch is evaluated.
        drawn: where batches of an iterator wait that training has drawn ahead.
        position: notes where the loader and the random generators were.
        timeout_s: limit of a batch's exchanges, seconds.
    """

    def __init__(self, rank: RankState, drawn: DrawnBatches, position: Position, timeout_s: float) -> None:
        self._rank = rank
        self._drawn = drawn
        self._position = position
        self._timeout_s = timeout_s
        self._count = 0
        self.plan()

    def plan(self) -> None:
        """Split batches as the rank says, from now on."""
        rank = self._rank
        self._unrolled = Unrolled(evaluation_graph(rank.fetch is not None), 1, rank.num_micro_batches)

    def run(self, iterator: Iterator[Any], clock: int) -> BatchState:
        """The next batch of an iterator; exact about who has a batch, like training. `clock`: batches that counted.

        Raises:
            StopIteration: no rank has a batch.
        """
        rank, source = self._rank, self._drawn.lend(iterator)
        batch = BatchState(self._count, f"e{self._count}", clock, training=False, timeout_s=self._timeout_s)
        self._count += 1
        drawn = source.drawn.pop(0) if source.drawn else None
        if drawn is not None:
            copy_drawn(drawn, batch)
        rank.source = source
        try:
            for node in self._unrolled.nodes:
                stage = self._unrolled.graph.by_name[node.stage]
                if node.stage != "prefetch":
                    run_stage(stage.name, stage.function, rank, batch, node.micro)
                elif drawn is None:
                    with self._position.drawing(source, batch, rank.communicator.rank):
                        run_stage(stage.name, stage.function, rank, batch, node.micro)
        finally:
            rank.source = self._drawn.source
        if batch.ended:
            raise StopIteration
        self._drawn.back(source)
        return batch
