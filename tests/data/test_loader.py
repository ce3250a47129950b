"""Batches for one rank: parts, ends, epochs, shuffling; and open_data."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from nestpipe_kernels.data import (
    Batch,
    BatchLoader,
    CriteoDataset,
    MovieLensDataset,
    SyntheticConfig,
    SyntheticDataset,
    TableSchema,
    batches,
    open_data,
)
from nestpipe_kernels.jagged import KeyedJaggedTensor


class Numbers:
    """Sample i is the key i."""

    name = "numbers"
    num_dense = 0
    feature_names = ("a",)
    tables = (TableSchema("a", ("a",)),)
    default_batch_size = 512

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: torch.Tensor) -> Batch:
        lengths = torch.ones(indices.numel(), dtype=torch.int64)
        return Batch(torch.empty(len(indices), 0), KeyedJaggedTensor(["a"], indices, lengths=lengths), indices.float())


def keys(loader: BatchLoader) -> list[list[int]]:
    return [batch.sparse.values().tolist() for batch in loader]


def test_one_rank_in_order() -> None:
    loader = batches(Numbers(7), 3)
    assert keys(loader) == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(loader) == 3
    assert keys(loader) == keys(loader)  # every iteration starts again
    assert keys(batches(Numbers(7), 3, drop_last=True)) == [[0, 1, 2], [3, 4, 5]]


def test_ranks_share_each_step() -> None:
    assert [keys(batches(Numbers(11), 2, rank, 2)) for rank in range(2)] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [10]],
    ]
    assert [keys(batches(Numbers(9), 2, rank, 2)) for rank in range(2)] == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert keys(batches(Numbers(11), 2, 0, 2, drop_last=True)) == [[0, 1], [4, 5]]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 10, 23])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [None, 5])
def test_every_sample_comes_once_and_ends_are_even(size: int, world_size: int, seed: int | None) -> None:
    parts = [keys(batches(Numbers(size), 3, rank, world_size, shuffle_seed=seed)) for rank in range(world_size)]
    assert sorted(key for part in parts for batch in part for key in batch) == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for step in itertools.zip_longest(*parts, fillvalue=[]):
        assert max(map(len, step)) - min(map(len, step)) <= 1


def test_epochs_and_shuffling() -> None:
    loader = batches(Numbers(50), 50, epochs=2, shuffle_seed=1)
    first, second = keys(loader)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert keys(loader) == [first, second]
    assert keys(batches(Numbers(50), 50, epochs=2, shuffle_seed=2))[0] != first
    endless = batches(Numbers(3), 2, epochs=None)
    assert [b.sparse.values().tolist() for b in itertools.islice(endless, 4)] == [[0, 1], [2], [0, 1], [2]]
    assert keys(batches(Numbers(3), 2, epochs=0)) == []


def test_default_batch_size() -> None:
    assert [len(batch) for batch in batches(SyntheticDataset(SyntheticConfig(num_samples=600)))] == [512, 88]


def test_loader_errors() -> None:
    with pytest.raises(ValueError, match=r"batch_size must be >= 1, got 0"):
        batches(Numbers(3), 0)
    with pytest.raises(ValueError, match=r"got rank 2 of world_size 2"):
        batches(Numbers(3), 1, 2, 2)
    with pytest.raises(ValueError, match=r"got rank 0 of world_size 0"):
        batches(Numbers(3), 1, 0, 0)
    with pytest.raises(ValueError, match=r"epochs must be >= 0 or None, got -1"):
        batches(Numbers(3), 1, epochs=-1)
    with pytest.raises(ValueError, match=r"1 samples give rank 1 of 2 no batch of 4, and epochs=None would search"):
        batches(Numbers(1), 4, 1, 2, epochs=None)
    with pytest.raises(TypeError, match=r"epochs=None has no length"):
        len(batches(Numbers(1), 4, epochs=None))


def test_open_data(tmp_path: Path) -> None:
    assert isinstance(open_data("synthetic"), SyntheticDataset)
    assert len(open_data("synthetic", synthetic=SyntheticConfig(num_samples=9))) == 9
    (tmp_path / "u.data").write_text("1\t2\t3\t4\n")
    assert isinstance(open_data(f"movielens:{tmp_path}"), MovieLensDataset)
    (tmp_path / "criteo").write_text("\t".join(["0"] * 40))
    assert isinstance(open_data(f"criteo:{tmp_path / 'criteo'}"), CriteoDataset)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kuairand:x", r"data kuairand has sequences alone: choose model hstu or fuxi, or other data"),
        ("avazu:x", r"unknown data 'avazu:x': choose one of synthetic, criteo:PATH, movielens:PATH"),
        ("", r"unknown data ''"),
        ("criteo", r"data criteo needs a path: criteo:PATH, got 'criteo'"),
        ("movielens:", r"data movielens needs a path: movielens:PATH, got 'movielens:'"),
        ("synthetic:x", r"data synthetic takes no path, got 'synthetic:x'"),
    ],
)
def test_open_data_errors(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_data(spec)


@pytest.mark.parametrize("data", [SyntheticDataset, CriteoDataset, MovieLensDataset])
def test_tables_cover_every_feature_once(data: type) -> None:
    features = [name for table in data.tables for name in table.feature_names]
    assert sorted(features) == sorted(data.feature_names)


@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_a_position_goes_on_at_any_world_size_and_batch_size(shuffle_seed) -> None:
    """Two ranks draw two steps of the second epoch; then one rank, or three, give what is left of it, once each."""
    ranks = [batches(Numbers(40), 4, rank, 2, epochs=2, shuffle_seed=shuffle_seed) for rank in range(2)]
    running = [iter(loader) for loader in ranks]
    drawn = [[next(iterator).sparse.values().tolist() for _ in range(7)] for iterator in running]
    state = ranks[0].state_dict()
    assert state == ranks[1].state_dict() == running[0].state_dict()
    assert state == {"epoch": 1, "sample": 16, "samples": 40, "shuffle_seed": shuffle_seed}
    seen = [key for per_rank in drawn for step in per_rank[5:] for key in step]
    for world, size in ((1, 5), (3, 4), (2, 4)):
        rest: list[int] = []
        for rank in range(world):
            loader = batches(Numbers(40), size, rank, world, epochs=2, shuffle_seed=shuffle_seed)
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            rest += [key for step in keys(loader) for key in step]
            assert len(keys(loader)) == len(loader)  # the next iteration starts again
        assert sorted(seen + rest) == list(range(40))


def test_an_iterator_has_a_position_of_its_own() -> None:
    loader = batches(Numbers(6), 2)
    first, second = iter(loader), iter(loader)
    next(first)
    state = first.state_dict()
    assert (state["sample"], second.state_dict()["sample"]) == (2, 0)
    second.load_state_dict(state)
    assert (
        [b.sparse.values().tolist() for b in second] == [b.sparse.values().tolist() for b in first] == [[2, 3], [4, 5]]
    )
    assert first.state_dict() == {"epoch": 1, "sample": 0, "samples": 6, "shuffle_seed": None}
    loader.load_state_dict(first.state_dict())
    assert keys(loader) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 7}, "the state is of data with number of samples 7, this loader's is 6"),
        ({"shuffle_seed": 1}, "the state is of data with shuffle_seed 1, this loader's is None"),
        ({"epoch": -1}, "epoch and sample must be integers >= 0, got -1 and 0"),
        ({"sample": 9}, "the state's sample 9 is beyond the 6 samples"),
        ({"more": 1}, r"expected a state with \['epoch', 'sample', 'samples', 'shuffle_seed'\], got \['epoch', 'more'"),
    ],
)
def test_states_that_do_not_fit(changed, message) -> None:
    loader = batches(Numbers(6), 2)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), **changed})
    assert keys(loader) == [[0, 1], [2, 3], [4, 5]]
