"""The blocks of docs/loops.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "loops.md").read_text(encoding="utf-8")


def test_every_block_runs(capsys) -> None:
    first, *others = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(first, "docs/loops.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) == 4
    for block in others:
        exec(compile(block, "docs/loops.md", "exec"), dict(names))
    assert len(others) >= 7


@pytest.mark.parametrize("name", re.findall(r"`(test_\w+\.py|tests/[\w/]+\.py)`", PAGE))
def test_it_names_tests_that_exist(name: str) -> None:
    root = Path(__file__).resolve().parents[2]
    assert (root / name).exists() or (root / "tests" / "pipeline" / name).exists()
