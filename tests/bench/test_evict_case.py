"""The bench case `find_or_insert_evict`: its lines, streams, and what it refuses. No times are compared."""

from __future__ import annotations

import json

import pytest

from nestpipe_kernels.cli.main import main

pytest.importorskip("nestpipe_kernels.bench.evict", reason="the suite comes with the installed package")

SMALL = ["--rows", "2000", "--threads", "1"]


def test_lines_of_both_streams(capsys, tmp_path):
    stream = ["--keys", "50000", "--batch", "1000", "--dim", "4", "--repeat", "12"]
    assert main(["bench", "evict", *SMALL, *stream, "--json", str(tmp_path / "lines")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()] == lines
    assert [line["shape"]["stream"] for line in lines] == ["zipf"] * 3 + ["misses"] * 2
    room, same, evicting, _, misses = lines
    assert evicting["inserted"] == same["inserted"] > room["inserted"]
    assert evicting["evicted"] > 0
    assert misses["inserted"] == 12 * 1000
    assert room["mean_over_room"] == room["cpu_over_room"] == 1.0


def test_a_stream_that_never_fills_the_table_is_refused(capsys):
    assert main(["bench", "evict", *SMALL, "--keys", "3", "--batch", "4", "--dim", "1"]) != 0
    assert "bench evict: 4096 batches hold 3 keys, too few for 2000 rows" in capsys.readouterr().err
