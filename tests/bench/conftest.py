"""What the tests of the suite's cases share."""

from __future__ import annotations

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
