"""The case `cluster`: lines, costs that agree with the package's own, sets that need data, and the peer."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from nestpipe_kernels.bench import cluster as case
from nestpipe_kernels.cli.bench import CLUSTER_SETS
from nestpipe_kernels.cli.main import main
from nestpipe_kernels.ops.cluster import cluster_cost

SMALL = ["--sets", "topics-12", "--parts", "4", "--seeds", "1", "--repeat", "1"]


def test_lines(capsys) -> None:
    assert main(["bench", "cluster", *SMALL]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["impl"], line["objective"]) for line in lines] == [("nestpipe", "send_once"), ("nestpipe", "resend")]
    for line in lines:
        assert line["shape"]["samples"] == 1024
        assert line["shape"]["distinct"] <= line["rows"] < line["random_rows"]
        assert line["first_rows"] + line["last_rows"] == line["ends"]
        assert line["median_ms"] > 0


def test_costs_are_those_of_the_package() -> None:
    ids = case.batch_of("topics-12", 3, None)[:40]
    order = torch.from_numpy(np.random.default_rng(0).permutation(40))
    cost = cluster_cost(order, torch.arange(41) * 20, torch.from_numpy(ids.reshape(-1)), 4)
    got = case._cost(ids, case._part_of(order, 4), 4)
    assert got["rows"] == cost["rows"]
    assert [got["first_rows"], got["last_rows"]] == [cost["first_rows"][0], cost["last_rows"][-1]]  # type: ignore[index]


def test_every_set_is_offered() -> None:
    assert tuple(case.SETS) == CLUSTER_SETS


def test_sets_without_their_data_are_named(capsys) -> None:
    assert main(["bench", "cluster", "--sets", "ml100k", "--parts", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "left out: ml100k needs --data" in captured.err


def test_peer(capsys) -> None:
    pytest.importorskip("mtkahypar")
    assert main(["bench", "cluster", *SMALL, "--peers"]) == 0
    lines = {line["objective"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert lines["km1"]["impl"] == "mtkahypar"
    assert lines["resend"]["saved_over_peer"] > 0.5
    assert lines["send_once"]["ends_over_peer"] < 1.5
