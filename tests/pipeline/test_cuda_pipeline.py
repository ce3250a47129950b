"""E1 and operations on a CUDA device: the bits of the CPU. On machines that have one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import npu_runs as cases
import pytest
import torch
from test_exactness import make, name_of
from test_npu import COVER, SHORT

sys.path.append(str(Path(__file__).parents[1] / "ops"))
operations = importlib.import_module("on_device_cases")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def deterministic() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("group", operations.GROUPS)
def test_cuda_operations_have_the_bits_of_the_cpu(group: str) -> None:
    assert operations.differences(group, "cuda") == []


@pytest.mark.parametrize("schedule", SHORT)
def test_cuda_pipeline_equals_sequential_on_the_device(schedule: str) -> None:
    assert cases.compare_on("cuda", SHORT[schedule], schedule) == ""


@pytest.mark.soak
@pytest.mark.parametrize("case", COVER, ids=map(name_of, COVER))
def test_soak_cuda_pipeline_equals_sequential_on_the_device(case) -> None:
    assert cases.compare_on("cuda", make(case, seed=COVER.index(case)), case["schedule"]) == ""
