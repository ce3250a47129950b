"""A stand-in for HCCL: a torch.distributed backend "hccl" for tensors of the stand-in NPU (fake_npu), over gloo.

As the real one it has a stream of its own: an exchange takes what it sends after what the poster's current stream had
been given, and `wait` of its work makes the current stream wait for what has been received. As NCCL in torch it keeps
both tensors until then, and no longer: memory is the caller's matter. A thread does the exchanges
one after another, in the order of posting; what they receive gets into memory of the device as late as is allowed.
Ranks that post in different orders fail, as sizes differ, or hang until the time-out.
"""

from __future__ import annotations

import queue
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fake_npu

POSTED: list[str] = []
"""Names of the threads that have posted, in order."""


class _Work(dist.Work):
    """An exchange: `done` once the host has what was received, in `received`."""

    def __init__(self) -> None:
        super().__init__()
        self.done = threading.Event()
        self.received: torch.Tensor | None = None
        self.error: BaseException | None = None
        self.point: fake_npu.Event | None = None
        self.kept: tuple[Any, ...] = ()

    def wait(self, timeout: Any = None) -> bool:
        assert self.point is not None
        fake_npu.current_stream().wait_event(self.point)
        self.kept = ()
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()

    def land(self, target: torch.Tensor) -> None:
        self.done.wait()
        if self.error is not None:
            raise RuntimeError(f"hccl: {self.error}")
        assert self.received is not None
        target.copy_(self.received)


class Hccl(dist.ProcessGroup):
    """One rank's end."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = fake_npu.new_stream()
        self._posted: queue.Queue[Any] = queue.Queue()
        thread = threading.Thread(target=_exchange, args=(self._gloo, self._posted), daemon=True, name="hccl")
        weakref.finalize(self, self._posted.put, None)
        thread.start()

    def getBackendName(self) -> str:
        return "hccl"

    def alltoall_base(self, output: Any, sent: Any, into: Any, out_of: Any, options: Any = None) -> Any:
        POSTED.append(threading.current_thread().name)
        work = _Work()
        ready = fake_npu.Event()
        ready.record()
        self._stream.wait_event(ready)
        work.kept = output, sent
        target = output.data_
        self._stream.enter(lambda: work.land(target))
        work.point = self._stream.record_event()
        self._posted.put((work, ready, sent.data_, target.shape, target.dtype, list(into), list(out_of)))
        return work


def _exchange(gloo: Any, posted: queue.Queue[Any]) -> None:
    while (item := posted.get()) is not None:
        work, ready, sent, shape, dtype, into, out_of = item
        try:
            ready.synchronize()
            received = torch.empty(shape, dtype=dtype)
            gloo.alltoall_base(received, sent.contiguous(), into, out_of, dist.AllToAllOptions()).wait()
            work.received = received
        except BaseException as error:
            work.error = error
        work.done.set()


def install() -> None:
    """Register the device and the backend in this process. Once."""
    fake_npu.install()
    if "hccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("hccl", Hccl, devices=["npu"])
