"""Models of nk.nn.Embedding and EmbeddingBag in the pipeline: as with plain PyTorch, and alike in every schedule."""

from __future__ import annotations

import threading
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import nestpipe_kernels as nk
from nestpipe_kernels import optim
from nestpipe_kernels.testing.threads import run_ranks_as_threads

RULE = optim.SGD(lr=0.1)
SIZE, DIM, SAMPLES, STEPS = 15, 4, 7, 6


SEEDING = threading.Lock()  # ranks are threads, with one generator


class Base(nn.Module):
    """Embeds a batch, one vector per sample; squared error."""

    width = DIM

    def __init__(self, make):
        super().__init__()
        with SEEDING:
            torch.manual_seed(2)
            self.build(make)
            self.head = nn.Linear(self.width, 1)

    def extra(self):
        return 0.0

    def forward(self, batch):
        vectors, label = self.embed(batch)
        out = self.head(vectors).squeeze(1)
        return ((out - label) ** 2).mean() + self.extra(), out


class FloatMatrix(Base):
    """Ids are columns of one float matrix, one module is called twice, and an L2 term reads all rows."""

    width = 3 * DIM

    def build(self, make):
        self.user, self.item = make.embedding(SIZE, DIM), make.embedding(SIZE, DIM, padding_idx=0)

    def extra(self):
        return 0.01 * self.item.weight.square().sum()

    def embed(self, batch):
        ids = batch[:, :3].long()
        rows = [self.user(ids[:, 0]), self.item(ids[:, 1]), self.item(ids[:, 2])]
        return torch.cat(rows, 1), batch[:, 3]

    @staticmethod
    def batch(ids, label):
        return torch.cat([ids[:, :3].float(), label[:, None]], 1)


class Dictionary(Base):
    """Bags of fixed length whose weights are learned, and control flow on the batch's keys."""

    width = 2 * DIM

    def build(self, make):
        self.bag, self.one = make.bag(SIZE, DIM, mode="sum"), make.embedding(SIZE, DIM)
        self.weights = nn.Parameter(torch.rand(4))

    def embed(self, batch):
        if "weights" in batch:
            raise AssertionError
        ids = batch["ids"]
        bags = self.bag(ids, per_sample_weights=self.weights.expand(len(ids), 4).contiguous())
        return torch.cat([bags, self.one(batch["ids"][:, 0].to(torch.int32))], 1), batch["label"]

    @staticmethod
    def batch(ids, label):
        return {"ids": ids, "label": label}


@dataclass
class Bags:
    label: Tensor
    pair: tuple[Tensor, Tensor]


class Pairs(Base):
    """Values and offsets of bags of any length, as a collate function makes them."""

    mode, last = "mean", False

    def build(self, make):
        self.bag = make.bag(SIZE, DIM, mode=self.mode, padding_idx=3, include_last_offset=self.last)

    def embed(self, batch):
        return self.bag(*batch.pair), batch.label

    @classmethod
    def batch(cls, ids, label):
        # Without the last offset, as many ids as samples would read as two numbers per sample.
        lengths = ids[:, 0] % 4 if cls.last else ids[:, 0] % 3 + 1
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.cat([row[: int(n)] for row, n in zip(ids, lengths)])
        return Bags(label, (values, offsets if cls.last else offsets[:-1]))


class LastOffset(Pairs):
    """The same with the last offset, pooled by maximum."""

    mode, last = "max", True


Sequences = namedtuple("Sequences", ["history", "target"])


class Softmax(Base):
    """Scores all items with the table itself; positions have a table of their own; lengths differ between batches."""

    def build(self, make):
        self.item, self.place = make.embedding(SIZE, DIM, padding_idx=0), make.embedding(9, DIM)

    def forward(self, batch):
        places = torch.arange(9)[: batch.history.shape[1]]
        hidden = (self.item(batch.history) + self.place(places)).mean(1)
        scores = nn.functional.linear(self.head.weight * hidden, self.item.weight)
        return nn.functional.cross_entropy(scores, batch.target), scores

    @staticmethod
    def batch(ids, label):
        return Sequences(ids, ids.sum(1) % SIZE)


