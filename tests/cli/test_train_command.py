"""`nestpipe train` on real and made-up data: result check, table, files; and that the check can fail."""

from __future__ import annotations

import dataclasses
import json
import os
import re

import pytest
import torch

from nestpipe_kernels import optim
from nestpipe_kernels.cli.main import main
from nestpipe_kernels.cli.options import OPTIMIZERS, TrainOptions
from nestpipe_kernels.cli.snapshot import Snapshot, TableRows, first_difference
from nestpipe_kernels.cli.train import make_optimizer
from nestpipe_kernels.cli.training import TrainingRun

SMALL = ["--steps", "4", "--batch-size", "24", "--dim", "8", "--micro-batches", "3"]


@pytest.mark.parametrize("schedule", ["dbp", "fwp", "nested"])
def test_compare_says_identical(capsys, schedule: str) -> None:
    assert main(["train", "--compare", "--schedule", schedule, "--optimizer", "adam", *SMALL]) == 0
    text = capsys.readouterr().out
    assert f"result: identical ({schedule} against sequential: losses of 4 steps" in text
    assert "sequential |" in text
    assert f"{schedule} " in text


def test_short_rows_on_the_wire_are_identical_too(capsys, monkeypatch) -> None:
    from nestpipe_kernels.cli import train

    losses = []

    def note(a: Snapshot, b: Snapshot) -> str | None:
        losses.append(b.losses)
        return first_difference(a, b)

    monkeypatch.setattr(train, "first_difference", note)
    for wires in ([], ["--row-wire", "int8"], ["--gradient-wire", "int8"]):
        assert main(["train", "--compare", *wires, *SMALL]) == 0
        assert "result: identical (nested against sequential: losses of 4 steps" in capsys.readouterr().out
    assert len({tuple(one.tolist()) for one in losses}) == 3


def test_early_send_is_identical_too(capsys) -> None:
    assert main(["train", "--compare", "--early-send", *SMALL]) == 0
    text = capsys.readouterr().out
    assert "result: identical (nested against sequential: losses of 4 steps" in text
    assert [line.split(" ")[0] for line in text.splitlines() if " | " in line] == [
        "schedule",
        "sequential",
        "nested+early",
    ]


@pytest.mark.parametrize(
    ("option", "value", "setting", "expected"),
    [
        ("--edge-share", "0.4", "edge_share", 0.4),
        ("--balance", "keys", "balance", "keys"),
        ("--owner-pooling", "all", "owner_pooling", True),
        ("--owner-pooling", "auto", "owner_pooling", "auto"),
        ("--owner-pooling", "history, item", "owner_pooling", ("history", "item")),
    ],
)
def test_settings_reach_both_schedules(capsys, monkeypatch, option, value, setting, expected) -> None:
    from nestpipe_kernels.cli import training

    given = []

    class Noted(training.NestedPipeline):
        def __init__(self, *arguments) -> None:
            given.append(arguments[3])
            super().__init__(*arguments)

    monkeypatch.setattr(training, "NestedPipeline", Noted)
    assert main(["train", "--compare", option, value, *SMALL]) == 0
    assert "result: identical (nested against sequential: losses of 4 steps" in capsys.readouterr().out
    assert [(config.schedule, getattr(config, setting)) for config in given] == [
        ("sequential", expected),
        ("nested", expected),
    ]


def test_the_number_of_micro_batches_can_be_left_to_measurement(capsys) -> None:
    settings = ["--micro-batches", "auto", "--steps", "24", "--emulate-accelerator", "8"]
    assert main(["train", *SMALL, *settings]) == 0
    text = capsys.readouterr().out
    assert re.search(r"nested: [1-9][0-9]* micro-batches chosen", text)
    assert "median ms of the last 8 steps" in text  # the first 16 were trials


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_can_be_chosen(capsys, optimizer: str) -> None:
    settings = ["--weight-decay", "0.01", *(["--momentum", "0.9"] if optimizer == "sgd" else [])]
    assert main(["train", "--optimizer", optimizer, *settings, *SMALL, "--steps", "2"]) == 0
    assert f"2 steps, {optimizer}, D 8" in capsys.readouterr().out


