"""What a pipeline needs of a kind of device: streams, events, memory that crosses streams, pinned memory.

`backend_for` chooses. A CPU has no streams: work of a lane is done when its thread has done it, and an event is an
`Event`. An accelerator is known by its device module: `torch.cuda`, or `torch.npu`, which `torch_npu` brings and whose
streams, events and `record_stream` have the same form.

Pinned memory is torch's: its host allocator gives a block to somebody else only when the copies that read or write it
have been done, so who starts one may drop the tensor.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels import _native
from nestpipe_kernels.device.event import Event

__all__ = [
    "CPU",
    "CpuBackend",
    "DeviceBackend",
    "DeviceEvent",
    "StreamBackend",
    "backend_for",
    "pinned_memory",
    "put_on",
]


def pinned_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory, contents undefined, that an accelerator copies from and to without the host waiting."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def put_on(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on an accelerator, for work of the current stream; the host does not wait."""
    staged = pinned_memory(tensor.shape, tensor.dtype)
    staged.copy_(tensor)
    return staged.to(device, non_blocking=True)


class CpuBackend:
    """The CPU: no streams."""

    kind = "cpu"
    device = torch.device("cpu")
    has_streams = False
    collectives: str | None = None
    """torch.distributed backend that carries tensors of the device itself; None: none, they go through the host."""

    def event(self, name: str | tuple[str, int, int] = "") -> Event:
        """A new event for lanes of this device."""
        return Event(name)

    def new_stream(self) -> Any:
        """A stream of the device; None where it has none."""
        return None

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Let the thread's work on the device go to `stream`."""
        yield

    def record(self) -> Any:
        """A point of the thread's current stream: all that has been issued there."""
        return None

    def order(self, point: Any) -> None:
        """Let the current stream wait for a point. The host does not wait."""

    def reach(self, point: Any) -> None:
        """Let the host wait for a point."""

    def uses(self, tensors: Sequence[Tensor | None]) -> None:
        """The current stream uses these from here on: their memory is kept for what has been issued there."""

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device, for work of the current stream."""
        return tensor

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory, contents undefined, that is copied to and from the device without waiting."""
        return torch.empty(tuple(shape), dtype=dtype)

    def synchronize(self, stream: Any = None) -> None:
        """Let the host wait for a stream, or for all of the device."""


