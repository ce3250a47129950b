"""Initial values of embedding rows: functions of (seed, table name, key, element) alone, on any machine."""

from __future__ import annotations

from .distributions import Constant, Initializer, Normal, Uniform, Zeros

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "Zeros"]
