"""Windows of several batches: joined in order, whatever they are made of; a checkpoint between two goes on after it."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import nestpipe_kernels as nk
from nestpipe_kernels.capture.concat import concat
from nestpipe_kernels.capture.split import split
from nestpipe_kernels.data import SyntheticConfig, SyntheticDataset, accumulate, batches
from nestpipe_kernels.models import build

ZEROS = torch.zeros(2)
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Everything:
    keyed: nk.KeyedJaggedTensor
    jagged: nk.JaggedTensor
    bags: tuple[torch.Tensor, torch.Tensor]
    array: np.ndarray
    names: list[str]
    pair: Pair
    batch_size: int
    temperature: float


def make(size: int, seed: int) -> Everything:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, (2 * size,), generator=generator)
    keys = torch.randint(100, (int(lengths.sum()),), generator=generator)
    own = torch.randint(3, (size,), generator=generator) + 2
    values = torch.arange(int(own.sum())) + 100 * seed
    return Everything(
        nk.KeyedJaggedTensor(["a", "b"], keys, lengths=lengths, weights=torch.rand(len(keys), generator=generator)),
        nk.JaggedTensor(values, lengths=own),
        (values, own.cumsum(0) - own),
        np.arange(size) + seed,
        [f"{seed}/{k}" for k in range(size)],
        Pair(torch.rand(size, 2, generator=generator), torch.tensor(1.5)),
        size,
        0.5,
    )


def test_a_window_has_the_samples_of_its_batches_in_order():
    parts = [make(4, 1), make(3, 2), make(5, 3)]
    whole = concat(parts)
    assert whole.batch_size == 12 and whole.temperature == 0.5 and isinstance(whole.pair, Pair)
    places = [torch.arange(0, 4), torch.arange(4, 7), torch.arange(7, 12)]
    for part, again in zip(parts, split(whole, places)):
        for name in ("keyed", "jagged"):
            one, other = getattr(part, name), getattr(again, name)
            assert torch.equal(one.values(), other.values()) and torch.equal(one.lengths(), other.lengths())
        assert torch.equal(part.keyed.weights(), again.keyed.weights())
        assert all(map(torch.equal, part.bags, again.bags)) and (part.array == again.array).all()
        assert part.names == again.names and torch.equal(part.pair.first, again.pair.first)
        assert again.batch_size == part.batch_size
    assert concat(parts[:1]) is parts[0]


def test_bags_with_values_behind_the_last_end_stay_those_bags():
    def part(start):
        return {"bags": (torch.arange(5) + start, torch.tensor([0, 1, 4])), "label": ZEROS}

    values, offsets = concat([part(0), part(10)])["bags"]
    assert values.tolist() == [0, 1, 2, 3, 10, 11, 12, 13] and offsets.tolist() == [0, 1, 4, 5, 8]


@pytest.mark.parametrize("starts", [[0, 1], [0, 2], [0, 0]])
def test_starts_of_a_batch_with_as_many_values_as_samples_are_starts_as_in_the_others(starts):
    few = {"bags": (torch.tensor([7, 8]), torch.tensor(starts)), "label": ZEROS}
    more = {"bags": (torch.tensor([1, 2, 3]), torch.tensor([0, 2])), "label": ZEROS}
    values, offsets = concat([more, few])["bags"]
    assert values.tolist() == [1, 2, 3, 7, 8] and offsets.tolist() == [0, 2, *(3 + start for start in starts)]
    values, offsets = concat([few, more])["bags"]
    assert values.tolist() == [7, 8, 1, 2, 3] and offsets.tolist() == [*starts, 2, 4]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}, r"batch\['x'\] has different shapes .*padding"),
        ({"x": ZEROS, "y": ZEROS}, {"x": [1, 2], "y": ZEROS}, r"batch\['x'\] is of different types \(Tensor, list\)"),
        ({"x": ZEROS, "t": 0.5}, {"x": ZEROS, "t": 0.6}, r"batch\['t'\] is a float that differs"),
        ({"x": ZEROS}, {"y": ZEROS}, r"batch has different parts"),
        (
            {"x": torch.zeros(2), "m": torch.ones(3)},
            {"x": torch.zeros(2), "m": torch.ones(3)},
            r"'m'\] has shape \[3\]",
        ),
        (
            {"x": torch.zeros(2), "n": torch.ones(())},
            {"x": torch.zeros(2), "n": torch.zeros(())},
            "number that differs",
        ),
    ],
)
def test_what_cannot_be_joined_is_named(one, other, message):
    with pytest.raises(ValueError, match=rf"concat: .*{message}.*give all batches the same structure"):
        concat([one, other])


def test_keyed_features_must_agree():
    first, second = (nk.KeyedJaggedTensor([key], torch.arange(2), lengths=torch.ones(2).long()) for key in "ab")
    with pytest.raises(ValueError, match=r"batch has different keys"):
        concat([first, second])
    weighted = nk.KeyedJaggedTensor(["a"], torch.arange(2), torch.ones(2), lengths=torch.ones(2).long())
    with pytest.raises(ValueError, match=r"weights in some batches only"):
        concat([first, weighted])
    with pytest.raises(ValueError, match="at least one batch, got none"):
        concat([])


def test_arguments():
    with pytest.raises(TypeError, match="loader must be iterable, got int"):
        accumulate(3, 2)
    for number in (0, True, 1.5):
        with pytest.raises(ValueError, match="batches must be an integer >= 1, got"):
            accumulate([], number)
    windows = accumulate([torch.zeros(2)] * 7, 3)
    assert len(windows) == 3 and [len(window) for window in windows] == [6, 6, 2]
    assert list(accumulate([], 3)) == []


def test_a_checkpoint_stands_between_windows(tmp_path):
    data = SyntheticDataset(SyntheticConfig(num_samples=96, num_users=20, num_items=30, num_topics=8))

    def parts():
        model = build("dlrm", data, nk.optim.SGD(lr=0.1), seed=0)
        loader = accumulate(batches(data, 8, epochs=1, shuffle_seed=0), 2)
        return model, loader, nk.NestedPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1))

    model, loader, pipe = parts()
    losses = []
    with pipe:
        for step in pipe.run(loader):
            losses.append(float(step.loss))
            if step.index == 2:
                nk.checkpoint.save(tmp_path / "run", model=model, pipeline=pipe, loader=loader)
    assert len(losses) == 6
    model, loader, pipe = parts()
    with pipe:
        nk.checkpoint.load(tmp_path / "run", model=model, pipeline=pipe, loader=loader)
        assert [float(step.loss) for step in pipe.run(loader)] == losses[3:]