def test_optimizers_settings_reach_it() -> None:
    defaults = dict.fromkeys(TrainOptions.__dataclass_fields__)
    plain = {"momentum": 0.0, "nproc": 1, "compare": False}
    options = TrainOptions(**{**defaults, **plain, "optimizer": "adamw"})
    assert make_optimizer(options) == optim.AdamW()
    options = TrainOptions(**{**defaults, **plain, "optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1, "lr": 0.5})
    assert make_optimizer(options) == optim.SGD(lr=0.5, momentum=0.9, weight_decay=0.1)


def test_momentum_is_refused_where_the_optimizer_has_none(capsys) -> None:
    assert main(["train", "--optimizer", "adam", "--momentum", "0.9", *SMALL]) == 1
    assert "--momentum goes with --optimizer sgd, got adam" in capsys.readouterr().err


def test_stale_rows_differ_and_are_said_to(capsys) -> None:
    assert main(["train", "--compare", "--schedule", "async", *SMALL, "--lr", "0.5"]) == 0
    assert (
        "result: differs, as stale rows do (async against sequential: rank 0: loss of step" in capsys.readouterr().out
    )


@pytest.mark.multiprocess
def test_two_ranks_compare_and_write_files(tmp_path, capfd) -> None:
    """Real processes over gloo, uneven last batches, both timelines with both ranks. The launcher is this process."""
    command = ["train", "--nproc", "2", "--timeout", "60", "--compare", *SMALL]
    files = ["--timeline", str(tmp_path / "step.json"), "--json", str(tmp_path / "result.json")]
    settings = ["--sparse-groups", "2", "--edge-share", "0.5"]
    assert main([*command, *files, *settings]) == 0
    assert "bit for bit on 2 ranks" in capfd.readouterr().out
    for name in ("step.json", "step.sequential.json"):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 1}
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["identical"] is True
    assert [len(run["losses"]) for run in result["schedules"]["nested"]] == [4, 4]
    assert {"versions", "cpu", "options"} <= set(result)
    assert (result["options"]["sparse_groups"], result["options"]["edge_share"]) == (2, 0.5)
    for run in result["schedules"]["nested"]:
        assert "replica" in " ".join(run["busy_ms"]), run["busy_ms"]  # both copies are there


@pytest.mark.multiprocess
def test_a_rank_that_fails_is_named(tmp_path, monkeypatch, capfd) -> None:
    """Rank 1 cannot read the data any more: the launcher names it, and the command ends."""
    program = tmp_path / "sitecustomize.py"
    program.write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import nestpipe_kernels.cli.training as training\n"
        "    def broken(*a, **k): raise ValueError('planted failure')\n"
        "    training.train_once = broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert main(["train", "--nproc", "2", "--timeout", "5", *SMALL]) == 1
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("rank 1 failed first: exited with code 1: nestpipe train: planted")


def test_criteo(capsys, criteo_sample) -> None:
    assert main(["train", "--data", f"criteo:{criteo_sample}", "--compare", *SMALL]) == 0
    assert "result: identical" in capsys.readouterr().out


def test_movielens(capsys, movielens_sample) -> None:
    assert main(["train", "--data", f"movielens:{movielens_sample}", "--compare", *SMALL]) == 0
    assert "result: identical" in capsys.readouterr().out


def test_whole_pass_over_movielens_100k(capsys, ml100k) -> None:
    """Sequential and nested agree to the last bit on a real data set."""
    arguments = ["--data", f"movielens:{ml100k}", "--compare", "--dim", "8", "--batch-size", "4096"]
    assert main(["train", *arguments]) == 0
    assert "result: identical (nested against sequential: losses of 25 steps" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- the check can fail


def _run() -> TrainingRun:
    rows = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    table = TableRows(
        torch.tensor([-5, 0, 9]), rows.view(torch.int32).clone(), 2, torch.tensor([3, 3, 2]), torch.tensor([1, 7, 1])
    )
    dense = {"top.weight": torch.tensor([[1.0, 2.0]]), "step": torch.tensor(4.0)}
    return TrainingRun("nested", torch.tensor([0.5, 0.25]), {}, [], 1.0, 2, Snapshot({"user": table}, dense))


def _flip(tensor: torch.Tensor, *index: int) -> None:
    """Change the last bit of one element."""
    view = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int64)
    view[index] ^= 1


