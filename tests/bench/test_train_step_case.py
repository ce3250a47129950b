"""Cases `train_step` and `lookup_pool`: lines as documented, shapes, results checked before anything is timed."""

from __future__ import annotations

import json

import pytest
import torch

from nestpipe_kernels.cli.main import main

pool_shapes = pytest.importorskip(
    "nestpipe_kernels.bench.pool_shapes", reason="the suite comes with the installed package"
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


def test_lookup_pool_beside_peers(capsys) -> None:
    assert main(["bench", "lookup_pool", *SMALL, "--peers"]) == 0
    names = [line["impl"] for line in _lines(capsys)]
    assert names[:3] == ["nestpipe", "nestpipe, training", "torch.nn.EmbeddingBag"]


def test_lookup_pool_is_not_timed_where_a_peer_differs(capsys, monkeypatch) -> None:
    from nestpipe_kernels.bench.peers import TorchPeer

    honest = TorchPeer.forward
    monkeypatch.setattr(TorchPeer, "forward", lambda self, ids: honest(self, ids).flip(0))
    assert main(["bench", "lookup_pool", *SMALL, "--peers"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "torch.nn.EmbeddingBag sparse + sgd differs" in captured.err


@pytest.mark.parametrize("case", ["train_step", "lookup_pool"])
def test_shapes_change_what_they_name(capsys, case: str) -> None:
    options = ["--tables", "2", "--rows", "300", "--dim", "4", "--batch", "8", "--bag", "3", "--repeat", "1"]
    assert main(["bench", case, *options, "--shapes", "default", "single", "hot"]) == 0
    shapes = [line["shape"] for line in _lines(capsys) if line["impl"] == "nestpipe"]
    assert [(s["dim"], s["bag"], s["hot"]) for s in shapes] == [(4, 3, 0.0), (4, 1, 0.0), (4, 3, 0.5)]


def test_one_key_is_in_half_of_the_bags() -> None:
    (ids, *_) = pool_shapes.make_batches(pool_shapes.Shape(2, 1000, 8, 400, 5, 1.05, 0.5), 0)
    for row in ids.view(2, 400, 5):
        assert 150 < int((row[:, 0] == 0).sum()) < 250


def test_filled_rows_are_those_of_the_batches_and_as_many_as_fit(monkeypatch) -> None:
    monkeypatch.setattr(pool_shapes, "FILL_BYTES", 4 * 8 * 2 * 100)
    shape = pool_shapes.Shape(2, 1000, 8, 4, 5, 0.0)
    batches = pool_shapes.make_batches(shape, 0)
    (ours,), touched, _ = pool_shapes.make_all(shape, "sgd", batches, 0, False)
    for t in range(2):
        keys = ours.collection.store(f"t{t}").keys()
        assert set(touched[t].tolist()) <= set(keys.tolist())
        assert 100 <= len(keys) <= 100 + len(touched[t])


def test_batches_are_zipf_and_spread() -> None:
    shape = pool_shapes.Shape(1, 1000, 8, 64, 20, 1.05)
    ids = torch.cat(pool_shapes.make_batches(shape, 0), 1)[0]
    counts = ids.bincount(minlength=1000)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 1000
    assert int(counts.max()) > 20 * counts.float().median()
    assert int(counts.argmax()) != 0
