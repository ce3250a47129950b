"""The worked example of docs/guide.md prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")


def test_the_example_of_a_bounded_table(tmp_path: Path) -> None:
    section = GUIDE[GUIDE.index("## Bounding a table") :]
    found = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", section, re.DOTALL)
    assert found is not None
    (tmp_path / "example.py").write_text(found[1])
    command, env = [sys.executable, "example.py"], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == found[2]
