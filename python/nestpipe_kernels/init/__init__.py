"""Initial values of embedding rows: functions of (seed, table name, key, element) alone, on any machine."""

from __future__ import annotations

from .custom import Custom
from .distributions import Constant, Initializer, Normal, TruncatedNormal, Uniform, Zeros

__all__ = ["Constant", "Custom", "Initializer", "Normal", "TruncatedNormal", "Uniform", "Zeros"]
