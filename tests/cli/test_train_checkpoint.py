"""`nestpipe train --checkpoint`: stopping and going on through the real command equals not having stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.cli.main import main
from nestpipe_kernels.errors import CheckpointError

SMALL = ["--batch-size", "24", "--dim", "8", "--micro-batches", "3", "--optimizer", "adam"]
COMMAND = [sys.executable, "-m", "nestpipe_kernels"]


def contents(directory: Path) -> dict[str, object]:
    """Digests of every tensor, and all else that the manifest says, whatever the generation."""
    manifest = Manifest.load(directory)
    files = {
        name.split("-", 1)[1]: {tensor: one.sha256 for tensor, one in record.tensors.items()}
        for name, record in manifest.files.items()
    }
    return {"files": files, "position": manifest.position, "dense": manifest.dense, "ranks": manifest.ranks}


def steps_of(directory: Path) -> int:
    """Steps of the last complete checkpoint, 0 if there is none."""
    try:
        return int(Manifest.load(directory).position["step_count"])
    except CheckpointError:
        return 0


def losses(path: Path) -> list[list[float]]:
    return [run["losses"] for run in json.loads(path.read_text())["schedules"]["nested"]]


def wait_for_end_of(argument: str) -> None:
    """Until no process has this argument on its command line."""
    end = time.monotonic() + 90
    while any(argument.encode() in command_line(pid) for pid in os.listdir("/proc") if pid.isdigit()):
        assert time.monotonic() < end, f"processes with {argument} do not end"
        time.sleep(0.05)


def command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def run(arguments: list[str], nproc: int, capfd) -> str:
    """Train; what was printed. One rank trains in this process: starting another takes far longer than 20 steps."""
    if nproc == 1:
        assert main(arguments) == 0
        return capfd.readouterr().out
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_fault_42_44_killed_and_continued_equals_one_run(tmp_path, capfd, nproc) -> None:
    arguments = ["train", *SMALL, "--nproc", str(nproc), "--timeout", "30", "--steps", "20", "--checkpoint"]
    run([*arguments, str(tmp_path / "whole"), "--json", str(tmp_path / "whole.json")], nproc, capfd)
    parts = [*arguments, str(tmp_path / "parts")]
    slowly = [*COMMAND, *parts, "--checkpoint-every", "4", "--emulate-accelerator", "200"]
    process = subprocess.Popen(
        slowly, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    end = time.monotonic() + 90
    while steps_of(tmp_path / "parts") < 8 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=30)
    wait_for_end_of(str(tmp_path / "parts"))  # ranks end when their launcher's pipe closes
    reached = steps_of(tmp_path / "parts")
    assert 8 <= reached < 20
    said = run([*parts, "--json", str(tmp_path / "parts.json")], nproc, capfd)
    assert f"continues from step {reached} (" in said
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
    assert [each[reached:] for each in losses(tmp_path / "whole.json")] == losses(tmp_path / "parts.json")


def test_a_run_that_ends_before_it_saves_leaves_no_directory(tmp_path, monkeypatch) -> None:
    from nestpipe_kernels.cli import train

    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train_once", interrupted)
    (tmp_path / "own").mkdir()
    for directory in ("new/deep", "own"):
        assert main(["train", *SMALL, "--steps", "1", "--checkpoint", str(tmp_path / directory)]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_more_steps_and_nothing_left_to_do(tmp_path, capsys) -> None:
    arguments = ["train", *SMALL, "--checkpoint", str(tmp_path / "c"), "--steps"]
    assert main([*arguments, "2"]) == 0
    assert main([*arguments, "2"]) == 0
    assert "is at step 2 already: nothing to do" in capsys.readouterr().out
    assert main([*arguments, "3"]) == 0
    assert "continues from step 2 (" in capsys.readouterr().out
    assert steps_of(tmp_path / "c") == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--optimizer", "sgd"], "was made with --optimizer adam, this run has --optimizer sgd"),
        (["--dim", "16"], "was made with --dim 8, this run has --dim 16"),
        (["--lr", "0.5"], "was made with --lr (default), this run has --lr 0.5"),
        (["--seed", "3"], "was made with --seed 0, this run has --seed 3"),
        (["--dense-lr", "0.5"], "was made with --dense-lr 0.001, this run has --dense-lr 0.5"),
    ],
)
def test_other_options_are_refused_with_both_values(tmp_path, capsys, changed, message) -> None:
    arguments = ["train", *SMALL, "--checkpoint", str(tmp_path), "--steps"]
    assert main([*arguments, "1"]) == 0
    before = contents(tmp_path)
    assert main([*arguments, "2", *changed]) == 1
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert contents(tmp_path) == before


def test_checkpoints_of_others_and_bad_directories(tmp_path, capsys) -> None:
    arguments = ["train", *SMALL, "--steps", "1", "--checkpoint"]
    assert main([*arguments, str(tmp_path), "--compare"]) == 1
    assert "--compare trains twice from the start" in capsys.readouterr().err
    assert main(["train", *SMALL, "--checkpoint-every", "2"]) == 1
    assert "--checkpoint-every needs --checkpoint DIR" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([*arguments, str(tmp_path / "file")]) == 1
    assert f"--checkpoint {tmp_path / 'file'}: {tmp_path / 'file'} is a file; give the path" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "file" / "below")]) == 1
    assert f"{tmp_path / 'file'} is a file; give the path of a directory" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text("{}\n")
    assert main([*arguments, str(tmp_path)]) == 1
    assert "manifest.json is no manifest" in capsys.readouterr().err
