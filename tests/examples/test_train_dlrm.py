"""examples/train_dlrm.py runs, alone and under torchrun."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_dlrm.py"
SMALL = ["--steps", "11", "--batch-size", "32"]


def test_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    """In this process; another one imports torch in the test below."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SMALL, "--timeline", "step.html"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["0", "10"]
    assert (tmp_path / "step.html").stat().st_size > 1000


@pytest.mark.multiprocess
def test_under_torchrun(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*run, str(SCRIPT), *SMALL], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["0", "10"]
