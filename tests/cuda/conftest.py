"""The compiled CUDA sources, once per test process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import emulated_cuda as emulated
import pytest
from emulated_cuda import EmulatedCuda

SEEDS = [1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 9))]


@pytest.fixture(scope="session")
def emulated_objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Object files of the extension, the emulator included."""
    return emulated.build(tmp_path_factory.mktemp("emulated_cuda"))


@pytest.fixture(scope="session")
def emulated_library(emulated_objects: list[Path]) -> Path:
    """They linked, as a Python extension."""
    return emulated.link(emulated_objects, emulated_objects[0].with_name("_cuda.so"), "-shared")


@pytest.fixture(scope="session")
def emulated_extension(emulated_library: Path) -> EmulatedCuda:
    """That loaded, for all tests of the process."""
    return EmulatedCuda(emulated_library)


@pytest.fixture(params=SEEDS)
def cuda(request: pytest.FixtureRequest, emulated_extension: EmulatedCuda) -> Iterator[EmulatedCuda]:
    """The extension with an order of threads drawn from a seed; `ops.<op>.cuda` take it for tensors of the CPU."""
    emulated_extension.schedule(request.param)
    with emulated_extension.used_for():
        yield emulated_extension
    emulated_extension.schedule(1)
