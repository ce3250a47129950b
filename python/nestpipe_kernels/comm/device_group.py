"""Groups that carry tensors of an accelerator: by the device's own collectives (HCCL), or through the host.

Keys, counts and flags are on the host and stay with the host's group. For tensors of the device a group of the device's
torch.distributed backend is made over the same ranks, one for all purposes: such a backend runs what is posted in the
order of posting and every rank must post in the same order, so one thread posts at a time (the exchange lane, in plan
order). Where there is no such backend, tensors go to the host, through the host's group, and back.

A post never waits for the device to have computed what is sent, except through the host. `wait` makes the current
stream of whoever calls it wait, not the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe_kernels.comm.checks import check_purpose
from nestpipe_kernels.comm.communicator import Communicator
from nestpipe_kernels.device import DeviceBackend
from nestpipe_kernels.errors import CommunicationError
from nestpipe_kernels.types import Group, Handle

__all__ = ["DeviceCommunicator"]

COLLECTIVE_PURPOSES = ("rows", "grads", "dense")
"""What the device's collectives carry: their posts are all on the exchange lane."""


class DeviceCommunicator:
    """One rank's access to the others for tensors of the host and of a device.

    Args:
        host: the host's communicator.
        backend: the device.

    Making one is collective over `host` where the device has collectives of its own.

    Raises:
        CommunicationError: the device's group could not be made.
    """

    def __init__(self, host: Communicator, backend: DeviceBackend) -> None:
        self.host = host
        self.backend = backend
        self.rank, self.size, self.timeout_s = host.rank, host.size, host.timeout_s
        self._groups: dict[str, DeviceGroup] = {}
        self.carrier = _carrier(host, backend)
        """The process group of the device's collectives; None: through the host."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)  # board, report_failure, where the transport has them

    def group(self, purpose: str) -> Group:
        """The group for one of PURPOSES."""
        check_purpose(purpose)
        if purpose not in self._groups:
            carrier = self.carrier if purpose in COLLECTIVE_PURPOSES else None
            self._groups[purpose] = DeviceGroup(self.host.group(purpose), self.backend, carrier, purpose)
        return self._groups[purpose]

    def with_timeout(self, timeout_s: float) -> DeviceCommunicator:
        """As `Communicator.with_timeout`."""
        return (
            self if timeout_s == self.timeout_s else DeviceCommunicator(self.host.with_timeout(timeout_s), self.backend)
        )

    def split(self, name: str, parts: Sequence[Sequence[int]]) -> Communicator:
        """As `Communicator.split`, for tensors of the host."""
        return self.host.split(name, parts)

    def close(self) -> None:
        """As `Communicator.close`: the device's group goes with the process groups of the host."""
        self.host.close()


def _carrier(host: Communicator, backend: DeviceBackend) -> Any:
    make = getattr(host, "make_group", None)
    if host.size == 1 or make is None or backend.collectives is None:
        return None
    if backend.collectives not in dist.Backend.backend_list:
        return None
    if backend.collectives == "nccl" and not dist.is_nccl_available():  # torch lists it all the same
        return None
    return make(backend.collectives)


class DeviceGroup:
    """One purpose of one rank; tensors of the host go as they would without a device."""

    def __init__(self, host: Group, backend: DeviceBackend, carrier: Any, purpose: str) -> None:
        self.rank, self.size = host.rank, host.size
        self._host = host
        self._backend = backend
        self._carrier = carrier
        self._purpose = purpose

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        tag: str,
        out: Tensor | None = None,
    ) -> Handle:
        """As `types.Group.all_to_all`; `out` is where `send` is.

        Raises:
            TypeError: `send` or `out` is on another device than the group's.
        """
        if send.is_cpu:
            return self._host.all_to_all(send, send_counts, receive_counts, tag, out)
        for name, tensor in (("send", send), ("out", out)):
            if tensor is not None and tensor.device != self._backend.device:
                raise TypeError(
                    f"{self._purpose} exchange {tag!r}: {name} must be on {self._backend.device}, the device of this "
                    f"group, got a tensor on {tensor.device}"
                )
        rows = send.detach().contiguous()
        if out is None:
            out = torch.empty((sum(receive_counts), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        if self.size == 1:
            out.copy_(rows)
            return _Received(self._backend, out, self._backend.record())
        if self._carrier is None:
            # What the stream has still to do with the memory of `out` comes before it is written.
            free = self._backend.record()
            handle = self._host.all_to_all(rows.cpu(), send_counts, receive_counts, tag)
            return _ThroughHost(self._backend, handle, out, free)
        where = f"{self._purpose} exchange {tag!r}"
        try:
            work = dist.all_to_all_single(
                out, rows, list(receive_counts), list(send_counts), group=self._carrier, async_op=True
            )
        except RuntimeError as error:
            raise CommunicationError(f"{where} over {self._backend.collectives}: {error}") from error
        return _Collective(self._backend, work, rows, out, f"{where} over {self._backend.collectives}")


class _Received:
    """An exchange whose result is there at a point of a stream."""

    def __init__(self, backend: DeviceBackend, received: Tensor, point: Any) -> None:
        self._backend = backend
        self._received = received
        self._point = point

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Let the current stream wait; the received tensor, kept for what that stream does with it."""
        self._backend.order(self._point)
        self._backend.uses([self._received])
        return self._received


class _ThroughHost(_Received):
    """An exchange of the host whose result goes to the device when it is first waited for."""

    def __init__(self, backend: DeviceBackend, handle: Handle, out: Tensor, free: Any) -> None:
        super().__init__(backend, out, None)
        self._handle = handle
        self._free = free
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Block until the host has it, then as `_Received`."""
        with self._lock:
            if self._point is None:
                received = self._handle.wait(timeout_s)
                self._backend.order(self._free)
                self._backend.uses([self._received])
                self._received.copy_(received)
                self._point = self._backend.record()
        return super().wait(timeout_s)


class _Collective:
    """An exchange on the device's own stream of communication; keeps both tensors until it is let go."""

    def __init__(self, backend: DeviceBackend, work: Any, send: Tensor, received: Tensor, where: str) -> None:
        self._backend = backend
        self._work = work
        self._send = send
        self._received = received
        self._where = where

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Let the current stream wait. Raises CommunicationError where the backend tells of a failure."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CommunicationError(f"{self._where}: {error}") from error
        # The backend lets go of both here, and what was sent may be of a stream that waits for nothing of this.
        self._backend.uses([self._received, self._send])
        return self._received
