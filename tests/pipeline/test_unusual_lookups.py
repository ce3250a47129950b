"""Unusual uses of lookups in a model: in place, under activation checkpointing, with a backward of the model's own."""

import warnings

import pytest
import torch
from small_model import EXACT, Recommender, make_batch, make_config, make_pipeline
from torch.utils.checkpoint import checkpoint

from nestpipe_kernels import optim
from nestpipe_kernels.errors import CaptureError
from nestpipe_kernels.pipeline.train_pipeline import NestedPipeline


def batches(rank):
    return [make_batch(10 * t + rank) for t in range(4)]


class Variant(Recommender):
    """Recommender whose logits and loss tests replace."""

    def __init__(self, process_group=None):
        super().__init__(process_group, optimizer=optim.SGD(lr=0.5))

    def forward(self, batch):
        logits = self.logits(batch, self.linear).squeeze(1)
        return self.loss(((logits - batch.label) ** 2).mean()), logits

    def logits(self, batch, layer):
        return layer(torch.cat([self.ebc(batch.sparse).values(), batch.dense], 1))

    def loss(self, loss):
        return loss


class InPlace(Variant):
    def logits(self, batch, layer):
        return layer(torch.cat([self.ebc(batch.sparse).values().mul_(1.0).relu_(), batch.dense], 1))


class OutOfPlace(Variant):
    def logits(self, batch, layer):
        return layer(torch.cat([self.ebc(batch.sparse).values().relu(), batch.dense], 1))


class TwoBackwards(Variant):
    def loss(self, loss):
        if torch.is_grad_enabled() and float(loss) > 1e-9:
            (loss * 0.5).backward(retain_graph=True)
        return loss * 0.5


class Checkpointed(Variant):
    def logits(self, batch, layer):
        pooled = torch.cat([self.ebc(batch.sparse).values(), batch.dense], 1)
        return checkpoint(layer, pooled, use_reentrant=False)


class CheckpointedLookup(Variant):
    def logits(self, batch, layer):
        return checkpoint(super().logits, batch, layer, use_reentrant=False)


def weights_after(model, schedule="nested", parts=1):
    config = make_config(schedule, num_micro_batches=parts)
    with NestedPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config) as pipeline:
        for _ in pipeline.run(batches(0)):
            pass
        rows = [model.ebc.store(name).find(torch.arange(7))[0] for name in ("user", "item")]
    return [*rows, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize(("model", "like"), [(InPlace, OutOfPlace), (Checkpointed, Variant)])
def test_in_place_and_checkpointed_models_give_the_same(model, like, schedule):
    for a, b in zip(weights_after(model(), schedule, 2), weights_after(like(), "sequential", 2)):
        assert torch.equal(a, b)


def test_a_backward_of_the_models_own_adds_to_the_rows_as_to_parameters():
    for a, b in zip(weights_after(TwoBackwards()), weights_after(Variant())):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_lookup_inside_activation_checkpointing_is_refused():
    with pytest.raises(CaptureError, match="module 'ebc' is called during backward"):
        weights_after(CheckpointedLookup())


class Watching(Recommender):
    """Looks the items up once more for a figure that the loss does not depend on."""

    def forward(self, batch):
        with torch.no_grad():
            self.seen = self.ebc(batch.sparse).values().norm()
        return super().forward(batch)


RULES = [
    (optim.SGD(lr=0.1), 0), (optim.Adagrad(lr=0.1), 0), (optim.RowWiseAdagrad(lr=0.1), 0),
    (optim.Adam(), 1), (optim.SGD(lr=0.1, momentum=0.9), 1), (optim.Adagrad(lr=0.1, weight_decay=0.1), 1),
]  # fmt: skip


@pytest.mark.parametrize("rule, warned", RULES, ids=str)
def test_rows_without_a_gradient_are_warned_of_once_where_that_moves_them(rule, warned):
    with warnings.catch_warnings(record=True) as seen, make_pipeline(Watching(optimizer=rule), "nested") as pipeline:
        warnings.simplefilter("always")
        for _ in pipeline.run(batches(0)):
            pass
    found = [str(w.message) for w in seen if "no gradient came back" in str(w.message)]
    assert len(found) == warned
    assert all("a lookup of 'ebc' (under no_grad, detached, or its output unused)" in text for text in found)
