"""examples/train_dlrm.py runs, alone and under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_dlrm.py"
SMALL = ["--steps", "11", "--batch-size", "32"]


def test_alone(tmp_path: Path) -> None:
    timeline = tmp_path / "step.html"
    command = [sys.executable, str(SCRIPT), *SMALL, "--timeline", str(timeline)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["0", "10"]
    assert timeline.stat().st_size > 1000


@pytest.mark.multiprocess
def test_under_torchrun(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*run, str(SCRIPT), *SMALL], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["0", "10"]
