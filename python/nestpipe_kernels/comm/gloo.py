"""GlooCommunicator: exchanges between processes over gloo, one process group per purpose.

Gloo makes progress on its own threads, so a posted exchange runs while the caller computes. Every group has its own
queue: collectives of one purpose are matched by their order, those of different purposes never wait for each other.

An exchange is a receive and a send for each peer, receives first. Gloo's own all-to-all posts its sends first, so the
rank that comes second announces its receive behind its own data, and the two directions of a link take turns; and it
runs several exchanges of a group at once, so that they share the link. Here both directions run at full rate, and what
was posted first arrives first.

Gloo does not compare sizes between ranks: counts that disagree abort the process or leave garbage. Whoever posts an
exchange of varying size sends the sizes first, in an exchange of fixed size, and checks them (comm/router).
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe_kernels.comm.board import OWN, SECONDARY, Board
from nestpipe_kernels.comm.checks import KINDS, PURPOSES, check_all_to_all, check_purpose
from nestpipe_kernels.comm.peers import PeerProcesses
from nestpipe_kernels.errors import CommunicationError

if TYPE_CHECKING:
    from nestpipe_kernels.comm.communicator import Communicator
    from nestpipe_kernels.comm.gloo_part import GlooPart

__all__ = ["GlooCommunicator", "GlooGroup", "GlooHandle"]

_MOST_TAGS = 1 << 30


class GlooCommunicator:
    """One rank's groups over gloo. Making one is collective over `process_group`.

    Args:
        process_group: a torch.distributed process group, None for the default one. Its backend may be any; the groups
            made here are gloo groups over the same ranks.
        timeout_s: limit of every wait, seconds.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        CommunicationError: a peer did not join in time.
    """

    def __init__(self, process_group: Any = None, timeout_s: float = 300.0) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "comm: torch.distributed is not initialised; call torch.distributed.init_process_group (or "
                "nestpipe_kernels.launch.init_rank) first"
            )
        parent = dist.group.WORLD if process_group is None else process_group
        self._parent = weakref.ref(parent)  # the cache of communicators must not keep a process group alive
        self.rank = dist.get_rank(parent)
        self.size = dist.get_world_size(parent)
        self.timeout_s = timeout_s
        self.closed = False
        ranks = dist.get_process_group_ranks(parent)
        self.name = f"rank {self.rank} of {self.size}"
        self._peers: PeerProcesses | None = None
        self.board: Board | None = None
        """Where peers of this machine see what this rank is doing."""
        self._groups: dict[str, GlooGroup] = {}
        self._carriers: dict[str, Any] = {}
        self._parts: dict[tuple[str, tuple[tuple[int, ...], ...]], Communicator] = {}
        limit = timedelta(seconds=timeout_s)
        # Outside the default group only the members take part in making groups, which then get names from their ranks.
        local = parent is not dist.group.WORLD
        try:
            for purpose in PURPOSES:
                made = dist.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=local)
                self._groups[purpose] = GlooGroup(self, purpose, made)
            self._peers = PeerProcesses.gather(self._groups["control"].process_group)
            self.board = self._peers.board
        except RuntimeError as error:
            raise CommunicationError(
                f"comm: rank {self.rank} could not set up its {self.size}-rank groups within {timeout_s:g} s: "
                f"{first_line(error)}"
            ) from error

    def group(self, purpose: str) -> GlooGroup:
        """The group for one of PURPOSES."""
        check_purpose(purpose)
        return self._groups[purpose]

    def with_timeout(self, timeout_s: float) -> Communicator:
        """Groups over the same ranks with another limit: gloo gives up an exchange, and lets the process end, at the
        limit of its group. Collective the first time a limit is asked for."""
        from nestpipe_kernels.comm.communicator import communicator_for, exchange_same, is_known

        parent = self._parent()
        if parent is None:
            raise CommunicationError("comm: the process group of this communicator is gone")
        if timeout_s == self.timeout_s:
            return self
        if not is_known(parent, timeout_s):
            # Ranks may come here seconds apart: they meet under the old limit, as the new one may be short.
            exchange_same(self.group("control"), torch.zeros(1), f"limit/{timeout_s:g}").wait()
        return communicator_for(parent, timeout_s)

    def label(self, purpose: str) -> str:
        """What messages call a purpose."""
        return purpose

    def split(self, name: str, parts: Sequence[Sequence[int]]) -> Communicator:
        """Groups over a part of the ranks; every rank of the world calls it, whatever part it is in."""
        from nestpipe_kernels.comm.gloo_part import make_part

        key = (name, tuple(tuple(part) for part in parts))
        if key not in self._parts:
            parent = self._parent()
            if parent is None:
                raise CommunicationError("comm: the process group of this communicator is gone")
            self._parts[key] = make_part(self, parent, *key)
        return self._parts[key]

    def make_group(self, backend: str) -> Any:
        """A process group of another torch.distributed backend over the same ranks; collective the first time.

        Raises:
            CommunicationError: it could not be made.
        """
        if backend not in self._carriers:
            parent = self._parent()
            if parent is None:
                raise CommunicationError("comm: the process group of this communicator is gone")
            ranks = dist.get_process_group_ranks(parent)
            limit = timedelta(seconds=self.timeout_s)
            local = parent is not dist.group.WORLD
            try:
                made = dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=local)
            except RuntimeError as error:
                raise CommunicationError(
                    f"comm: {self.name} could not set up a group over {backend}: {first_line(error)}"
                ) from error
            self._carriers[backend] = made
        return self._carriers[backend]

    def close(self) -> None:
        """Destroy this rank's groups: peers that wait for it get CommunicationError. Idempotent; not collective."""
        if self.closed:
            return
        self.closed = True
        for part in self._parts.values():
            part.close()
        for group in self._groups.values():
            group.destroy()
        for carrier in self._carriers.values():
            with suppress(ValueError, AssertionError, RuntimeError):  # torch.distributed has been shut down
                dist.destroy_process_group(carrier)

    def describe_cause(self, purpose: int, number: int, silent: Sequence[int]) -> str:
        """Which rank is the cause of a failed exchange, as the end of a message; best effort.

        Args:
            purpose, number: its index in KINDS, and its number among the exchanges of that purpose.
            silent: ranks that nothing came from, as far as known.
        """
        return "" if self._peers is None else self._peers.describe_cause(purpose, number, silent)

    def report_failure(self, text: str, own: bool) -> None:
        """Last words for the peers, who may wait for this rank: where and what went wrong; `own` unless another rank is
        the cause."""
        if self.board is not None:
            self.board.note(OWN if own else SECONDARY, text)


