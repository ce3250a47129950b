"""`nestpipe train --device` on the stand-in for an accelerator, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe_kernels.cli.main import main

SMALL = ["--steps", "3", "--batch-size", "8", "--dim", "8", "--micro-batches", "2"]
CODE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import fake_npu, torch
from nestpipe_kernels.cli.main import main
fake_npu.install()
code = main(sys.argv[1:])
print(torch.npu.current_stream()._entered, "operations of the device")
sys.exit(code)
"""


def train(*arguments: str) -> str:
    command = [sys.executable, "-c", CODE, str(Path(__file__).parents[1]), "train", "--device", "npu", "--compare"]
    done = subprocess.run([*command, *SMALL, *arguments], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(text: str) -> None:
    assert "result: identical (nested against sequential: losses of 3 steps" in text
    assert int(text.splitlines()[-1].split()[0]) > 100


def test_a_model_of_features() -> None:
    check(train("--optimizer", "adam"))


@pytest.mark.parametrize("model", ["hstu", pytest.param("fuxi", marks=pytest.mark.soak)])
def test_a_model_of_sequences(ml100k, model: str) -> None:
    check(train("--model", model, "--data", f"movielens:{ml100k}"))


@pytest.mark.parametrize(
    ("device", "message"),
    [("gpu", "unknown device 'gpu'; expected 'cpu', 'cuda'"), ("npu", "--device: device 'npu' needs torch_npu")],
)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_device_that_is_not_here(capsys, device: str, message: str, ranks: str) -> None:
    assert main(["train", "--device", device, "--nproc", ranks, *SMALL]) == 1
    assert message in capsys.readouterr().err
