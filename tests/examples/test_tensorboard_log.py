"""examples/tensorboard_log.py: what it hands to a writer, and what it says without TensorBoard."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nestpipe_kernels as nk

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "tensorboard_log.py"
SMALL = ["--steps", "3", "--batch-size", "16"]


class StandIn:
    """Of torch.utils.tensorboard's SummaryWriter."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def add_scalar(self, name: str, value: float, step: int) -> None:
        print("SCALAR", name, float(value), step)

    def close(self) -> None:
        print("CLOSED", self.directory)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the script as a program of its own, but in this process: torch takes longer to import than it to run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SMALL])

    def with_tensorboard(module: ModuleType | None) -> None:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return with_tensorboard


def test_every_step_is_written(run, capsys) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = StandIn  # type: ignore[attr-defined]
    run(module)
    out = capsys.readouterr().out
    scalars = [line.split()[1:] for line in out.splitlines() if line.startswith("SCALAR")]
    steps = {name: [step for n, _, step in scalars if n == name] for name, _, _ in scalars}
    assert set(map(tuple, steps.values())) == {("0", "1", "2")}
    assert {"loss", "nestpipe/rows_sent", "nestpipe/exposed_lookup_ms", "nestpipe/evicted_rows"} <= set(steps)
    assert any(name.startswith("nestpipe/table_rows/") for name in steps)
    assert f"CLOSED {Path('runs') / 'rank0'}" in out
    assert "rank 0: 3 steps; look at them with tensorboard --logdir runs" in out


def test_without_tensorboard_it_says_what_to_install(run) -> None:
    with pytest.raises(SystemExit) as ended:
        run(None)
    assert "this example writes TensorBoard logs, which needs a package: pip install tensorboard" in str(
        ended.value.code
    )


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
