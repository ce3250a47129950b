"""`nestpipe checkpoint verify`: every problem is named, in every file, and nothing else."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from tool_cases import change_bit, rewrite, run, save_world

from nestpipe_kernels.checkpoint.files import TensorFileWriter, open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.tools import verify as module
from nestpipe_kernels.checkpoint.tools.text import Progress, size

ROWS = "g00000001-t000-r00000-p000.safetensors"


@pytest.mark.parametrize("world", [1, 3])
def test_a_whole_checkpoint(tmp_path, capsys, world: int) -> None:
    save_world(tmp_path, world, admission="exact")
    code, out, error = run(capsys, "verify", tmp_path)
    assert code == 0 and error == ""
    files = list(tmp_path.glob("[gm]*"))
    assert len(files) == 5 * world + 2
    told = f"{len(files)} files as written, {size(sum(file.stat().st_size for file in files))} read "
    assert out.startswith(f"{tmp_path}: {told}")
    assert f", {len(files)} files, {told.split(', ')[1].removesuffix(' read ')}" in run(capsys, "inspect", tmp_path)[1]


def test_all_problems_are_named(tmp_path, capsys) -> None:
    save_world(tmp_path, 2)
    with open_tensor_file(tmp_path / ROWS) as file:
        places = {name: region.offset for name, region in file.regions.items()}
    change_bit(tmp_path / ROWS, places["embedding"] + 5)
    change_bit(tmp_path / ROWS, places["state.exp_avg_sq"] + 7)
    change_bit(tmp_path / "g00000001-dense.safetensors", 12)
    os.unlink(tmp_path / "g00000001-r00001.safetensors")
    with (tmp_path / "g00000001-t001-r00000-p000.safetensors").open("ab") as file:
        file.truncate(100)
    code, out, _ = run(capsys, "verify", tmp_path)
    lines = out.splitlines()
    assert code == 1 and len(lines) == 6
    for word in (
        "'embedding' is damaged: its SHA-256 must be",
        "'state.exp_avg_sq' is damaged",
        "its header is not the one",
    ):
        assert sum(word in line for line in lines) == 1, out
    assert any("g00000001-r00001.safetensors is missing" in line for line in lines)
    assert any("g00000001-t001-r00000-p000.safetensors must have" in line and "got 100" in line for line in lines)
    assert "5 problems in 4 of 10 files" in lines[-1]


def test_every_flipped_bit_is_found(tmp_path, capsys) -> None:
    """Sampled over all files, the manifest included."""
    save_world(tmp_path, 2, admission="filter")
    random.seed(7)
    for path in sorted(tmp_path.glob("[gm]*")):
        for at in random.sample(range(path.stat().st_size), 3):
            change_bit(path, at)
            code, out, error = run(capsys, "verify", tmp_path)
            assert code == 1 and path.name in out + error, (path.name, at)
            change_bit(path, at)
    assert run(capsys, "verify", tmp_path)[0] == 0


@pytest.mark.parametrize("fault", ["swapped", "twice", "strange"])
def test_rows_that_a_writer_got_wrong(tmp_path, capsys, monkeypatch, fault: str) -> None:
    """Digests are right, order or owner is not; also where the pieces that are read meet."""
    save_world(tmp_path, 2)
    monkeypatch.setattr(module, "KEYS_AT_ONCE", 10)
    with open_tensor_file(tmp_path / ROWS) as file:
        tensors = {name: file.read(name) for name in file.regions}
    keys = tensors["keys"]
    if fault == "swapped":
        keys[[9, 10]] = keys[[10, 9]]
    elif fault == "twice":
        keys[10] = keys[9]
    else:
        with open_tensor_file(tmp_path / ROWS.replace("r00000", "r00001")) as file:
            other = file.read("keys")
        last = int(keys[-1])
        keys[-1] = _later(keys, other)
        assert int(keys[-1]) != last
    with TensorFileWriter(tmp_path / ROWS, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        record = writer.close()
    rewrite(tmp_path, lambda manifest: manifest.files.update({ROWS: record}))
    code, out, _ = run(capsys, "verify", tmp_path)
    expected = "does not belong into the file of rank 0 for slices 0 to 32767"
    if fault != "strange":
        expected = "rows must ascend by (index shard, key), got key"
    assert code == 1 and expected in out and ROWS in out and "1 problem in 1 of" in out


def _later(keys: torch.Tensor, others: torch.Tensor) -> int:
    """One of `others` that may follow the rows before the last of `keys`."""
    from nestpipe_kernels.checkpoint.tools.hashing import hash_keys, hash_name, shards_of

    def order(values: torch.Tensor) -> np.ndarray:
        return shards_of(hash_keys(hash_name("user"), values.numpy())).astype(int)

    last = order(keys[-2:-1])[0]
    return int(others[int(np.argmax(order(others) > last))])


def test_leftovers_are_mentioned_and_do_no_harm(tmp_path, capsys) -> None:
    save_world(tmp_path, 1)
    (tmp_path / "g00000002-t000-r00000-p000.safetensors.tmp").write_bytes(b"x" * 1500)
    (tmp_path / "g00000002-dense.safetensors").write_bytes(b"x" * 500)
    (tmp_path / "manifest.json.tmp").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("not ours")
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 0
    assert out.splitlines()[0] == (
        "beside it: 3 files of an unfinished save (generation 2, 2 kB); they do no harm, the next save removes them"
    )
    assert "beside it: 3 files of an unfinished save (generation 2, 2 kB)" in run(capsys, "inspect", tmp_path)[1]


@pytest.mark.parametrize("tool", ["inspect", "verify", "reshard", "diff"])
@pytest.mark.parametrize("case", ["nothing", "empty", "file", "manifest", "unfinished", "newer", "damaged", "other"])
def test_what_is_no_checkpoint(tmp_path, capsys, tool: str, case: str) -> None:
    path = tmp_path / "a"
    if case != "nothing":
        path.mkdir()
    if case == "file":
        path = tmp_path / "a" / "x"
        path.write_text("x")
    elif case == "unfinished":
        (path / "g00000001-dense.safetensors.tmp").write_bytes(b"x" * 10)
    elif case in ("newer", "damaged", "manifest"):
        save_world(path, 1)
        if case == "newer":
            text = (path / "manifest.json").read_text().replace('"version":1', '"version":2')
            (path / "manifest.json").write_text(text)
        elif case == "damaged":
            change_bit(path / "manifest.json", 60)
        else:
            path = path / "manifest.json"
    elif case == "other":
        (path / "manifest.json").write_text("{}\n")
    expected = {
        "nothing": f"there is no directory {path}; check the path",
        "empty": f"{path} has no manifest.json: it is no checkpoint, or was emptied; check the path",
        "file": f"{path} must be the directory of a checkpoint, got a file",
        "manifest": f"got a file; give {path.parent}",
        "unfinished": "only 1 file of an unfinished save (generation 1, 10 B): its first save did not get to its end",
        "newer": "is of format version 2, this package reads versions up to 1: upgrade nestpipe_kernels",
        "damaged": "manifest.json",
        "other": "is no manifest: its field 'format' must be 'nestpipe-checkpoint'",
    }
    more = {"reshard": ["--ranks", "2", "--out", tmp_path / "out"], "diff": [path]}.get(tool, [])
    code, _, error = run(capsys, tool, path, *more)
    assert code == 1 and error.count("\n") == 1
    assert error.startswith("nestpipe checkpoint: ") and expected[case] in error


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind the superuser")
def test_no_permission(tmp_path, capsys) -> None:
    save_world(tmp_path, 1)
    (tmp_path / ROWS).chmod(0)
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1 and "Permission denied" in out and ROWS in out


def test_a_system_error_is_one_problem_among_others(tmp_path, capsys, monkeypatch) -> None:
    save_world(tmp_path, 1)
    real = os.open

    def refuse(path, *arguments, **settings):
        if str(path).endswith(ROWS):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **settings)

    monkeypatch.setattr(os, "open", refuse)
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1 and "1 problem in 1 of" in out
    assert ROWS in out and "Permission denied" in out and "change the permissions" in out


def test_progress_tells_bytes_and_rate(monkeypatch) -> None:
    lines: list[str] = []
    clock = iter([0.0, 2.0, 5.5, 5.5, 6.0, 11.0, 11.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter = Progress("verify", 4_000_000_000, lines.append)
    for _ in range(4):
        meter.add(500_000_000)
    assert lines == [
        "verify: 1 GB of 4 GB in 5.5 s, 182 MB/s",
        "verify: 2 GB of 4 GB in 11.0 s, 182 MB/s",
    ]
    assert meter.rate() == "in 20.0 s, 100 MB/s"


def test_manifest_has_no_reference_to_the_directory(tmp_path, capsys) -> None:
    """A checkpoint can be moved."""
    save_world(tmp_path / "a", 1)
    os.rename(tmp_path / "a", tmp_path / "b")
    assert run(capsys, "verify", tmp_path / "b")[0] == 0
    assert Manifest.load(tmp_path / "b").world_size == 1