class StreamBackend(CpuBackend):
    """A device with streams.

    Args:
        kind: "cuda" or "npu".
        module: the device module, like `torch.cuda`.
        index: which device.
        collectives: torch.distributed backend for its tensors.
    """

    has_streams = True

    def __init__(self, kind: str, module: Any, index: int, collectives: str | None) -> None:
        self.kind = kind
        self.device = torch.device(kind, index)
        self.collectives = collectives
        self._module = module

    def __repr__(self) -> str:
        return f"StreamBackend({str(self.device)!r})"

    def event(self, name: str | tuple[str, int, int] = "") -> DeviceEvent:
        return DeviceEvent(self, name)

    def new_stream(self) -> Any:
        return self._module.Stream(device=self.device)

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        self._module.set_device(self.device)  # the current device is the thread's own
        with self._module.stream(stream):
            yield

    def record(self) -> Any:
        point = self._module.Event()
        point.record(self._module.current_stream(self.device))
        return point

    def order(self, point: Any) -> None:
        self._module.current_stream(self.device).wait_event(point)

    def reach(self, point: Any) -> None:
        point.synchronize()

    def uses(self, tensors: Sequence[Tensor | None]) -> None:
        stream = self._module.current_stream(self.device)
        for tensor in tensors:
            if tensor is not None and not tensor.is_cpu:
                tensor.record_stream(stream)

    def put(self, tensor: Tensor) -> Tensor:
        return put_on(tensor, self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return pinned_memory(shape, dtype)

    def synchronize(self, stream: Any = None) -> None:
        if stream is None:
            self._module.synchronize(self.device)
        else:
            stream.synchronize()


class DeviceEvent(Event):
    """An event of a device with streams: set when work has been issued, and then holds the point of the stream at which
    it will be done.

    Waiting makes the thread sleep until the work has been issued, and the thread's current stream wait for the point;
    it does not wait for the device. Whoever reads a result on the host waits by reading (`Tensor.cpu`).
    """

    __slots__ = ("_backend", "_point")

    def __init__(self, backend: CpuBackend, name: str | tuple[str, int, int] = "") -> None:
        super().__init__(name)
        self._backend = backend
        self._point: Any = None

    def try_set(self, error: BaseException | None = None) -> bool:
        """As `Event.try_set`, at the current point of the calling thread's stream."""
        if error is None and not self.is_set():
            point = self._backend.record()
            if self._point is None:
                self._point = point
        return super().try_set(error)

    def order(self) -> None:
        """Let the current stream wait for what has been issued. The event is set."""
        if self._point is not None:
            self._backend.order(self._point)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the work is issued, then let the current stream wait for it. Raises as `Event.wait`."""
        super().wait(timeout_s)
        self.order()


DeviceBackend = CpuBackend
"""The interface of all of them."""

CPU = CpuBackend()


def backend_for(device: str | torch.device) -> DeviceBackend:
    """The backend of a device: "cpu", "cuda", "cuda:1", "npu", "npu:1".

    Raises:
        RuntimeError: an accelerator that this torch cannot use, or that is not here; says why and what to do.
        ValueError: any other device.
    """
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return CPU
    if kind not in ("cuda", "npu") or (number and not number.isdigit()):
        raise ValueError(
            f"unknown device {str(device)!r}; expected 'cpu', 'cuda', 'npu', or one of several as in 'cuda:1'"
        )
    index = int(number) if number else None
    return _cuda_backend(str(device), index) if kind == "cuda" else _npu_backend(str(device), index)


def _npu_backend(device: str, index: int | None) -> DeviceBackend:
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise RuntimeError(
            f"device {device!r} needs torch_npu, which cannot be imported here ({error}); install the torch_npu "
            f"that fits torch {torch.__version__}, or use device 'cpu'"
        ) from error
    module: Any = getattr(torch, "npu", None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if index is None:
        index = module.current_device() if count else 0
    if index >= count:
        raise RuntimeError(f"device {device!r} is not here: torch_npu sees {count} devices; use device 'cpu'")
    return StreamBackend("npu", module, index, "hccl")


def _cuda_backend(device: str, index: int | None) -> DeviceBackend:
    if torch.version.cuda is None:
        raise RuntimeError(
            f"device {device!r} needs a torch that was built with CUDA, this is torch {torch.__version__}; install one "
            "that is, or use device 'cpu'"
        )
    count = torch.cuda.device_count()
    if count == 0 or not torch.cuda.is_available():
        raise RuntimeError(f"device {device!r} is not here: {_why_no_cuda()}; use device 'cpu'")
    index = torch.cuda.current_device() if index is None else index
    if index >= count:
        raise RuntimeError(f"device {device!r} is not here: torch sees {count} CUDA devices; use one of them, or 'cpu'")
    _check_cuda_kernels(device, index)
    return StreamBackend("cuda", torch.cuda, index, "nccl")


def _why_no_cuda() -> str:
    """What keeps torch from seeing a device, as far as can be told."""
    module = _native.cuda()
    problem = module.driver()[3] if module is not None else ""
    built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    return f"torch sees no CUDA device ({problem + '; ' if problem else ''}{built})"


def _check_cuda_kernels(device: str, index: int) -> None:
    """Say that there are none; raise where the driver or the device cannot run them although torch's own CUDA works."""
    module = _native.cuda()
    if module is None:
        warnings.warn(
            f"device {device!r}: this installation of nestpipe_kernels has no CUDA kernels, so series of PyTorch "
            "operations do their work, slower; install the CUDA wheel (nestpipe doctor tells which one this is)",
            stacklevel=4,
        )
        return
    _, supported, built, problem = module.driver()
    if problem:
        raise RuntimeError(
            f"device {device!r}: the CUDA kernels of nestpipe_kernels cannot run here: {problem} (they are built with "
            f"CUDA {_version(built)}, the driver supports up to {_version(supported)}); update the driver, install a "
            "wheel for an older CUDA, or use device 'cpu'"
        )
    capability = torch.cuda.get_device_capability(index)
    built_for = [int(name.partition("-")[0].rstrip("af")) for name in module.architectures.split()]
    if not any(number // 10 == capability[0] and number % 10 <= capability[1] for number in built_for):
        raise RuntimeError(
            f"device 'cuda:{index}' ({torch.cuda.get_device_name(index)}) has compute capability "
            f"{_dotted(capability)}, and the CUDA kernels of this installation are for "
            f"{', '.join(_dotted(divmod(number, 10)) for number in built_for)} and later minor versions; build from "
            "source with CMAKE_CUDA_ARCHITECTURES for it, or use another device"
        )


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def _version(number: int) -> str:
    """12.4 for 12040, as CUDA counts."""
    return f"{number // 1000}.{number % 1000 // 10}"
