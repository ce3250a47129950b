"""The extension of CUDA kernels on the CPU, under several orders of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_cuda import EmulatedCuda

SEEDS = [1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 9))]


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
