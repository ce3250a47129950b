"""What a store keeps of a retrieval, to take it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Journal"]


@dataclass
class Journal:
    """What undo needs beside handles and status."""

    native: Any
    removals: int
    """Erasing calls of the store before the retrieval; undo is refused after another."""
