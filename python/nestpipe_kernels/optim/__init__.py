"""Settings of the row updates, and the torch-like group that learning-rate schedulers drive."""

from __future__ import annotations

from .group import SparseOptimizerGroup
from .settings import SGD, Adagrad, Adam, RowWiseAdagrad

__all__ = ["SGD", "Adagrad", "Adam", "RowWiseAdagrad", "SparseOptimizerGroup"]