MODELS = [FloatMatrix, Dictionary, Pairs, LastOffset, Softmax]


class Plain:
    embedding, bag = nn.Embedding, nn.EmbeddingBag


class Ours:
    def __init__(self, optimizer, process_group=None):
        self.given = {"optimizer": optimizer, "process_group": process_group}

    def embedding(self, *a, **k):
        return nk.nn.Embedding(*a, **k, **self.given)

    def bag(self, *a, **k):
        return nk.nn.EmbeddingBag(*a, **k, **self.given)


def batches(model, seed, steps=STEPS, samples=SAMPLES):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, SIZE, (samples, 4), generator=generator)
        yield model.batch(ids, torch.rand(samples, generator=generator))


def train(model_class, schedule, world_size=1, optimizer=RULE, **settings):
    def body(rank, communicator):
        model = model_class(Ours(optimizer, communicator))
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        config = nk.PipelineConfig(schedule=schedule, num_micro_batches=3, timeout_s=20.0, **settings)
        with nk.NestedPipeline(model, dense, config=config) as pipeline:
            losses = [float(step.loss) for step in pipeline.run(batches(model_class, rank))]
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    return run_ranks_as_threads(world_size, body)


def plain(model_class, world_size=1):
    model = model_class(Plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in zip(*(batches(model_class, rank) for rank in range(world_size))):
        optimizer.zero_grad()
        (sum(model(batch)[0] for batch in step) / world_size).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("model_class", MODELS)
def test_trains_as_plain_pytorch(model_class, world_size):
    expected, (_, found) = plain(model_class, world_size), train(model_class, "nested", world_size)[0]
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("model_class", MODELS)
def test_schedules_are_alike(model_class, world_size):
    rule = optim.Adam(lr=0.05)
    expected = train(model_class, "sequential", world_size, rule)
    for settings in ({}, {"early_send": True}):
        found = train(model_class, "nested", world_size, rule, **settings)
        for (losses, state), (other_losses, other) in zip(expected, found):
            assert losses == other_losses
            assert all(torch.equal(state[name], other[name]) for name in state)


def test_weight_between_steps_is_that_of_the_last_step():
    model = FloatMatrix(Ours(optim.SGD(lr=0.1)))
    reference = FloatMatrix(Plain)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    with nk.NestedPipeline(model, torch.optim.SGD(model.head.parameters(), lr=0.1)) as pipeline:
        for _, batch in zip(pipeline.run(batches(FloatMatrix, 0)), batches(FloatMatrix, 0)):
            optimizer.zero_grad()
            reference(batch)[0].backward()
            optimizer.step()
            torch.testing.assert_close(model.item.weight.tensor(), reference.item.weight.detach(), rtol=1e-5, atol=1e-6)
            assert not model.item.weight.tensor().requires_grad


def test_a_bad_id_is_named_by_the_step_that_has_it():
    model = FloatMatrix(Ours(optim.SGD(lr=0.1)))
    good = list(batches(FloatMatrix, 0, steps=2))
    bad = good[0].clone()
    bad[2, 1] = 77
    with nk.NestedPipeline(model, None) as pipeline:
        iterator = iter([good[0], bad, good[1]])
        pipeline.progress(iterator)
        with pytest.raises(
            IndexError, match=r"nn.Embedding: table 'weight': id 77 at position \[2\] is outside \[0, 15\)"
        ):
            pipeline.progress(iterator)
        pipeline.progress(iterator)


def test_owners_pool_nothing_of_a_drop_in():
    expected, found = (train(LastOffset, "sequential", 2, owner_pooling=setting) for setting in (False, "auto"))
    assert expected[0][0] == found[0][0]
    with pytest.raises(ValueError, match="owner_pooling: feature 'weight' of 'bag' is pooled by max"):
        train(LastOffset, "sequential", owner_pooling=True)
    with pytest.raises(ValueError, match="feature 'weight' of 'bag' has per-sample weights"):
        train(Pairs, "sequential", owner_pooling=True)


def test_positions_that_are_no_samples_do_not_disturb_clustering():
    found = train(Softmax, "nested", clustering="key")
    other = train(Softmax, "sequential", clustering="key")
    assert found[0][0] == other[0][0]
