"""Checkpoints and names of models that torch.compile has wrapped are those of the models themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nestpipe_kernels as nk
from nestpipe_kernels import checkpoint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = nk.nn.Embedding(20, 4, optimizer=nk.optim.Adagrad(lr=0.1))
        self.top = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=True), nn.Linear(3, 1))
        self.top[1].eval()

    def forward(self, batch):
        return self.top(self.ids(batch["ids"])).squeeze(1)


def loss_of(model, batch):
    out = model(batch)
    return ((out - batch["label"]) ** 2).mean(), out


def whole(model):
    return torch.compile(model, backend="eager")


def parts(model):
    model.top = torch.compile(model.top, backend="eager")
    model.ids = torch.compile(model.ids, backend="eager")
    return model


def start(wrap, seed, **config):
    torch.manual_seed(seed)
    model = wrap(Model())
    dense = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, nk.NestedPipeline(model, dense, loss_of, nk.PipelineConfig(num_micro_batches=2, **config))


def train(pipeline):
    chance = torch.Generator().manual_seed(1)
    batches = [{"ids": torch.randint(20, (6,), generator=chance), "label": torch.rand(6, generator=chance)}] * 3
    return [float(step.loss) for step in pipeline.run(batches)]


@pytest.mark.parametrize("saved", [whole, parts])
@pytest.mark.parametrize("loaded", [lambda model: model, whole, parts], ids=["plain", "whole", "parts"])
def test_a_checkpoint_goes_from_one_to_the_other(tmp_path, saved, loaded):
    torch._dynamo.reset()
    model, pipeline = start(saved, 1)
    train(pipeline)
    checkpoint.save(tmp_path, model=getattr(model, "_orig_mod", model), pipeline=pipeline)
    expected = train(pipeline)
    pipeline.close()
    other, pipeline = start(loaded, 2)
    report = checkpoint.load(tmp_path, model=other, pipeline=pipeline)
    assert not report.missing_parameters and not report.unexpected_parameters and train(pipeline) == expected
    pipeline.close()


def test_inputs_are_named_as_the_model_names_them():
    for name in ("ids", "_orig_mod.ids"):
        torch._dynamo.reset()
        _, pipeline = start(whole, 1, sparse_inputs=lambda batch, name=name: {name: [batch["ids"].numpy()]})
        assert len(train(pipeline)) == 3
        pipeline.close()
