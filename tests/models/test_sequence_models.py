"""HSTU and FuXi-alpha: their equations by hand, what a place sees, ranks, and training in the pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nestpipe_kernels as nk
from nestpipe_kernels.data import Interactions, SequenceBatch, SequenceDataset, batches
from nestpipe_kernels.jagged import JaggedTensor, KeyedJaggedTensor
from nestpipe_kernels.models import SEQUENCE_MODELS, build
from nestpipe_kernels.models.fuxi import FuXiLayer
from nestpipe_kernels.models.hstu import HSTULayer
from nestpipe_kernels.models.sequence_model import Sequences, ranks_of
from nestpipe_kernels.nn import EmbeddingCollection, EmbeddingConfig
from nestpipe_kernels.testing.threads import run_ranks_as_threads

FEATURES = ["sequence", "target", "candidates"]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def layer_norm(x: Tensor) -> Tensor:
    return (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5)


def rms_norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + torch.finfo(torch.float32).eps)


def bias_of(module: Any, head: int, times: Tensor, i: int, j: int) -> tuple[float, float]:
    """(position, time), by their definitions."""
    bucket = int(math.log(max(int(times[i] - times[j]), 1)) / 0.301)
    return module.positions[i - j, head].item(), module.periods[min(bucket, 63), head].item()


def hstu_by_hand(layer: HSTULayer, items: Tensor, times: Tensor) -> Tensor:
    size, rows = items.shape[1], []
    u, v, q, k = (torch.stack([silu(layer.into(layer_norm(x))) for x in items])).split(size, 1)
    width = size // layer.heads
    for i in range(len(items)):
        mixed = torch.zeros(size)
        for h in range(layer.heads):
            part = slice(h * width, (h + 1) * width)
            for j in range(i + 1):
                score = q[i, part] @ k[j, part] + sum(bias_of(layer.bias, h, times, i, j))
                mixed[part] += silu(score) / layer.max_length * v[j, part]
        rows.append(layer.out(layer_norm(mixed) * u[i]) + items[i])
    return torch.stack(rows)


def fuxi_by_hand(layer: FuXiLayer, items: Tensor, times: Tensor) -> Tensor:
    size, rows = items.shape[1], []
    normed = torch.stack([rms_norm(x) for x in items])
    q, k, v = silu(layer.into(normed)).split(size, 1)
    width = size // layer.heads
    for i in range(len(items)):
        mixed = torch.zeros(3, size)
        for h in range(layer.heads):
            part = slice(h * width, (h + 1) * width)
            for j in range(i + 1):
                position, time = bias_of(layer.channels, h, times, i, j)
                for channel, weight in enumerate((silu(q[i, part] @ k[j, part]) / layer.max_length, time, position)):
                    mixed[channel, part] += weight * v[j, part]
        first = layer.out(rms_norm(mixed.flatten()) * silu(layer.gate(normed[i]))) + items[i]
        gated, plain = layer.widen(rms_norm(first)).chunk(2)
        rows.append(layer.narrow(silu(gated) * plain) + first)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("kind", "by_hand", "biases"),
    [(HSTULayer, hstu_by_hand, "bias"), (FuXiLayer, fuxi_by_hand, "channels")],
    ids=["hstu", "fuxi"],
)
def test_layers_are_their_equations(kind: Any, by_hand: Callable[..., Tensor], biases: str) -> None:
    generator = torch.Generator().manual_seed(5)
    layer = kind(6, 2, 8, generator)
    for values in getattr(layer, biases).parameters():
        values.data.normal_(generator=generator)
    items = torch.randn(9, 6, generator=generator)
    times = torch.tensor([0, 3, 3, 90, 10**6, 5, 6, 7, 10**8])
    found = layer(items, Sequences.timed(torch.tensor([5, 0, 4]), times))
    expected = torch.cat([by_hand(layer, items[:5], times[:5]), by_hand(layer, items[5:], times[5:])])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def tables(dim: int = 8, size: int = 50) -> EmbeddingCollection:
    generator = torch.Generator().manual_seed(1)
    made = EmbeddingCollection([EmbeddingConfig(size, dim, "item", feature_names=list(FEATURES))])
    for values in made.parameters():
        values.data.normal_(generator=generator)
    return made


def make_batch(samples: list[tuple[list[int], list[int], list[int]]]) -> SequenceBatch:
    columns = list(zip(*samples))
    keys = [key for column in columns for part in column for key in part]
    lengths = [len(part) for column in columns for part in column]
    sparse = KeyedJaggedTensor(FEATURES, torch.tensor(keys), lengths=torch.tensor(lengths), stride=len(samples))
    size = [len(part) for part in columns[0]]
    return SequenceBatch(sparse, JaggedTensor(torch.arange(sum(size)) * 60, lengths=torch.tensor(size)))


SAMPLES = [
    ([1, 2, 3, 4], [2, 3, 4, 5], [9, 10, 11]),
    ([7], [8], [8, 7, 30]),
    ([20, 21, 22], [21, 22, 23], [1, 2, 3]),
]


@pytest.mark.parametrize("name", SEQUENCE_MODELS)
def test_samples_do_not_see_each_other_and_places_not_what_comes(name: str) -> None:
    model = SEQUENCE_MODELS[name](tables(), max_length=8)
    for values in model.layers.parameters():
        values.data += 0.05 * torch.randn(values.shape, generator=torch.Generator().manual_seed(2))
    loss, (alone, counts), weight = model(make_batch(SAMPLES))
    assert (counts.tolist(), weight) == ([4, 1, 3], 8.0)
    torch.testing.assert_close(loss, (alone * counts).sum() / 8)
    for k, sample in enumerate(SAMPLES):
        torch.testing.assert_close(model(make_batch([sample]))[1][0][0], alone[k])
    sequence, target, candidates = SAMPLES[0]
    cut = model(make_batch([(sequence[:2], target[:2], candidates)]))[1][0][0]
    changed = model(make_batch([([*sequence[:2], 40, 41], [*target[:2], 42, 43], candidates)]))[1][0][0]
    rest = model(make_batch([([*sequence[:2], 40, 41], [42, 43], candidates)]))[1][0][0]
    torch.testing.assert_close(changed * 4, cut * 2 + rest * 2)


@pytest.mark.parametrize("name", SEQUENCE_MODELS)
def test_ranks_count_candidates_that_score_higher(name: str) -> None:
    model = SEQUENCE_MODELS[name](tables(), max_length=8).eval()
    every = list(range(50))
    _, ranks, _ = model(make_batch([([1, 2, 3], [4], every), ([7], [9], every), ([7], [9], [9]), ([7], [9], [3, 3])]))
    _, swapped, _ = model(make_batch([([1, 2, 3], [k], every) for k in every]))
    assert sorted(swapped.tolist()) == every, "each item has a rank of its own"
    assert ranks[0] == swapped[4]
    assert ranks[2] == 0, "the target does not compete with itself"


def test_ties_count_half_rounded_up() -> None:
    scores = torch.tensor([[0.5, 0.5, 0.5, 0.1], [0.9, 0.5, -torch.inf, 0.1], [0.4, 0.4, 0.4, 0.4]])
    assert ranks_of(torch.tensor([0.5, 0.5, 0.5]), scores).tolist() == [2, 2, 0]


def test_under_autocast_the_target_is_scored_as_its_candidates_are() -> None:
    model = SEQUENCE_MODELS["hstu"](tables(), max_length=8)
    batch = make_batch([([k, k + 1], [9, 9], [10, 11]) for k in range(1, 6)])
    with torch.no_grad():
        weight = model.embedding_collection.embeddings["item"].weight
        weight[10:12] = weight[9]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch)[0]
    torch.testing.assert_close(loss, torch.tensor(3.0).log(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, "HSTU: embedding_dim must be a multiple of heads 3, got 8"),
        ({"num_layers": 0, "max_length": -1}, "HSTU: sizes must be >= 1, got num_layers 0, max_length -1"),
    ],
)
def test_sizes_that_make_no_sense(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SEQUENCE_MODELS["hstu"](tables(), **settings)


def test_one_table_alone() -> None:
    two = EmbeddingCollection([EmbeddingConfig(9, 8, name, feature_names=[name]) for name in "ab"])
    with pytest.raises(ValueError, match=r"FuXi: expected one table of items, got \['a', 'b'\]"):
        SEQUENCE_MODELS["fuxi"](two)


def repeating() -> SequenceDataset:
    """Users who go round the same six items."""
    rows = [(user, 100 + (user + t) % 6, 1000.0 * user + 60 * t) for user in range(40) for t in range(14)]
    return SequenceDataset("x", Interactions(*(torch.tensor(c) for c in zip(*rows))), max_length=8, num_candidates=4)


@pytest.mark.parametrize("name", SEQUENCE_MODELS)
def test_nested_trains_as_sequential_and_learns(name: str) -> None:
    data = repeating()

    def train(schedule: str) -> list[Any]:
        def body(rank: int, communicator: Any) -> Any:
            model = build(name, data, nk.optim.Adam(lr=0.02), embedding_dim=8, process_group=communicator)
            dense = torch.optim.Adam(model.parameters(), lr=0.02)
            config = nk.PipelineConfig(schedule=schedule, num_micro_batches=3, timeout_s=20.0)
            with nk.NestedPipeline(model, dense, config=config) as pipeline:
                losses = [float(s.loss) for s in pipeline.run(batches(data, 10, rank, 2, epochs=6))]
                model.eval()
                ranks = [s.output for s in pipeline.run(batches(data.ranking(), 10, rank, 2))]
            return losses, torch.cat(ranks).tolist(), [p.tolist() for p in model.layers.parameters()]

        return run_ranks_as_threads(2, body)

    nested = train("nested")
    assert nested == train("sequential")
    losses = nested[0][0]
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    ranks = [rank for _, found, _ in nested for rank in found]
    assert len(ranks) == 40 and sum(rank == 0 for rank in ranks) > 30
