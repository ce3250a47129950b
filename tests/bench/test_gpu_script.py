"""bench/gpu/run.sh, run whole against the stand-in device: every part is there, failures are told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import on_device_runs as cases
import pytest

from gloo_world import GlooWorld
from nestpipe_kernels.cli.bench import DEVICE_CASES

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[2]


def run_script(library: Path, out: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "OUT": str(out), "PYTHON": f"{sys.executable} {ROOT / 'tests' / 'stand_in_python.py'}",
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT / "tests")]), "DEVICE": "npu",
        "STAND_IN_LIBRARY": str(library), "SCALE": "1e-5", "REPEAT": "1", "WHEELS": str(out), **changes,
    }  # fmt: skip
    command = ["bash", str(ROOT / "bench" / "gpu" / "run.sh")]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.soak
def test_soak_emulated_cuda_script_for_a_gpu(emulated_library: Path, tmp_path: Path) -> None:
    done = run_script(emulated_library, tmp_path, TESTS="tests/device/test_cuda_device.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all parts passed" in done.stdout
    assert "11 passed" in (tmp_path / "tests.txt").read_text()
    assert "stand-in" in (tmp_path / "machine.txt").read_text()
    lines = [json.loads(line) for line in (tmp_path / "benches.jsonl").read_text().splitlines()]
    assert {line["case"] for line in lines} == set(DEVICE_CASES)


def test_markers_are_known_without_plugins() -> None:
    """On a machine with a GPU there may be none, and a marker that pytest does not know ends it."""
    listed = re.search(r"^markers = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed is not None
    known = {"parametrize", "skipif", "skip", "xfail", "usefixtures", "filterwarnings"}
    known |= set(re.findall(r'"(\w+): ', listed[1]))
    used = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"pytest\.mark\.(\w+)", path.read_text(encoding="utf-8"))
    }
    assert used <= known


@pytest.mark.soak
def test_soak_emulated_cuda_script_tells_what_failed(emulated_library: Path, tmp_path: Path) -> None:
    done = run_script(emulated_library, tmp_path, TESTS="tests/device/test_that_is_not_there.py")
    assert done.returncode == 1 and "failed: tests\n" in done.stdout
    done = run_script(emulated_library, tmp_path, DEVICE="npu:7")
    assert done.returncode == 1 and "failed: device: there is nothing to measure on" in done.stdout
    assert "device 'npu:7' is not here" in (tmp_path / "device.txt").read_text()


def test_emulated_cuda_calls_for_compute_sanitizer(emulated_library: Path) -> None:
    world = GlooWorld(1)
    world.call(cases.use_cuda_kernels, str(emulated_library))
    code, _, messages = world.call(cases.small_calls, "--device", "npu", "--sizes", "1", "63")
    world.close()
    assert code == 0 and messages == ""
