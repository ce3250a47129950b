"""Checkpoints: a directory of tensor files and a manifest written last; `save` and `load` of a whole training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import load, save
    from .report import LoadReport

__all__ = ["LoadReport", "load", "save"]

_HOMES = {"LoadReport": "report", "load": "api", "save": "api"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
