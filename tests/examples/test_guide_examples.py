"""The worked example of docs/guide.md prints what the page says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")


def test_the_example_of_a_bounded_table(tmp_path: Path, monkeypatch, capsys) -> None:
    """In this process: importing torch anew takes longer than the example."""
    section = GUIDE[GUIDE.index("## Bounding a table") :]
    found = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", section, re.DOTALL)
    assert found is not None
    (tmp_path / "example.py").write_text(found[1])
    monkeypatch.chdir(tmp_path)
    runpy.run_path("example.py", run_name="__main__")
    assert capsys.readouterr().out == found[2]
