"""What the tests of the suite's cases share."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch

from nestpipe_kernels._native import core


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """The cases set thread counts of the process."""
    of_torch, of_native = torch.get_num_threads(), core().num_threads()
    yield
    torch.set_num_threads(of_torch)
    core().set_num_threads(of_native)


@pytest.fixture(autouse=True)
def _known_floor(monkeypatch) -> None:
    """A machine of known rates; measuring them takes a second and much memory."""
    case = pytest.importorskip("nestpipe_kernels.bench.case", reason="the suite comes with the installed package")
    monkeypatch.setattr(case, "REST_S", 0.0)
    floor = importlib.import_module("nestpipe_kernels.bench.machine_floor").MachineFloor
    monkeypatch.setattr(
        case, "machine_floor", lambda threads, adjacent_lines: floor(threads, 1e10 * threads, 1e8 * threads)
    )
