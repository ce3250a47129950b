"""The examples of whole loops: as they were and through the pipeline they print the same losses; two lines change."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from third_party import library

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def losses(monkeypatch, capsys, script: str, *arguments: str) -> list[float]:
    """In this process: importing torch and its compiler anew takes longer than both loops."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return [float(value) for value in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]


@pytest.mark.parametrize("script", ["plain_loop.py", "lightning_loop.py"])
def test_it_trains_as_before(monkeypatch, capsys, script: str) -> None:
    if script == "lightning_loop.py":
        library("pytorch_lightning")
    small = ("--batch-size", "1024")
    before = losses(monkeypatch, capsys, script, "--plain", *small)
    after = losses(monkeypatch, capsys, script, *small)
    assert len(after) >= 4 and after == pytest.approx(before, abs=3e-5)


@pytest.mark.parametrize("script", ["plain_loop.py", "lightning_loop.py"])
def test_two_lines_of_the_loop_change(script: str) -> None:
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    assert len(re.findall(r"# changed: was ", text)) == 2
    assert f"python examples/{script}" in text