class GlooGroup:
    """One purpose of one rank over gloo."""

    def __init__(self, communicator: GlooCommunicator | GlooPart, purpose: str, process_group: Any) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self.process_group = process_group
        self._communicator = weakref.proxy(communicator)
        self._timeout_s = communicator.timeout_s
        self._purpose = purpose
        self._label = communicator.label(purpose)
        self.kind = KINDS.index(self._label)
        self._name = communicator.name
        self._posted = 0
        """Exchanges so far: what matches a send with its receive."""

    @property
    def board(self) -> Board | None:
        """The communicator's board; None before it is set up, and once the communicator is gone."""
        try:
            communicator: GlooCommunicator | GlooPart = self._communicator
            return communicator.board
        except ReferenceError:
            return None

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        tag: str,
        out: Tensor | None = None,
    ) -> GlooHandle:
        """As `types.Group.all_to_all`; matched by the order of calls in this group.

        Raises:
            ValueError: see `comm.checks.check_all_to_all`.
            CommunicationError: the group is closed or a peer is already known to be gone.
        """
        where = f"{self._label} exchange {tag!r}"
        check_all_to_all(where, self.rank, self.size, send, send_counts, receive_counts, out)
        if self.process_group is None:
            raise CommunicationError(f"{where}: this communicator ({self._name}) is closed")
        rows = send.detach().contiguous()
        if out is None:
            out = torch.empty((sum(receive_counts), *rows.shape[1:]), dtype=rows.dtype)
        start = time.monotonic()
        try:
            works = self._post(rows, send_counts, out, receive_counts)
        except RuntimeError as error:
            raise self.failure(tag, self._posted, time.monotonic() - start, [], error) from error
        number, self._posted = self._posted, self._posted + 1
        board = self.board
        if board is not None:
            board.posted(self.kind, self._posted)
        return GlooHandle(self, tag, number, works, rows, out)

    def _post(
        self, rows: Tensor, send_counts: Sequence[int], out: Tensor, receive_counts: Sequence[int]
    ) -> list[tuple[int, Any]]:
        """Receives, then sends, of one exchange, each with its peer; a rank's own rows are copied at once."""
        number = self._posted % _MOST_TAGS
        outgoing, incoming = torch.split(rows, list(send_counts)), torch.split(out, list(receive_counts))
        peers = [(self.rank + k) % self.size for k in range(1, self.size)]  # not all at the same peer first
        works = [(peer, self.process_group.recv([incoming[peer]], peer, number)) for peer in reversed(peers)]
        works += [(peer, self.process_group.send([outgoing[peer]], peer, number)) for peer in peers]
        incoming[self.rank].copy_(outgoing[self.rank])
        return works

    def failure(
        self, tag: str, number: int, waited_s: float, silent: Sequence[int], error: RuntimeError
    ) -> CommunicationError:
        """The error for a failed exchange, with what is known about the peers."""
        try:
            cause = self._communicator.describe_cause(self.kind, number, silent)
        except ReferenceError:
            cause = ""
        return CommunicationError(
            f"{self._label} exchange {tag!r}: {self._name} got no answer after {waited_s:.1f} s{cause}: "
            f"{first_line(error)}"
        )

    def destroy(self) -> None:
        """Leave the group. Idempotent."""
        process_group, self.process_group = self.process_group, None
        if process_group is None:
            return
        try:
            dist.destroy_process_group(process_group)
        except (ValueError, AssertionError, RuntimeError):
            return  # torch.distributed itself has been shut down, and this group with it

    @property
    def timeout_s(self) -> float:
        return self._timeout_s


