"""Communicator: a rank's groups, one per purpose; choosing one for a process group; the single-rank one."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe_kernels.comm.checks import PURPOSES, check_all_to_all, check_purpose, own_part
from nestpipe_kernels.errors import CommunicationError
from nestpipe_kernels.types import Group, Handle

__all__ = ["PURPOSES", "Communicator", "LocalCommunicator", "communicator_for", "exchange_same", "is_known"]


@runtime_checkable
class Communicator(Protocol):
    """One rank's access to the others."""

    rank: int
    size: int
    timeout_s: float
    """Limit of every wait, seconds."""

    def group(self, purpose: str) -> Group:
        """The group for one of PURPOSES; the same object every time. Raises ValueError for another name."""
        ...

    def with_timeout(self, timeout_s: float) -> Communicator:
        """The same ranks with another limit of waits, where the transport has one. Collective the first time."""
        ...

    def split(self, name: str, parts: Sequence[Sequence[int]]) -> Communicator:
        """The part of the world that this rank is in, out of parts that hold each rank once; numbered as in the part.
        It has groups for PART_PURPOSES; `name` is one of PARTS.

        Collective over all ranks the first time, then the same object. It closes with this communicator.

        Raises:
            ValueError: `parts` do not hold each rank once.
        """
        ...

    def close(self) -> None:
        """Leave; peers that wait for this rank get CommunicationError. Idempotent."""
        ...


class LocalHandle:
    """An exchange that is already complete."""

    def __init__(self, received: Tensor) -> None:
        self._received = received

    def ready(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """The received rows; never blocks."""
        return self._received


class LocalGroup:
    """A group of one rank: an exchange is a copy."""

    rank = 0
    size = 1

    def __init__(self, communicator: LocalCommunicator, purpose: str) -> None:
        self._communicator = communicator
        self._purpose = purpose

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        tag: str,
        out: Tensor | None = None,
    ) -> LocalHandle:
        """As `types.Group.all_to_all`; copies at once."""
        where = f"{self._purpose} exchange {tag!r}"
        if self._communicator.closed:
            raise CommunicationError(f"{where}: this communicator is closed")
        check_all_to_all(where, 0, 1, send, send_counts, receive_counts, out)
        received = torch.empty_like(send, memory_format=torch.contiguous_format) if out is None else out
        received.copy_(send)
        return LocalHandle(received)


class LocalCommunicator:
    """The communicator of a world of one rank; needs no torch.distributed."""

    rank = 0
    size = 1

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        self.closed = False
        self._groups = {purpose: LocalGroup(self, purpose) for purpose in PURPOSES}

    def group(self, purpose: str) -> LocalGroup:
        """The group for one of PURPOSES."""
        check_purpose(purpose)
        return self._groups[purpose]

    def with_timeout(self, timeout_s: float) -> LocalCommunicator:
        """Itself: nothing here waits."""
        return self

    def split(self, name: str, parts: Sequence[Sequence[int]]) -> LocalCommunicator:
        """Itself: there is one rank."""
        own_part(parts, 0, 1)
        return self

    def close(self) -> None:
        """Refuse further exchanges. Idempotent."""
        self.closed = True


_cache: WeakKeyDictionary[Any, dict[float, Communicator]] = WeakKeyDictionary()
_local: dict[float, LocalCommunicator] = {}
_cache_lock = threading.Lock()


def communicator_for(process_group: Any = None, timeout_s: float = 300.0) -> Communicator:
    """The communicator for a process group, shared by all callers that ask with the same time-out.

    Collective on first use of a process group of several ranks: all its ranks must call it (it makes one group per
    purpose), in the same order relative to other such calls.

    Args:
        process_group: None (torch.distributed's default group if initialised, else this process alone), a
            torch.distributed process group, or a Communicator (returned as it is: tests and other transports).
        timeout_s: limit of every wait, seconds, > 0.

    Raises:
        TypeError: `process_group` is none of these.
        ValueError: `timeout_s` is not a finite number > 0.
    """
    if isinstance(process_group, Communicator):
        return process_group
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"comm: timeout_s must be a finite number of seconds > 0, got {timeout_s!r}")
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            with _cache_lock:
                if timeout_s not in _local or _local[timeout_s].closed:
                    _local[timeout_s] = LocalCommunicator(timeout_s)
                return _local[timeout_s]
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            "comm: process_group must be None, a torch.distributed process group that this rank belongs to, or a "
            f"Communicator, got {type(process_group).__name__}"
        )
    from nestpipe_kernels.comm.gloo import GlooCommunicator

    with _cache_lock:
        known = _cache.setdefault(process_group, {})
        found = known.get(timeout_s)
        if found is None or getattr(found, "closed", False):
            if dist.get_world_size(process_group) == 1:
                found = LocalCommunicator(timeout_s)
            else:
                found = GlooCommunicator(process_group, timeout_s)
            known[timeout_s] = found
        return found


def is_known(process_group: dist.ProcessGroup, timeout_s: float) -> bool:
    """Whether `communicator_for` has an open communicator for these, so that asking for it is not collective."""
    with _cache_lock:
        found = _cache.get(process_group, {}).get(timeout_s)
        return found is not None and not getattr(found, "closed", False)


def exchange_same(group: Group, tensor: Tensor, tag: str) -> Handle:
    """Give the same tensor to every rank: the handle's result is [W, *tensor.shape], in rank order.

    Args:
        group: whom to exchange with.
        tensor: any dtype the group carries; the same shape and dtype on all ranks. Copied, so it may change at once.
        tag: names the collective.
    """
    send = tensor.unsqueeze(0).expand(group.size, *tensor.shape).contiguous()
    ones = [1] * group.size
    return group.all_to_all(send, ones, ones, tag)
