"""The case `consistency`: metrics and intervals by hand, the table, the picture; and the whole on a few users."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe_kernels.cli.main import main

consistency = pytest.importorskip(
    "nestpipe_kernels.bench.consistency", reason="the suite comes with the installed package"
)
from nestpipe_kernels.bench import consistency_report  # noqa: E402


def test_metrics_by_hand() -> None:
    found = consistency.metrics(torch.tensor([0, 9, 10, 49, 50]))
    assert found["HR@10"] == pytest.approx(2 / 5) and found["HR@50"] == pytest.approx(4 / 5)
    gains = [1.0, 1 / math.log2(11), 1 / math.log2(12), 1 / math.log2(51)]
    assert found["NDCG@10"] == pytest.approx(sum(gains[:2]) / 5)
    assert found["NDCG@50"] == pytest.approx(sum(gains) / 5)


def test_interval_is_students() -> None:
    assert consistency_report.interval([0.5]) == (0.5, math.inf)
    middle, half = consistency_report.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (middle, half) == (3.0, pytest.approx(2.776 * math.sqrt(2.5 / 5)))


def line(impl: str, count: int, seed: int, value: float, losses: list[float]) -> dict[str, Any]:
    scores = dict.fromkeys(consistency_report.METRICS, value)
    return {"model": "hstu", "impl": impl, "micro_batches": count, "seed": seed, "losses": losses, **scores}


def test_table_says_what_is_equal_and_how_far_apart(tmp_path: Path) -> None:
    lines = [
        *(line("sequential", n, seed, 0.5, [2.0, 1.0]) for n in (2, 4) for seed in (0, 1)),
        *(line("nested", 2, seed, 0.5, [2.0, 1.0]) for seed in (0, 1)),
        *(line("async", 4, seed, 0.4 + seed / 10, [2.0, 1.5]) for seed in (0, 1)),
        *(line("plain PyTorch", 1, seed, 0.5, [2.0, 1.0]) for seed in (0, 1)),
    ]
    found = [row.split(" | ") for row in consistency_report.table(lines)[2:]]
    assert [row[1:3] + row[-2:] for row in found] == [
        ["sequential", "2", "1.0000", " |"],
        ["sequential", "4", "1.0000", " |"],
        ["nested", "2", "1.0000", "yes |"],
        ["async", "4", "1.5000", "no |"],
        ["plain PyTorch", "1", "1.0000", " |"],
    ]
    apart = [row.split(" | ") for row in consistency_report.differences(lines)[2:]]
    assert [row[1:4] for row in apart] == [
        ["sequential", "2", "+0.00 ± 0.00"],
        ["sequential", "4", "+0.00 ± 0.00"],
        ["nested", "2", "+0.00 ± 0.00"],
        ["async", "4", "-50.00 ± 635.30"],
    ]
    pytest.importorskip("matplotlib")
    consistency_report.save_plot(tmp_path / "x.png", lines)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_every_schedule_beside_a_plain_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [f"{user}\t{100 + (user + t) % 9}\t5\t{1000 * user + t}" for user in range(12) for t in range(8)]
    (tmp_path / "u.data").write_text("\n".join(rows) + "\n")
    arguments = ["bench", "consistency", "--data", f"movielens:{tmp_path}", "--models", "fuxi", "--seeds", "1"]
    arguments += ["--micro-batches", "1", "4", "--epochs", "3", "--batch", "3", "--dim", "8", "--lr", "0.02"]
    arguments += ["--output", str(tmp_path)]
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    lines = {(x["impl"], x["micro_batches"]): x for x in map(json.loads, out.splitlines())}
    assert len(lines) == 2 * 2 + 5 and {x["users"] for x in lines.values()} == {12}
    what = ("losses", "HR@10", "NDCG@10", "NDCG@50")
    for count in (1, 4):
        a, b = lines["nested", count], lines["sequential", count]
        assert [a[name] for name in what] == [b[name] for name in what]
    exact, nested = lines["nested, 2D exact", 4], lines["nested", 4]
    assert [exact[name] for name in what] == [nested[name] for name in what]
    plain = lines["plain PyTorch", 1]
    torch.testing.assert_close(torch.tensor(plain["losses"]), torch.tensor(nested["losses"]), rtol=1e-4, atol=1e-5)
    assert "| fuxi | plain PyTorch | 1 |" in err
    assert (tmp_path / "consistency.png").exists()
