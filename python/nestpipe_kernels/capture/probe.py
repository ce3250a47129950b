"""Running a model once without a trace: random state, buffers, changed parameters, gradients and modes are put back."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nestpipe_kernels.errors import CaptureError

__all__ = ["ModelState", "eager_only", "preserved_random_state"]


@contextmanager
def preserved_random_state(own: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Random state of torch (CPU, and CUDA if in use), numpy, `random` and generators `own`, restored on leaving."""
    owned = [(generator, generator.get_state()) for generator in own]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    cpu, numpy_state, python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        np.random.set_state(numpy_state)
        random.setstate(python)
        for generator, state in owned:
            generator.set_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


class _EagerOnly:
    """The compiler's stance is the process's: the first to come sets it, the last to leave puts back what it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._leave = ExitStack()

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._leave.enter_context(torch.compiler.set_stance("force_eager"))
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._leave.close()


_eager_only = _EagerOnly()


@contextmanager
def eager_only() -> Iterator[None]:
    """Compiled functions run as plain Python, in all threads, so that every operation is seen.

    Loads no compiler that is not in use.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    _eager_only.enter()
    try:
        yield
    finally:
        _eager_only.leave()


class ModelState:
    """What a forward pass may change in a model; restored exactly by `restore`.

    Buffers are copied at once (batch normalisation writes them unannounced). Parameters are copied by `before_write`
    when an operation is about to write one, so large models cost nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if is_lazy(tensor):
                raise CaptureError(
                    f"capture: '{name}' of the model is not initialized yet; run one forward of the model on a batch "
                    f"before training, then make its optimizer and the pipeline"
                )
        self._modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._parameters = list(model.parameters())
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def before_write(self, parameter: Tensor) -> None:
        """Copy a parameter, once, before something writes to it."""
        if id(parameter) not in self._written:
            self._written[id(parameter)] = (parameter, parameter.detach().clone())

    def restore(self) -> None:
        """Put back all that the probe may have changed."""
        with torch.no_grad():
            for tensor, saved in [*self._buffers, *self._written.values()]:
                if tensor.shape != saved.shape or not _same_bits(tensor, saved):
                    tensor.set_(saved) if tensor.shape != saved.shape else tensor.copy_(saved)  # type: ignore[call-overload]
        for module, training, buffers in self._modules:
            module.training = training
            module._buffers = buffers
        for parameter, gradient in zip(self._parameters, self._gradients):
            parameter.grad = gradient


def _same_bits(a: Tensor, b: Any) -> bool:
    # NaN differs from itself: a buffer with NaN is copied back needlessly, which does no harm.
    return torch.equal(a.detach(), b)
