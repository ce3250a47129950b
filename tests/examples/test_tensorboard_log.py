"""examples/tensorboard_log.py: what it hands to a writer, and what it says without TensorBoard."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nestpipe_kernels as nk

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "tensorboard_log.py"
SMALL = ["--steps", "3", "--batch-size", "16"]
STAND_IN = """
class SummaryWriter:
    def __init__(self, directory):
        self.directory = directory

    def add_scalar(self, name, value, step):
        print("SCALAR", name, float(value), step)

    def close(self):
        print("CLOSED", self.directory)
"""
"""Of torch.utils.tensorboard, run before the script."""


def run(tmp_path: Path, before: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys, types\n{before}\nimport runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    command, env = [sys.executable, "-c", program, *SMALL], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)


def test_every_step_is_written(tmp_path: Path) -> None:
    before = f"m = types.ModuleType('torch.utils.tensorboard')\nexec({STAND_IN!r}, m.__dict__)\nimport torch.utils\n"
    done = run(tmp_path, before + "sys.modules['torch.utils.tensorboard'] = m")
    assert done.returncode == 0, done.stderr
    scalars = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("SCALAR")]
    steps = {name: [step for n, _, step in scalars if n == name] for name, _, _ in scalars}
    assert set(map(tuple, steps.values())) == {("0", "1", "2")}
    assert {"loss", "nestpipe/rows_sent", "nestpipe/exposed_lookup_ms", "nestpipe/evicted_rows"} <= set(steps)
    assert any(name.startswith("nestpipe/table_rows/") for name in steps)
    assert f"CLOSED {Path('runs') / 'rank0'}" in done.stdout
    assert "rank 0: 3 steps; look at them with tensorboard --logdir runs" in done.stdout


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path) -> None:
    done = run(tmp_path, "sys.modules['torch.utils.tensorboard'] = None")
    assert done.returncode == 1
    assert "this example writes TensorBoard logs, which needs a package: pip install tensorboard" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_callback_alone() -> None:
    spec = importlib.util.spec_from_file_location("tensorboard_log", SCRIPT)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    written: list[tuple[str, float, int]] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

    numbers: dict[str, Any] = dict.fromkeys(nk.StepCounters.__dataclass_fields__, 2) | {"step": 7, "table_rows": {}}
    example.CounterLog(Writer())(nk.StepCounters(**numbers))
    assert ("nestpipe/kept_rows", 2.0, 7) in written
    assert len(written) == len(numbers) - 3
