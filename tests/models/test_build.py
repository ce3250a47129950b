"""The factory: tables and sizes follow from the data set; unknown names are refused."""

from __future__ import annotations

from typing import Any

import pytest

from nestpipe_kernels.data import SyntheticConfig, SyntheticDataset
from nestpipe_kernels.models import build

DATA = SyntheticDataset(SyntheticConfig(num_dense=3))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hstu", r"model hstu is not available yet: choose dlrm"),
        ("fuxi", r"model fuxi is not available yet: choose dlrm"),
        ("nope", r"unknown model 'nope': choose dlrm"),
    ],
)
def test_unknown_models(name: str, message: str) -> None:
    optimizer: Any = None
    with pytest.raises(ValueError, match=message):
        build(name, DATA, optimizer)
