"""Case `train_step` of the suite: lines as documented, results checked before anything is timed."""

from __future__ import annotations

import json

import pytest
import torch

from nestpipe_kernels.cli.main import main

train_step = pytest.importorskip(
    "nestpipe_kernels.bench.train_step", reason="the suite comes with the installed package"
)

SMALL = ["--tables", "2", "--rows", "500", "--dim", "8", "--batch", "16", "--bag", "5", "--repeat", "3"]


def _lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_line_has_every_field(capsys, tmp_path) -> None:
    path = tmp_path / "lines.jsonl"
    assert main(["bench", "train_step", *SMALL, "--json", str(path)]) == 0
    (line,) = _lines(capsys)
    assert set(line) == {
        "case", "shape", "impl", "dtype", "threads", "median_ms", "p20_ms", "p80_ms", "gb_per_s", "fraction_of_floor",
        "versions", "cpu",
    }  # fmt: skip
    assert (line["case"], line["impl"], line["dtype"]) == ("train_step", "nestpipe", "float32")
    assert 0 < line["p20_ms"] <= line["median_ms"] <= line["p80_ms"]
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "row_wise_adagrad", "adam"])
def test_torch_agrees_with_every_optimizer(capsys, optimizer: str) -> None:
    assert main(["bench", "train_step", *SMALL, "--peers", "--optimizer", optimizer]) == 0
    names = [line["impl"] for line in _lines(capsys)]
    assert names[:2] == ["nestpipe", f"torch.nn.EmbeddingBag sparse + {optimizer}"]


@pytest.mark.parametrize("optimizer", ["sgd", "row_wise_adagrad"])
def test_fbgemm_agrees(capsys, optimizer: str) -> None:
    pytest.importorskip("fbgemm_gpu")
    assert main(["bench", "train_step", *SMALL, "--peers", "--optimizer", optimizer]) == 0
    assert "fbgemm TBE" in [line["impl"] for line in _lines(capsys)]


def test_a_peer_that_computes_something_else_is_not_timed(capsys, monkeypatch) -> None:
    from nestpipe_kernels.bench.peers import TorchPeer

    honest = TorchPeer.step
    monkeypatch.setattr(TorchPeer, "step", lambda self, ids, grad: honest(self, ids, grad.flip(0)))
    assert main(["bench", "train_step", *SMALL, "--peers"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing was timed" in captured.err


def test_batches_are_zipf_and_spread() -> None:
    shape = train_step.Shape(1, 1000, 8, 64, 20, 1.05)
    ids = torch.cat(train_step.make_batches(shape, 0), 1)[0]
    counts = ids.bincount(minlength=1000)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 1000
    assert int(counts.max()) > 20 * counts.float().median()
    assert int(counts.argmax()) != 0
