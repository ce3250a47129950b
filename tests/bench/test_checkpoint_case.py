"""Case `checkpoint` of the suite: lines as documented, nothing left behind; and what it measures the disk with."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from nestpipe_kernels.cli.main import main

case = pytest.importorskip("nestpipe_kernels.bench.checkpoint", reason="the suite comes with the installed package")
disk = pytest.importorskip("nestpipe_kernels.bench.disk")

SMALL = ["--rows", "3000", "--dim", "4", "--repeat", "2"]


def test_lines_have_every_field(capsys, tmp_path) -> None:
    (tmp_path / "files").mkdir()
    path = tmp_path / "lines.jsonl"
    arguments = [*SMALL, "--directory", str(tmp_path / "files"), "--json", str(path)]
    assert main(["bench", "checkpoint", *arguments]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(text) for text in path.read_text().splitlines()] == lines
    assert [line["impl"] for line in lines] == [
        "nestpipe save", "disk write", "disk read", "nestpipe load", "disk copy", "nestpipe reshard"
    ]  # fmt: skip
    common = {"case", "shape", "impl", "dtype", "threads", "median_ms", "p20_ms", "p80_ms", "cpu_ms", "gb_per_s"}
    for line in lines:
        more = {
            "nestpipe save": "fraction_of_disk",
            "nestpipe load": "fraction_of_disk",
            "nestpipe reshard": "times_copy",
        }
        assert set(line) == common | {"versions", "cpu"} | ({more[line["impl"]]} if line["impl"] in more else set())
        assert line["shape"]["bytes"] > 3000 * (8 + 16 + 4 + 20) and line["shape"]["ranks"] == 4
        assert 0 < line["p20_ms"] <= line["median_ms"] <= line["p80_ms"]
    assert list((tmp_path / "files").iterdir()) == []


def test_parts_of_it(capsys, tmp_path) -> None:
    assert main(["bench", "checkpoint", *SMALL, "--directory", str(tmp_path), "--only", "load"]) == 0
    names = [json.loads(line)["impl"] for line in capsys.readouterr().out.splitlines()]
    assert names == ["nestpipe save", "disk write", "disk read", "nestpipe load"]


def test_too_little_room(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(case.shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    assert main(["bench", "checkpoint", *SMALL, "--directory", str(tmp_path)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"GB free in {tmp_path}, got 0.0 GB; give fewer --rows or another --directory" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 1, disk.BLOCK, disk.BLOCK + 5])
def test_plain_files(tmp_path, size: int) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert disk.write_files(tmp_path / "a", [size, 3]) > 0
    files = sorted((tmp_path / "a").iterdir())
    assert [path.stat().st_size for path in files] == [size, 3]
    assert disk.read_files(files) > 0 and disk.copy_files(files, tmp_path / "b") > 0
    assert [(tmp_path / "b" / path.name).read_bytes() for path in files] == [path.read_bytes() for path in files]


def test_a_warm_cache_is_told(tmp_path, monkeypatch) -> None:
    """Only a system that was asked to forget may have forgotten."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    (tmp_path / "empty").touch()
    if disk.cached_share([path]) is None:
        pytest.skip("this system does not tell which pages are in memory")
    assert disk.cached_share([path, tmp_path / "empty"]) == 1.0
    assert disk.cached_share([]) == 0.0
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: None, raising=False)
    assert disk.drop_from_cache([path]) is False
    monkeypatch.setattr(disk, "cached_share", lambda paths: disk.COLD)
    assert disk.drop_from_cache([path]) is True
    monkeypatch.setattr(disk, "cached_share", lambda paths: None)
    assert disk.drop_from_cache([path]) is None
