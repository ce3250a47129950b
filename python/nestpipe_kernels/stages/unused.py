"""Lookups that the loss does not depend on: their rows count as touched all the same, which some rules make felt."""

from __future__ import annotations

import warnings

from ..optim import SGD, Adagrad, RowWiseAdagrad
from ..types import RowStore, SparseOptimizer
from .state import RankState

__all__ = ["warn_of_unused"]


def warn_of_unused(rank: RankState, store: RowStore, module: str) -> None:
    """A UserWarning, once for each module, if the store's rule changes rows whose gradient is zero."""
    if module in rank.warned or not _moves_without_gradient(store.optimizer):
        return
    rank.warned.add(module)
    warnings.warn(
        f"no gradient came back to a lookup of {module!r} (under no_grad, detached, or its output unused): rows count "
        f"as touched, with gradient 0, and {type(store.optimizer).__name__} moves such rows by their moments or decay. "
        "If that is not wanted, look them up outside of the training step",
        UserWarning,
        stacklevel=2,
    )


def _moves_without_gradient(optimizer: SparseOptimizer) -> bool:
    plain = isinstance(optimizer, (SGD, Adagrad, RowWiseAdagrad)) and not getattr(optimizer, "momentum", 0.0)
    return not plain or bool(getattr(optimizer, "weight_decay", 0.0))
