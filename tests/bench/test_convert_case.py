"""Case `convert`: its lines, and that a peer with other results is not timed."""

from __future__ import annotations

import json

import pytest

from nestpipe_kernels.cli.main import main

convert = pytest.importorskip("nestpipe_kernels.bench.convert", reason="the suite comes with the installed package")

SMALL = ["--rows", "300", "--dim", "8", "--batch", "16", "--repeat", "1", "--peers"]


def test_lines_of_a_shape(capsys) -> None:
    assert main(["bench", "convert", *SMALL, "--shapes", "bags"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["shape"]["name"], line["impl"]) for line in found] == [
        (name, one) for name in ("bags",) for one in ("nestpipe", "torch.nn sparse + SparseAdam")
    ]
    assert found[0]["shape"]["tables"] == 4 and convert.SHAPES == {
        "bags": (4, 20),
        "single": (16, 1),
        "criteo": (26, 1),
    }


def test_other_results_are_not_timed(capsys, monkeypatch) -> None:
    honest = convert._Loop.step
    monkeypatch.setattr(
        convert._Loop, "step", lambda self, ids, grad: honest(self, ids, grad.flip(0) if "torch" in self.name else grad)
    )
    assert main(["bench", "convert", *SMALL, "--shapes", "single"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "nothing was timed" in captured.err
