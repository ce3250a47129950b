"""Finding embedding modules and modules that depend on how a batch is split."""

from __future__ import annotations

import warnings

import pytest
from capture_fakes import FakeEmbedding
from torch import nn

from nestpipe_kernels.capture import batch_coupled_modules, embedding_modules, warn_batch_coupled


def make_model() -> nn.Module:
    shared = FakeEmbedding()
    return nn.ModuleDict(
        {
            "a": nn.Sequential(shared, nn.BatchNorm1d(4), nn.LayerNorm(4)),
            "b": nn.ModuleList([shared, FakeEmbedding(), nn.SyncBatchNorm(4), nn.LazyBatchNorm2d()]),
            "c": nn.Sequential(nn.InstanceNorm1d(4), nn.InstanceNorm2d(4, track_running_stats=True)),
        }
    )


def test_shared_modules_are_listed_once() -> None:
    model = make_model()
    found = embedding_modules(model)
    assert list(found) == ["a.0", "b.1"]
    assert embedding_modules(found["a.0"]) == {"": found["a.0"]}


def test_batch_coupled_modules_are_named() -> None:
    model = make_model()
    assert batch_coupled_modules(model) == ["a.1", "b.2", "b.3", "c.1"]
    model["a"][1].eval()
    assert batch_coupled_modules(model) == ["b.2", "b.3", "c.1"]
    assert batch_coupled_modules(model.eval()) == ["a.1", "b.2", "b.3", "c.1"]


def test_one_warning_when_the_batch_is_split() -> None:
    model = make_model()
    with pytest.warns(
        UserWarning, match=r"batch statistics of 'a.1', 'b.2', 'b.3', 'c.1' .* each of the 4 micro-batches"
    ):
        warn_batch_coupled(model, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_batch_coupled(model, 1)
        warn_batch_coupled(nn.Linear(1, 1), 4)
