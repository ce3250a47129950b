"""A stand-in for an Ascend NPU: a device "npu" with asynchronous streams, for machines that have none.

`install()` registers `torch_npu` and `torch.npu` in this process, for good: call it in processes of its own. Tensors of
the device hold their data in a CPU tensor; operations only enter a queue of the thread's current stream. Queued work
runs as late as is allowed: when a host thread, or another stream that is itself run, waits for it. So what is not
ordered by an event, or read before it was waited for, is seen as wrong data, every time.

Memory is that of a caching allocator: when the last tensor of a block goes, the block belongs to the stream it was made
on again, at once. That stream then writes rubbish into it, unless `record_stream` has told that others use it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

DEVICES = 1
_LOCAL = threading.local()
_PINNED: dict[int, int] = {}
"""Address of pinned host memory -> how many bytes."""


class Stream:
    """A queue of work that runs when somebody waits for it."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = 0
        """As the address of a CUDA stream, for kernels that `use_kernels` puts into the current one."""
        self._queue: deque[Callable[[], None]] = deque()
        self._entered = 0
        self._left = 0
        self._runner: int | None = None
        """The thread that runs the first of the queue."""
        self._changed = threading.Condition()
        """Guards the number that has left, and the runner."""
        self._enter_lock = threading.RLock()  # entering may collect garbage: tensors whose memory is used again

    def enter(self, work: Callable[[], None]) -> int:
        """Queue work; its number."""
        with self._enter_lock:
            self._queue.append(work)
            self._entered += 1
            return self._entered

    def run_until(self, number: int) -> None:
        """Run everything up to that number, and whatever it waits for.

        Who finds that another thread runs this queue waits for the number alone, never for the thread to be through:
        that one may go on with later work, which waits for a queue that the first one runs.
        """
        own = threading.get_ident()
        while True:
            with self._changed:
                if self._runner == own and self._left < number:
                    raise RuntimeError("a stream waits for its own work")
                self._changed.wait_for(lambda: self._left >= number or self._runner is None)
                if self._left >= number:
                    return
                self._runner = own
            spent = None
            try:
                with torch.no_grad():
                    self._queue[0]()
                spent = self._queue.popleft()
            finally:
                with self._changed:
                    self._runner = None
                    self._left += spent is not None
                    self._changed.notify_all()

    def synchronize(self) -> None:
        self.run_until(self._entered)

    def query(self) -> bool:
        return self._left == self._entered

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        point = event.point
        if point is not None and point[0] is not self:
            self.enter(lambda: point[0].run_until(point[1]))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """A point of a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.point: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.point = stream, stream._entered

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.point is None or self.point[0]._left >= self.point[1]

    def synchronize(self) -> None:
        if self.point is not None:
            self.point[0].run_until(self.point[1])


_DEFAULT = Stream()


def current_stream(device: Any = None) -> Stream:
    """The calling thread's stream; autograd's own threads have the default one."""
    return getattr(_LOCAL, "stream", _DEFAULT)


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    before = current_stream()
    _LOCAL.stream = chosen or before
    try:
        yield
    finally:
        _LOCAL.stream = before


def set_stream(chosen: Stream) -> None:
    _LOCAL.stream = chosen


def synchronize(device: Any = None) -> None:
    for every in list(_STREAMS):
        every.synchronize()


class _Block:
    """Memory of some tensors; when they are gone its own stream uses it again."""

    def __init__(self, data: torch.Tensor) -> None:
        self.storage = data.untyped_storage()
        self.home = current_stream()
        self.users: set[Stream] = set()

    def __del__(self) -> None:
        users = [user.record_event() for user in self.users if user is not self.home]
        storage = self.storage

        def use_again() -> None:
            for event in users:
                event.synchronize()
            if storage.nbytes():
                torch.tensor([], dtype=torch.uint8).set_(storage).fill_(255)
                if KERNELS:  # they hold addresses: what they still read is rubbish, but memory
                    _KEPT.append(torch.tensor([], dtype=torch.uint8).set_(storage))

        if storage.nbytes():
            self.home.enter(use_again)


class NpuTensor(torch.Tensor):
    """A tensor of the device."""

    data_: torch.Tensor
    block: _Block

    @staticmethod
    def make(data: torch.Tensor, block: _Block | None = None) -> NpuTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            NpuTensor, data.shape, strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=torch.device("npu", 0),
        )  # fmt: skip
        made.data_ = data
        made.block = block or _Block(data)
        return made

    def data_ptr(self) -> int:
        return self.data_.data_ptr()

    def record_stream(self, user: Stream) -> None:  # type: ignore[override]
        self.block.users.add(user)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"npu{list(self.shape)}"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, dict(kwargs or {}))


def _map(function: Callable[[Any], Any], values: Any) -> Any:
    """`function` of every leaf of arguments: lists, tuples and dictionaries keep their form."""
    if isinstance(values, (list, tuple)):
        return type(values)([_map(function, v) for v in values])
    if isinstance(values, dict):
        return {k: _map(function, v) for k, v in values.items()}
    return function(values)


def _data(value: Any) -> Any:
    if isinstance(value, NpuTensor):
        return value.data_
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _meta(value: Any) -> Any:
    if isinstance(value, NpuTensor):
        d = value.data_
        return torch.empty_strided(d.shape, d.stride(), dtype=d.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _key(value: Any) -> Any:
    """What a result's form may depend on."""
    if isinstance(value, NpuTensor):
        return value.data_.shape, value.data_.stride(), value.data_.dtype
    return value.dtype if isinstance(value, torch.Tensor) else (type(value), value)


