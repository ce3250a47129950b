"""The Triton operations under Triton's interpreter, in one process of its own: the bits of the references, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: no Triton kernel is tried")

HERE = Path(__file__).resolve().parent
SAME_BITS = [
    *(
        "all modes",
        "several segments of a mode",
        "weights",
        "one column",
        "aligned rows",
        "edges of a tile",
        "bfloat16",
    ),
    *("float16", "hot rows", "long bags", "ties and NaNs", "no work", "other tiles", "operator"),
    *("updates", "updates of aligned rows", "updates of short rows", "rounding"),
]


def interpreted(*names: str, timeout_s: int = 110) -> dict[str, list[str]]:
    """What the cases said, all or those named."""
    paths = [str(HERE), str(HERE.parent / "ops"), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", str(HERE / "triton_cases.py"), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What all cases said."""
    return interpreted()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["full blocks", "all modes, long", "weights, long", "updates, long"])
def test_soak_triton_gives_the_bits_of_the_reference(case):
    assert interpreted(case, timeout_s=590)[case] == []


@pytest.mark.parametrize("case", SAME_BITS)
def test_triton_gives_the_bits_of_the_reference(told, case):
    assert told[case] == []


def test_triton_cases_are_all_looked_at(told):
    assert set(told) == {*SAME_BITS, "bad input", "refused updates", "refused operator"}


def test_triton_refuses_what_others_refuse(told):
    assert told["bad input"] == [
        "IndexError: lookup_pool: slots must lie in [-1, 3) where -1 is padding, got 3 at position 1",
        "IndexError: lookup_pool: slots must lie in [-1, 3) where -1 is padding, got -2 at position 0",
        "ValueError: lookup_pool: bag_offsets must end at the number of slots (1), got 2",
        "TypeError: lookup_pool: rows must be float32, bfloat16 or float16, got float64 on cpu (shape [3, 2])",
        "ValueError: lookup_pool: rows must be contiguous along the last dimension, got strides [1, 3]; "
        "call .contiguous()",
        "ValueError: lookup_pool: pooling none needs exactly one occurrence per bag, got 2 in bag 0",
        "ValueError: lookup_pool: segment_modes must be 0 (sum), 1 (mean), 2 (max) or 3 (none), got 4 for segment 0",
        "ValueError: lookup_pool: gradients of weights need pooling sum or none",
    ]


def test_triton_does_not_round_stochastically(told):
    assert told["refused updates"] == [
        "row_update: implementation 'triton' cannot be used here: Triton's kernel does not round stochastically"
    ]


def test_triton_bags_on_a_device_are_checked_there(told):
    wrong = "lookup_pool: slots must lie in [-1, 9), offsets must ascend from 0 to 2"
    assert told["refused operator"] == [
        wrong,
        wrong,
        "lookup_pool: per-sample weights need pooling sum or none, got max for segment 0",
    ]
