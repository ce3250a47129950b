"""Which versions wrote a checkpoint; nothing reads it but people."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

__all__ = ["writer_facts"]


def writer_facts() -> dict[str, str]:
    """Versions of this package, torch and Python."""
    try:
        version = importlib.metadata.version("nestpipe_kernels")
    except importlib.metadata.PackageNotFoundError:
        version = "source"
    return {"nestpipe_kernels": version, "python": platform.python_version(), "torch": str(torch.__version__)}
