"""The bench case `scheduler`: its lines, and that it leaves the stages as they were. No times are compared."""

from __future__ import annotations

import json

import pytest

from nestpipe_kernels.cli.main import main
from nestpipe_kernels.stages.registry import STAGE_FUNCTIONS

pytest.importorskip("nestpipe_kernels.bench.scheduler", reason="the suite comes with the installed package")


def test_a_line_for_empty_and_for_real_stages_of_one_and_two_ranks(capsys, tmp_path):
    before = dict(STAGE_FUNCTIONS)
    small = ["--batch", "6", "--micro-batches", "3", "--tables", "2", "--repeat", "4", "--threads", "1"]
    assert main(["bench", "scheduler", *small, "--separate-stores", "--json", str(tmp_path / "lines")]) == 0
    assert before == STAGE_FUNCTIONS
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()] == lines
    assert [(line["shape"]["ranks"], line["impl"]) for line in lines] == [
        (ranks, impl) for ranks in (1, 2) for impl in ("empty stages", "nested")
    ]
    for line in lines:
        assert line["shape"]["stores"] == 2
        assert ("stage_ms" in line) == (line["impl"] == "nested")
    assert {"route", "forward_backward", "write_back", "commit"} <= set(lines[-1]["stage_ms"])