class GlooHandle:
    """An exchange under way; keeps both tensors alive until waited for."""

    def __init__(
        self, group: GlooGroup, tag: str, number: int, works: list[tuple[int, Any]], send: Tensor, received: Tensor
    ) -> None:
        self._group = group
        self._tag = tag
        self._number = number
        self._works = works
        self._send: Tensor | None = send
        self._received = received
        self._error: CommunicationError | None = None
        self._start = time.monotonic()

    def ready(self) -> bool:
        """Whether `wait` would return, or raise, without waiting."""
        return all(work.is_completed() for _, work in self._works)

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Block until the rows are here; idempotent, also in failing.

        Args:
            timeout_s: seconds, None for the communicator's limit. After a time-out the exchange has failed for good.

        Returns:
            The received rows, [sum(receive_counts), ...], in rank order: `out` if given.

        Raises:
            CommunicationError: names purpose, tag, this rank, the time and, if known, the peer that is gone.
        """
        if self._error is not None:
            raise self._error
        limit_s = self._group.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        board = self._group.board if self._works else None
        if board is not None:
            board.begin_wait(self._group.kind, self._number)
        try:
            while self._works:
                self._works[0][1].wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
                del self._works[0]
        except RuntimeError as error:
            # Gloo may still use both tensors: they stay referenced by this handle.
            waited_s = time.monotonic() - self._start
            self._error = self._group.failure(self._tag, self._number, waited_s, self._silent(), error)
            raise self._error from error
        finally:
            if board is not None:
                board.end_wait()
        self._send = None
        return self._received

    def _silent(self) -> list[int]:
        """Ranks that nothing came from, after a failure: the others' part of the exchange has been done before."""
        silent = set()
        for peer, work in self._works:
            try:
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                silent.add(peer)
        return sorted(silent)


def first_line(error: BaseException) -> str:
    """What went wrong, without source locations, native stacks and general advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = re.sub(r"^\[[^\]]*:\d+\] *", "", line)
    return line.partition(" This is ")[0].strip()
