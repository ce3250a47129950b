"""Saving, loading and the tools take at most 64 MiB beyond the rows, however large a table is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 64 << 20


@pytest.mark.soak
@pytest.mark.parametrize("operation", ["save", "load", "reshard", "diff", "verify"])
def test_extra_memory_of_a_large_table(tmp_path, operation) -> None:
    program = Path(__file__).with_name("memory_program.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NESTPIPE_THREADS": "2"}

    def run(what: str) -> int:
        done = subprocess.run(
            [sys.executable, program, what, tmp_path / "saved"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    extra = run("save")
    assert sum(path.stat().st_size for path in (tmp_path / "saved").iterdir()) > 300 << 20
    for step in {"save": [], "load": ["load"], "reshard": ["reshard"]}.get(operation, ["reshard", operation]):
        extra = run(step)
    print(f"{operation}: {extra / 2**20:.1f} MiB extra")
    assert extra < LIMIT
