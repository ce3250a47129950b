"""finite_rows: which rows of a gradient matrix hold only finite numbers; all_finite: whether all of them do."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from .. import _row_checks as checks
from .._kernels import kernels_of
from . import cuda, native, reference

__all__ = ["all_finite", "finite_rows"]


def finite_rows(grads: Tensor, *, implementation: str = "native") -> Tensor:
    """bool [U]: True where a row of `grads` has neither NaN nor infinity. One pass, synchronous.

    Gradients on an accelerator: the work goes to the current stream, and the result is there.

    Args:
        grads: float32 [U, D], last dimension contiguous.
        implementation: "native" or "reference".

    Raises:
        TypeError: dtype or device. ValueError: shape or strides.
    """
    checks.check_implementation("finite_rows", implementation)
    checks.check_matrix("finite_rows", "grads", grads, device=checks.device_of(grads))
    found: Tensor = _chosen(grads, implementation).finite_rows(grads)
    return found


def all_finite(grads: Tensor, *, implementation: str = "native") -> bool:
    """Whether `grads` has neither NaN nor infinity; stops at the first. Arguments and errors: `finite_rows`.

    Gradients on an accelerator: it waits for them.
    """
    checks.check_implementation("all_finite", implementation)
    checks.check_matrix("all_finite", "grads", grads, device=checks.device_of(grads))
    every: bool = _chosen(grads, implementation).all_finite(grads)
    return every


def _chosen(grads: Tensor, implementation: str) -> ModuleType:
    """Where the operations are that work on these gradients."""
    if grads.is_cpu:
        return native if implementation == "native" else reference
    return reference if kernels_of(grads) is None else cuda
