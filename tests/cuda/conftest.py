"""The compiled CUDA sources, once per test process."""

from __future__ import annotations

from pathlib import Path

import emulated_cuda as emulated
import pytest


@pytest.fixture(scope="session")
def emulated_objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Object files of the .cu sources and the harness."""
    return emulated.compile_all([*emulated.SOURCES, *emulated.HARNESS], tmp_path_factory.mktemp("emulated_cuda"))


@pytest.fixture(scope="session")
def emulated_library(emulated_objects: list[Path]) -> Path:
    """They linked, for ctypes."""
    return emulated.link(emulated_objects, emulated_objects[0].with_name("emulated.so"), "-shared")
