"""`nestpipe` from the outside: help, one line on bad input, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nestpipe_kernels.cli.main import main


def _fails(capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and the only line that stderr got."""
    try:
        code = main(list(arguments))
    except SystemExit as error:
        code = error.code
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return code, text


@pytest.mark.parametrize(
    "command",
    [[], ["train"], ["doctor"], ["bench"], ["bench", "train_step"], ["checkpoint"], ["checkpoint", "reshard"]],
)
def test_every_command_has_help(capsys, command: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: nestpipe" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train", "--schedule", "magic"], "argument --schedule: invalid choice: 'magic'"),
        (["train", "--nproc", "0"], "argument --nproc: must be an integer >= 1, got '0'"),
        (["train", "--micro-batches", "x"], "argument --micro-batches: must be an integer >= 1, got 'x'; or auto"),
        (["train", "--lr", "nan"], "argument --lr: must be a finite number >= 0, got 'nan'"),
        (["train", "--timeout", "-1"], "argument --timeout: must be a finite number > 0, got '-1'"),
        (["train", "--optimizer", "lion"], "argument --optimizer: invalid choice: 'lion'"),
        (["train", "--edge-share", "0"], "argument --edge-share: must be a number > 0 and <= 1, got '0'"),
        (["train", "--edge-share", "nan"], "argument --edge-share: must be a number > 0 and <= 1, got 'nan'"),
        (
            ["bench", "pipeline", "--edge-share", "1.5"],
            "argument --edge-share: must be a number > 0 and <= 1, got '1.5'",
        ),
        (["train", "--owner-pooling", "a,,b"], "argument --owner-pooling: must be auto, all, or names of features"),
        (["train", "--sparse-groups", "0"], "argument --sparse-groups: must be an integer >= 1, got '0'"),
        (["bench", "everything"], "argument CASE: invalid choice: 'everything'"),
        (["checkpoint"], "the following arguments are required: TOOL"),
        (["checkpoint", "inspect"], "the following arguments are required: PATH"),
        (["checkpoint", "reshard", "x", "--ranks", "2"], "one of the arguments --out --in-place is required"),
        (
            ["checkpoint", "reshard", "x", "--ranks", "0", "--in-place"],
            "argument --ranks: must be an integer >= 1, got",
        ),
        (["checkpoint", "diff", "a", "b", "--metadata", "--embeddings-only"], "not allowed with argument --metadata"),
        (["bench", "train_step", "--zipf", "inf"], "argument --zipf: must be a finite number >= 0, got 'inf'"),
    ],
)
def test_bad_arguments_are_one_line(capsys, arguments: list[str], message: str) -> None:
    code, text = _fails(capsys, *arguments)
    assert code == 2
    assert message in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "movielens:/no/such/file"], "movielens: no such file: /no/such/file"),
        (["--data", "movielens"], "data movielens needs a path: movielens:PATH, got 'movielens'"),
        (["--data", "kuairand:x"], "data kuairand has sequences alone: choose model hstu or fuxi, or other data"),
        (["--data", "kuairand:/no/such", "--model", "fuxi"], "kuairand: no such file: /no/such"),
        (["--data", "netflix"], "unknown data 'netflix': choose one of synthetic, criteo:PATH, movielens:PATH"),
        (["--model", "hstu"], "data synthetic has no sequences: choose movielens:PATH or kuairand:PATH, or model dlrm"),
        (["--model", "fuxi", "--dim", "7"], "FuXi: embedding_dim must be a multiple of heads 2, got 7"),
        (["--model", "x"], "unknown model 'x': choose dlrm, hstu or fuxi"),
        (["--compare", "--schedule", "sequential"], "--compare runs `sequential` beside --schedule; choose dbp"),
        (["--timeline", "step.pdf"], "--timeline must end in .html, .json, .png, got 'step.pdf'"),
        (["--timeline", "no/such/folder/step.html"], "--timeline no/such/folder/step.html: there is no folder"),
        (["--json", "no/such/folder/x.json"], "--json no/such/folder/x.json: there is no folder"),
        (
            ["--row-transfer", "per_micro_batch", "--micro-batches", "64"],
            "--micro-batches must be <= 63 with per_micro_batch, got 64",
        ),
        (["--compare", "--micro-batches", "auto"], "--compare needs one number of micro-batches for both schedules"),
        (
            ["--owner-pooling", "all", "--early-send"],
            "--owner-pooling needs --row-transfer once, and goes with neither",
        ),
        (["--owner-pooling", "all", "--row-transfer", "per_micro_batch"], "--owner-pooling needs --row-transfer once"),
        (["--owner-pooling", "auto", "--sparse-groups", "2"], "goes with neither --early-send nor --sparse-groups"),
        (["--owner-pooling", "user,film"], "--owner-pooling: no feature 'film' in synthetic; there are user, item"),
        (["--early-send", "--sparse-groups", "2"], "--early-send does not go with --sparse-groups"),
        (["--sparse-groups", "3"], "sparse_groups: 3 groups do not divide the "),
        (["--early-send", "--schedule", "fwp"], "--early-send needs --schedule nested and --row-transfer once"),
    ],
)
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_bad_input_of_train_is_one_line(capsys, nproc: str, arguments: list[str], message: str) -> None:
    """Also with several ranks: found before any of them is started."""
    code, text = _fails(capsys, "train", "--nproc", nproc, *arguments)
    assert code == 1
    assert text.startswith("nestpipe train: ")
    assert message in text


def test_nproc_beside_torchrun_is_refused(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    code, text = _fails(capsys, "train", "--nproc", "2")
    assert code == 1
    assert "--nproc starts ranks itself; leave it out where torchrun has started them" in text


def test_too_few_samples_for_the_ranks(capsys, tmp_path) -> None:
    path = tmp_path / "one.inter"
    path.write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t2\t4\t10\n")
    code, text = _fails(capsys, "train", "--nproc", "2", "--data", f"movielens:{path}")
    assert code == 1
    assert "movielens has 1 samples, too few for 2 ranks" in text


def test_debug_shows_where(monkeypatch) -> None:
    monkeypatch.setenv("NESTPIPE_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown data"):
        main(["train", "--data", "netflix"])


def test_module_runs_as_the_console_script() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nestpipe_kernels", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("nestpipe_kernels ")


def test_doctor_finds_everything(capsys) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "FAIL" not in text
    for word in ("torch", "cores", "extension", "native (also reference):", "dedup", "gloo"):
        assert word in text


def test_doctor_reports_a_missing_extension(capsys, monkeypatch) -> None:
    from nestpipe_kernels import _native

    def missing() -> None:
        raise ImportError("no _core here; install a wheel")

    monkeypatch.setattr(_native, "core", missing)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "FAIL  extension    ImportError: no _core here; install a wheel" in text