def _hashable(values: Any) -> Any:
    if isinstance(values, dict):
        values = list(values.items())
    return tuple([_hashable(v) for v in values]) if isinstance(values, (list, tuple)) else values


_FORMS: dict[Any, Any] = {}
"""(operation, its arguments' forms) -> (shape, strides, dtype) of its results; None: they depend on data."""


def _forms(func: Any, args: Any, kwargs: Any) -> Any:
    key = func, _hashable(_map(_key, (args, kwargs)))
    if key not in _FORMS:
        found = None
        with contextlib.suppress(Exception):
            if func._schema.name.startswith("aten::_embedding_bag"):
                raise NotImplementedError  # its rule for shapes is that of other devices
            shaped = func(*_map(_meta, args), **_map(_meta, kwargs))
            if all(isinstance(v, torch.Tensor) for v in _flat(shaped)):
                found = _map(lambda m: _Form(m.shape, m.stride(), m.dtype), shaped)
        _FORMS[key] = found
    return _FORMS[key]


class _Form:
    """Of a result."""

    def __init__(self, shape: Any, stride: Any, dtype: torch.dtype) -> None:
        self.shape, self.stride, self.dtype = shape, stride, dtype


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map(lambda v: found.append(v) if isinstance(v, torch.Tensor) else None, values)
    return found


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if name == "aten::copy_":
        return _copy(*args, **kwargs)
    if name == "aten::_to_copy" and kwargs.get("device") is not None and kwargs["device"].type == "cpu":
        source, late = args[0], kwargs.pop("non_blocking", False)
        result = torch.empty_like(source.data_, dtype=kwargs.get("dtype") or source.dtype)
        _copy(result, source, late and _pinned(result))
        return result
    tensors = _tensors((args, kwargs))
    for tensor in tensors:
        if not isinstance(tensor, NpuTensor) and tensor.dim():
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found npu:0 and cpu")
    arguments = func._schema.arguments
    written = [k for k, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    views = any(a.alias_info is not None for a in arguments) and not written
    plain_args, plain_kwargs = _map(_data, args), _map(_data, kwargs)
    if views:
        made = func(*plain_args, **plain_kwargs)
        owner = next(t for t in tensors if isinstance(t, NpuTensor)).block
        return _map(lambda v: NpuTensor.make(v, owner) if isinstance(v, torch.Tensor) else v, made)
    if written:
        targets = [args[k] if k < len(args) else kwargs[arguments[k].name] for k in written]
        current_stream().enter(lambda: func(*plain_args, **plain_kwargs))
        returned = [t for t in targets if t is not None]
        return None if not func._schema.returns else returned[0] if len(returned) == 1 else tuple(returned)
    forms = _forms(func, args, kwargs)
    if forms is None:
        current_stream().synchronize()  # its result's shape, or value, depends on data
        with torch.no_grad():
            made = func(*plain_args, **plain_kwargs)
        return _map(lambda v: NpuTensor.make(v) if isinstance(v, torch.Tensor) else v, made)
    results = _map(lambda m: _rubbish(m.shape, m.stride, m.dtype), forms)

    def work() -> None:
        for result, value in zip(_flat(results), _flat(func(*plain_args, **plain_kwargs))):
            result.copy_(value)

    current_stream().enter(work)
    return _map(NpuTensor.make, results)


KERNELS: list[Any] = []
"""The extension of CUDA kernels that the device uses; none: plain PyTorch."""


USED: set[str] = set()
"""Names of those that have been called."""


class _Kernels:
    """That extension: its operations enter the current stream's queue."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(KERNELS[0], name)
        if name.endswith("_work_bytes"):
            return function

        def enter(*arguments: Any) -> None:
            USED.add(name)
            current_stream().enter(lambda: function(*arguments))

        return enter


def use_kernels(module: Any) -> None:
    """Let the device use CUDA's kernels (the extension `_cuda`, compiled for the CPU) in this process from now on."""
    from nestpipe_kernels import _native

    KERNELS[:] = [module]
    _native.use_kernels("npu", _Kernels())


def _flat(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (tuple, list)) else [values]


def _rubbish(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")
    if made.numel():
        torch.tensor([], dtype=torch.uint8).set_(made.untyped_storage()).fill_(255)
    return made


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to, origin = _data(target), _data(source)
    if not isinstance(source, NpuTensor) and not (non_blocking and _pinned(source)):
        origin = source.detach().clone()  # pageable memory has been read when the call returns
    current_stream().enter(lambda: to.copy_(origin))
    if not isinstance(target, NpuTensor):
        if non_blocking and _pinned(target):
            to.view(-1).view(torch.uint8).fill_(255) if to.numel() else None
        else:
            current_stream().synchronize()
    return target


def _pinned(tensor: torch.Tensor) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return address in _PINNED


def pinned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Host memory that copies may read and write late."""
    made = torch.empty(tuple(shape), dtype=dtype)
    _PINNED[made.untyped_storage().data_ptr()] = made.nbytes
    _KEPT.append(made)
    return made


_KEPT: list[torch.Tensor] = []


class _Streams:
    """All streams that there are, also those that nobody else has any more."""

    def __init__(self) -> None:
        self.all = [_DEFAULT]

    def __iter__(self) -> Iterator[Stream]:
        return iter(self.all)


_STREAMS = _Streams()


def new_stream(device: Any = None, priority: int = 0) -> Stream:
    made = Stream()
    _STREAMS.all.append(made)
    return made


def install() -> None:
    """Register the device in this process, before its first backward: autograd makes its threads for devices then."""
    if "torch_npu" in sys.modules:
        return
    module = types.ModuleType("torch.npu")
    functions = {
        "Stream": new_stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda device=None: _DEFAULT,
        "stream": stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
        "device_count": lambda: DEVICES,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "stand-in",
        "_is_in_bad_fork": lambda: False,
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": list,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("npu", module)
    package = types.ModuleType("torch_npu")
    package.npu = module
    package.__version__ = "stand-in"
    sys.modules["torch_npu"] = package
    from nestpipe_kernels.device import backend

    backend.pinned_memory = pinned
    library = torch.library.Library("aten", "IMPL")
    _KEPT_LIBRARY.append(library)

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        dtype = dtype or torch.get_default_dtype()
        return NpuTensor.make(_rubbish(size, torch.empty(tuple(size), device="meta").stride(), dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return NpuTensor.make(_rubbish(size, stride, dtype or torch.get_default_dtype()))

    def arange(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        made = torch.arange(start, end, step, dtype=dtype)
        result = _rubbish(made.shape, made.stride(), made.dtype)
        current_stream().enter(lambda: result.copy_(made))
        return NpuTensor.make(result)

    library.impl("arange", lambda end, **how: arange(0, end, **how), "PrivateUse1")
    library.impl("arange.start", arange, "PrivateUse1")
    library.impl("arange.start_step", arange, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", lambda source, target, late=False: _copy(target, source, late), "PrivateUse1")


_KEPT_LIBRARY: list[Any] = []
