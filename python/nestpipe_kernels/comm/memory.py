"""InMemoryWorld: all ranks of an exchange in one process, as threads or in one thread, for tests and the explorer.

An exchange is found by (purpose, tag), so ranks may post in any order. The same tag may be used again: a rank's n-th
post of a tag meets its peers' n-th. An exchange is forgotten once every rank has taken its rows.

With `late_read` the world behaves like the least forgiving network: a sender's rows are read only when the receiver
waits (or when the sender itself has waited, the latest moment it owes the tensor), and `out` holds poison from the
post until the wait. Code that writes `send`, or reads `out`, too early then computes something visibly wrong.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe_kernels.comm.checks import PURPOSES, check_all_to_all, check_purpose, count_mismatch, own_part
from nestpipe_kernels.errors import CommunicationError

__all__ = ["InMemoryCommunicator", "InMemoryGroup", "InMemoryHandle", "InMemoryWorld"]


@dataclass(eq=False)
class _Post:
    send: Tensor
    offsets: list[int]
    """[W + 1] rows for rank r are offsets[r] .. offsets[r + 1]."""
    is_copy: bool


@dataclass(eq=False)
class _Exchange:
    posts: dict[int, _Post] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)


class InMemoryWorld:
    """W ranks in one process.

    Args:
        size: number of ranks W >= 1.
        timeout_s: limit of every wait, seconds; 0 for callers that run all ranks in one thread: a wait for something
            a peer has not posted then fails at once.
        late_read: read sent rows as late as a network may, and poison `out` until the wait.
    """

    def __init__(self, size: int, timeout_s: float = 60.0, late_read: bool = False) -> None:
        if size < 1:
            raise ValueError(f"comm: size must be >= 1, got {size}")
        self.size = size
        self.names: Sequence[int] = range(size)
        """What ranks are called in messages."""
        self.timeout_s = timeout_s
        self.late_read = late_read
        self._changed = threading.Condition(threading.Lock())
        self._exchanges: dict[tuple[str, str], deque[_Exchange]] = {}
        self._gone: dict[int, str] = {}
        self._communicators = [InMemoryCommunicator(self, rank) for rank in range(size)]
        self._parts: dict[tuple[str, tuple[int, ...]], InMemoryWorld] = {}

    def communicator(self, rank: int) -> InMemoryCommunicator:
        """The communicator of one rank; the same object every time."""
        return self._communicators[rank]

    def fail(self, rank: int, message: str) -> None:
        """Declare a rank dead: peers that wait for what it has not posted get CommunicationError with `message`.

        The first message for a rank stays.
        """
        with self._changed:
            self._gone.setdefault(rank, message)
            self._changed.notify_all()
            parts = [(part, ranks.index(rank)) for (_, ranks), part in self._parts.items() if rank in ranks]
        for part, index in parts:
            part.fail(index, message)

    def part(self, name: str, ranks: Sequence[int]) -> InMemoryWorld:
        """The world of some of the ranks, numbered as given; the same object for the same name and ranks."""
        key = name, tuple(ranks)
        with self._changed:
            found = self._parts.get(key)
            if found is None:
                found = self._parts[key] = InMemoryWorld(len(ranks), self.timeout_s, self.late_read)
                found.names = [self.names[rank] for rank in ranks]
            gone = [(index, self._gone[rank]) for index, rank in enumerate(ranks) if rank in self._gone]
        for index, message in gone:
            found.fail(index, message)
        return found

    def pending(self) -> list[tuple[str, str]]:
        """(purpose, tag) of the exchanges that some rank has posted and not all have taken."""
        with self._changed:
            own, parts = list(self._exchanges), list(self._parts.values())
        return sorted([*own, *(one for part in parts for one in part.pending())])

    # ------------------------------------------------------------------------------------- used by the groups

    def post(self, purpose: str, tag: str, rank: int, post: _Post) -> _Exchange:
        """Put one rank's rows where its peers find them."""
        with self._changed:
            if rank in self._gone:
                raise CommunicationError(
                    f"{purpose} exchange {tag!r}: this rank ({self.names[rank]}) is gone: {self._gone[rank]}"
                )
            rounds = self._exchanges.setdefault((purpose, tag), deque())
            exchange = next((one for one in rounds if rank not in one.posts), None)
            if exchange is None:
                exchange = _Exchange()
                rounds.append(exchange)
            exchange.posts[rank] = post
            self._changed.notify_all()
            return exchange

    def is_complete(self, exchange: _Exchange) -> bool:
        """Whether all ranks have posted."""
        with self._changed:
            return len(exchange.posts) == self.size

    def await_posts(self, purpose: str, tag: str, rank: int, exchange: _Exchange, timeout_s: float) -> None:
        """Block until all ranks have posted, or raise CommunicationError naming those that have not."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(exchange.posts) < self.size:
                missing = [peer for peer in range(self.size) if peer not in exchange.posts]
                gone = next((peer for peer in missing if peer in self._gone), None)
                if gone is not None:
                    raise CommunicationError(
                        f"{purpose} exchange {tag!r}: rank {self.names[rank]} waits for rank {self.names[gone]}, "
                        f"which is gone: {self._gone[gone]}"
                    )
                left = deadline - time.monotonic()
                if left <= 0:
                    who = ", ".join(str(self.names[peer]) for peer in missing)
                    raise CommunicationError(
                        f"{purpose} exchange {tag!r}: rank {self.names[rank]} waited {timeout_s:g} s for "
                        f"rank{'s' if len(missing) > 1 else ''} {who}, nothing posted"
                    )
                self._changed.wait(left)

    def take(
        self, purpose: str, tag: str, rank: int, exchange: _Exchange, copy_rows: Callable[[_Exchange], None]
    ) -> None:
        """Copy this rank's rows out under the lock; forget the exchange when it was the last rank."""
        with self._changed:
            own = exchange.posts[rank]
            copy_rows(exchange)
            exchange.taken.add(rank)
            if len(exchange.taken) == self.size:
                rounds = self._exchanges[purpose, tag]
                rounds.remove(exchange)
                if not rounds:
                    del self._exchanges[purpose, tag]
            elif not own.is_copy:
                own.send, own.is_copy = own.send.clone(), True


