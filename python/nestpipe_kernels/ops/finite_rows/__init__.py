"""finite_rows: which rows of a gradient matrix hold only finite numbers; all_finite: whether all of them do."""

from __future__ import annotations

from torch import Tensor

from .. import _row_checks as checks
from . import native, reference

__all__ = ["all_finite", "finite_rows"]


def finite_rows(grads: Tensor, *, implementation: str = "native") -> Tensor:
    """bool [U]: True where a row of `grads` has neither NaN nor infinity. One pass, synchronous.

    Args:
        grads: float32 [U, D], last dimension contiguous.
        implementation: "native" or "reference".

    Raises:
        TypeError: dtype or device. ValueError: shape or strides.
    """
    checks.check_implementation("finite_rows", implementation)
    checks.check_matrix("finite_rows", "grads", grads)
    return native.finite_rows(grads) if implementation == "native" else reference.finite_rows(grads)


def all_finite(grads: Tensor, *, implementation: str = "native") -> bool:
    """Whether `grads` has neither NaN nor infinity; stops at the first. Arguments and errors: `finite_rows`."""
    checks.check_implementation("all_finite", implementation)
    checks.check_matrix("all_finite", "grads", grads)
    return native.all_finite(grads) if implementation == "native" else reference.all_finite(grads)