def test_equal_runs_have_no_difference() -> None:
    assert first_difference(_run(), _run()) == ""


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda run: _flip(run.losses, 1), "loss of step 1: 0.25 and 0.25"),
        (lambda run: _flip(run.snapshot.tables["user"].bits, 2, 1), "table user: key 9: embedding[1] 9 and "),
        (lambda run: _flip(run.snapshot.tables["user"].bits, 1, 2), "table user: key 0: optimizer state[0] 6 and "),
        (lambda run: _flip(run.snapshot.tables["user"].bits, 0, 3), "table user: key -5: updates "),
        (lambda run: _flip(run.snapshot.tables["user"].last_used, 0), "table user: key -5: last_used 3 and 2"),
        (lambda run: _flip(run.snapshot.tables["user"].frequency, 1), "table user: key 0: frequency 7 and 6"),
        (
            lambda run: _flip(run.snapshot.tables["user"].keys, 2),
            "table user: 3 and 3 rows; only one of the two has key 8",
        ),
        (lambda run: _flip(run.snapshot.dense["top.weight"], 0, 1), "dense top.weight[0, 1]: 2 and 2"),
        (lambda run: run.snapshot.dense.pop("step"), "dense step: only one of the two has it"),
    ],
)
def test_one_changed_bit_is_named(change, words: str) -> None:
    other = _run()
    change(other)
    assert words in first_difference(_run(), other)


def test_a_scalar_s_last_bit_is_seen() -> None:
    other = _run()
    other.snapshot.dense["step"] = torch.tensor(4.0000005)
    assert "dense step" in first_difference(_run(), other)


def test_numbers_of_steps_are_compared() -> None:
    assert first_difference(_run(), dataclasses.replace(_run(), losses=torch.zeros(3))) == "2 steps and 3 steps"


def test_a_difference_ends_with_code_1(capsys, monkeypatch) -> None:
    from nestpipe_kernels.cli import train

    monkeypatch.setattr(train, "first_difference", lambda a, b: "loss of step 2: 1 and 2")
    assert main(["train", "--compare", *SMALL]) == 1
    captured = capsys.readouterr()
    assert "result: DIFFERENT (nested against sequential)" in captured.out
    assert "ResultsDifferError: nested against sequential: rank 0: loss of step 2: 1 and 2" in captured.err
    assert "identical" not in captured.out


def test_without_speedup_the_reason_is_given() -> None:
    from types import SimpleNamespace

    from nestpipe_kernels.cli.report import explain

    def run(step_ms: float) -> TrainingRun:
        summary = {
            "step_ms": step_ms,
            "compute_ms": 5.0,
            "exposed_lookup_ms": 2.0,
            "exposed_communication_ms": 3.0,
            "busy_ms": {"compute": 5.0, "retrieval": 4.0},
        }
        return dataclasses.replace(_run(), summary=summary)

    options = SimpleNamespace(schedule="nested")
    slow = explain(options, [[run(10.0)], [run(11.0)]])
    assert slow[0].startswith("nested is not faster here: 50 % of sequential's step waits for lookups and exchanges")
    assert "4.0 ms of CPU work" in slow[0]
    assert explain(options, [[run(10.0)], [run(9.0)]]) == []