class InMemoryCommunicator:
    """One rank of an InMemoryWorld."""

    def __init__(self, world: InMemoryWorld, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.timeout_s = world.timeout_s
        self._world = world
        self._groups = {purpose: InMemoryGroup(world, rank, purpose) for purpose in PURPOSES}

    def group(self, purpose: str) -> InMemoryGroup:
        """The group for one of PURPOSES."""
        check_purpose(purpose)
        return self._groups[purpose]

    def with_timeout(self, timeout_s: float) -> InMemoryCommunicator:
        """Itself: the limit is the world's."""
        return self

    def split(self, name: str, parts: Sequence[Sequence[int]]) -> InMemoryCommunicator:
        """This rank in the world of its part."""
        ranks, index = own_part(parts, self.rank, self.size)
        return self._world.part(name, ranks).communicator(index)

    def close(self) -> None:
        """Leave: peers that wait for what this rank has not posted get CommunicationError. Idempotent."""
        self._world.fail(self.rank, "it closed its communicator")


class InMemoryGroup:
    """One purpose of one rank of an InMemoryWorld."""

    def __init__(self, world: InMemoryWorld, rank: int, purpose: str) -> None:
        self.rank = rank
        self.size = world.size
        self._world = world
        self._purpose = purpose

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        tag: str,
        out: Tensor | None = None,
    ) -> InMemoryHandle:
        """As `types.Group.all_to_all`; matched by `tag`, not by order."""
        where = f"{self._purpose} exchange {tag!r}"
        check_all_to_all(where, self.rank, self.size, send, send_counts, receive_counts, out)
        offsets = [0]
        for count in send_counts:
            offsets.append(offsets[-1] + count)
        late = self._world.late_read
        post = _Post(send.detach() if late else send.detach().clone(), offsets, is_copy=not late)
        if late and out is not None:
            _poison(out)
        exchange = self._world.post(self._purpose, tag, self.rank, post)
        return InMemoryHandle(self._world, self._purpose, tag, self.rank, exchange, list(receive_counts), out)


class InMemoryHandle:
    """One rank's side of an exchange; owns what was sent until it has been read."""

    def __init__(
        self,
        world: InMemoryWorld,
        purpose: str,
        tag: str,
        rank: int,
        exchange: _Exchange,
        receive_counts: list[int],
        out: Tensor | None,
    ) -> None:
        self._world = world
        self._purpose = purpose
        self._tag = tag
        self._rank = rank
        self._exchange: _Exchange | None = exchange
        self._receive_counts = receive_counts
        self._out = out

    def ready(self) -> bool:
        """Whether `wait` would return without waiting."""
        return self._exchange is None or self._world.is_complete(self._exchange)

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Block until all ranks have posted; idempotent.

        Args:
            timeout_s: seconds, None for the world's limit.

        Returns:
            The received rows, [sum(receive_counts), ...], in rank order: `out` if given.

        Raises:
            CommunicationError: a peer is gone, late, or sends other rows than expected.
        """
        if self._exchange is not None:
            limit_s = self._world.timeout_s if timeout_s is None else timeout_s
            self._world.await_posts(self._purpose, self._tag, self._rank, self._exchange, limit_s)
            self._world.take(self._purpose, self._tag, self._rank, self._exchange, self._copy_rows)
            self._exchange = None
        assert self._out is not None
        return self._out

    def _copy_rows(self, exchange: _Exchange) -> None:
        own = exchange.posts[self._rank].send
        where = f"{self._purpose} exchange {self._tag!r}"
        for source, expected in enumerate(self._receive_counts):
            post = exchange.posts[source]
            got = post.offsets[self._rank + 1] - post.offsets[self._rank]
            if got != expected:
                raise CommunicationError(count_mismatch(where, source, self._rank, expected, got))
            if post.send.dtype != own.dtype or post.send.shape[1:] != own.shape[1:]:
                raise CommunicationError(
                    f"{where}: rank {self._rank} expected {own.dtype} rows of shape {list(own.shape[1:])} from rank "
                    f"{source}, but rank {source} sends {post.send.dtype} {list(post.send.shape[1:])}"
                )
        if self._out is None:
            self._out = torch.empty((sum(self._receive_counts), *own.shape[1:]), dtype=own.dtype)
        start = 0
        for source, count in enumerate(self._receive_counts):
            post = exchange.posts[source]
            self._out[start : start + count] = post.send[post.offsets[self._rank] : post.offsets[self._rank + 1]]
            start += count


def _poison(out: Tensor) -> None:
    out.fill_(float("nan") if out.is_floating_point() else 1 if out.dtype == torch.bool else torch.iinfo(out.dtype).min)
