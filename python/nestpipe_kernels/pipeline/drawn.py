"""Batches that were drawn and are not trained: drawing ahead, routing and retrieving them early, keeping them when
another iterator comes.

When batch t is trained, the next AHEAD batches have been drawn. The keys of all of them are exchanged as soon as they
are there; rows are retrieved for t + 1 alone, since a buffer holds one batch. Without prefetch (`sequential`, `fwp`)
batches are drawn at the same points, and nothing else happens before their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from ..stages.retrieval import gather_all, retrieve, undo_retrieval
from ..stages.state import BatchState, RankState, Source
from .position import Position
from .scheduler import LaneScheduler
from .schedules import AHEAD

__all__ = ["DrawnBatches"]


class DrawnBatches:
    """The queue of one pipeline. Local to its rank: all ranks call it alike.

    Args:
        rank: what the stages work on; its `source` is set here.
        scheduler: runs the stages.
        position: notes where the loader and the random generators were.
        prefetch: whether the schedule works on batches before their turn.
        timeout_s: limit of a batch's exchanges, seconds.
    """

    def __init__(
        self, rank: RankState, scheduler: LaneScheduler, position: Position, prefetch: bool, timeout_s: float
    ) -> None:
        self._rank = rank
        self._scheduler = scheduler
        self._position = position
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self.batches: deque[BatchState] = deque()
        """In the order in which they were drawn; the first one is the next to be trained."""
        self.source: Source | None = None
        """Where they come from."""
        self.parked: dict[int, Source] = {}
        """Sources whose batches wait, by id of the iterator."""
        self._next_index = 0
        self._retrieved = -1
        """Index of the newest batch whose retrieval was started."""
        self._repeat = False
        """The first batch's retrieval was undone."""

    # ------------------------------------------------------------------------------------------- training

    def first(self, clock: int) -> BatchState:
        """The batch to be trained, its retrieval under way; drawn here if none is. It stays in the queue.

        `clock`: batches that counted before it.
        """
        if not self.batches:
            self._draw()
        batch = self.batches[0]
        batch.clock = clock
        if self._repeat:
            self._repeat = False
            retrieve(self._rank, batch, 0)
            gather_all(self._rank, batch, 0)
            self._rank.backend.synchronize()  # lanes read the buffer, and know nothing of this thread's stream
            batch.resend = True
        elif self._retrieved != batch.index:
            if not self._prefetch:
                self._start_routing(batch)
            self._start_retrieval(batch)
        return batch

    def take_first(self) -> None:
        """Draw what is missing behind the first batch, start the retrieval of the second, and take the first out.

        To be called when it is known whether all ranks go on with the first batch, before its forward.
        """
        batch = self.batches[0]
        while len(self.batches) <= AHEAD:
            if len(self.batches) > 1:
                self._start_next(batch)
            self._draw(during=batch.index)
        self._start_next(batch)
        self.batches.popleft()

    def _start_next(self, batch: BatchState) -> None:
        following = self.batches[1]
        if self._prefetch and self._retrieved != following.index:
            following.clock = batch.clock + (not batch.skipped)
            following.previous = batch
            self._start_retrieval(following)

    def _start_retrieval(self, batch: BatchState) -> None:
        self._retrieved = batch.index
        self._scheduler.start_retrieval(batch)

    def _draw(self, during: int | None = None) -> None:
        assert self.source is not None
        batch = self._new_batch()
        with self._position.drawing(self.source, batch, self._rank.communicator.rank):
            self._scheduler.run_caller("prefetch", batch, report_as=during)
        self._append(batch)

    def _append(self, batch: BatchState) -> None:
        self.batches.append(batch)
        if self._prefetch:
            self._start_routing(batch)

    def _start_routing(self, batch: BatchState) -> None:
        if self._rank.fetch is not None and self._rank.inputs is None:  # capture runs the model, which is this thread's
            self._scheduler.run_caller("fetch", batch)
            self._scheduler.run_caller("copy", batch)
        self._scheduler.start_routing(batch)

    def _new_batch(self) -> BatchState:
        index = self._next_index
        self._next_index += 1
        return BatchState(index, f"t{index}", timeout_s=self._timeout_s)

    # ---------------------------------------------------------------------------------------- other access

    def undo_retrieval(self) -> None:
        """Take back what retrieving batches of the queue did to the stores; nothing may be under way. `first` does it
        again, without any exchange. A retrieval that failed may have found stores without room for rows that will not
        be there, so it is tried again as well."""
        for batch in reversed(self.batches):
            failed = batch.failure is not None and batch.failure.of_retrieval
            if failed or any(owner.retrieval is not None for owner in batch.owner):
                undo_retrieval(self._rank, batch)
                self._repeat = True
            if failed:
                batch.failure = None

    def finish(self) -> None:
        """The first batch has ended the epoch on all ranks, so the others are empty, too: drop them."""
        if self._prefetch:
            for batch in list(self.batches)[1:]:  # their announcements are under way
                self._scheduler.wait_for("route_keys", batch)

    def land(self) -> None:
        """Take in the keys that were exchanged for batches which will not be retrieved: no exchange may be left half
        done. All ranks have announced them, so all take part."""
        for batch in self.batches:
            for purpose, micro in list(batch.handles):
                batch.land(purpose, micro)

    def clear(self) -> None:
        """Forget all batches and where they came from; nothing may be under way."""
        self.land()
        if self.batches:
            self._next_index = self.batches[0].index
        self.batches.clear()
        self._retrieved, self._repeat = -1, False
        self.source = self._rank.source = None
        self._scheduler.reset(self._next_index)

    # ------------------------------------------------------------------------------------------ iterators

    def switch_to(self, iterator: Iterator[Any]) -> None:
        """Draw from `iterator` from now on; the former keeps what was drawn from it. Nothing may be under way."""
        self.park()
        source = self.parked.pop(id(iterator), None) or self._new_source(iterator, training=True)
        self.source = self._rank.source = source
        self._position.select(source)
        drawn, source.drawn = source.drawn, []
        for batch in drawn:
            self._append_again(batch)

    def _append_again(self, drawn: BatchState) -> None:
        """A fresh state for a batch that was drawn before; its keys are routed anew."""
        batch = self._new_batch()
        copy_drawn(drawn, batch)
        self._scheduler.mark_done("prefetch", batch)
        self._append(batch)

    def park(self) -> None:
        """Keep the batches of the queue, as they were drawn, for when their iterator comes back."""
        source = self.source
        if source is None:
            return
        if not source.abandoned:
            source.drawn = list(self.batches)
            self.parked[id(source.iterator)] = source
        self.clear()

    def abandon(self, iterator: Iterator[Any]) -> None:
        """Nobody else has the iterator any more: its batches need not be kept."""
        self.parked.pop(id(iterator), None)
        if self.source is not None and self.source.iterator is iterator:
            self.source.abandoned = True

    def lend(self, iterator: Iterator[Any]) -> Source:
        """The source of an iterator that evaluation draws from; give it `back`. Nothing may be under way."""
        if self.source is not None and self.source.iterator is iterator:
            self.park()
        return self.parked.pop(id(iterator), None) or self._new_source(iterator, training=False)

    def back(self, source: Source) -> None:
        """Evaluation has taken a batch; what must be remembered of the source is kept."""
        if source.drawn or source.exhausted or source is self._position.current:
            self.parked[id(source.iterator)] = source

    def of_current(self) -> list[BatchState]:
        """Batches drawn ahead from the source that training drew from last."""
        source = self._position.current
        return list(self.batches) if source is self.source or source is None else source.drawn

    def _new_source(self, iterator: Iterator[Any], training: bool) -> Source:
        return Source(iterator, position=self._position.adopt(iterator, training))


def copy_drawn(drawn: BatchState, batch: BatchState) -> None:
    """What was drawn (and fetched), for a batch that is routed again."""
    batch.item, batch.raw, batch.size = drawn.item, drawn.raw, drawn.size
    batch.promised_plain = drawn.promised_plain
    batch.has_batch, batch.inputs, batch.position = drawn.has_batch, drawn.inputs, drawn.position
    if drawn.failure is not None and drawn.failure.stage in ("prefetch", "fetch", "copy"):
        batch.failure = drawn.failure
