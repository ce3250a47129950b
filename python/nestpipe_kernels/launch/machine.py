"""Versions and machine, as benchmarks and reports note them."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from nestpipe_kernels import __version__

__all__ = ["cpu_name", "facts", "version_of"]


def version_of(package: str) -> str | None:
    """Version of an installed distribution, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def facts() -> dict[str, Any]:
    """`versions` and `cpu`, for JSON lines."""
    import torch

    versions = {
        "nestpipe_kernels": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version_of("numpy"),
    }
    return {"versions": versions, "cpu": f"{cpu_name()}, {os.cpu_count()} cores"}
