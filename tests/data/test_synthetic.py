"""The generator: the same samples for everyone, Zipf's shape, and what its settings promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe_kernels.data import Batch, SyntheticConfig, SyntheticDataset


def flat(batch: Batch) -> list[list[float]]:
    """Everything about each sample."""
    features = [batch.sparse[key].to_dense() for key in batch.sparse.keys()]  # noqa: SIM118
    return [
        [float(batch.labels[i]), *batch.dense[i].tolist(), *(float(x) for f in features for x in f[i])]
        for i in range(len(batch))
    ]


def test_samples_do_not_depend_on_batch_or_order() -> None:
    data = SyntheticDataset(SyntheticConfig(seed=3))
    whole = flat(data.batch(torch.arange(100)))
    order = torch.tensor([99, 5, 5, 0])
    assert flat(data.batch(order)) == [whole[i] for i in order.tolist()]
    assert flat(SyntheticDataset(SyntheticConfig(seed=3)).batch(torch.arange(100))) == whole


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def _word(seed: int, stream: int, counter: int) -> int:
    start = _mix((seed * 0x9E3779B97F4A7C15 + stream + 1) % 2**64)
    return _mix((counter * 0xD1342543DE82EF95 + start) % 2**64)


@pytest.mark.parametrize("seed", [0, 1, -7, 2**63])
def test_users_by_plain_integers(seed: int) -> None:
    """The same arithmetic with Python's integers: a change of the generator is noticed, and so is an overflow."""
    shares = np.cumsum([(r + 1) ** -1.05 for r in range(1000)])
    expected = []
    for sample in range(20):
        uniform = (_word(seed, 0, sample) >> 11) / 2**53
        rank = int(np.sum(shares[:-1] / shares[-1] <= uniform))
        key = _word(seed, 8, rank)
        expected.append(key - 2**64 if key >= 2**63 else key)
    data = SyntheticDataset(SyntheticConfig(seed=seed, num_users=1000))
    assert data.batch(torch.arange(20)).sparse["user"].values().tolist() == expected


def test_seeds_differ() -> None:
    one, two = (SyntheticDataset(SyntheticConfig(seed=s)).batch(torch.arange(50)) for s in (0, 1))
    assert not set(one.sparse.values().tolist()) & set(two.sparse.values().tolist())


def test_keys_use_the_whole_of_int64_and_history_shares_items() -> None:
    sparse = SyntheticDataset().batch(torch.arange(2000)).sparse
    keys = sparse.values().double()
    assert keys.min() < -(2.0**62)
    assert keys.max() > 2.0**62
    items, history = (set(sparse[name].values().tolist()) for name in ("item", "history"))
    assert len(items & history) > len(items) // 2
    assert not items & set(sparse["user"].values().tolist())


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.5])
def test_users_follow_zipf(exponent: float) -> None:
    config = SyntheticConfig(num_users=50, zipf_exponent=exponent, max_history=0, num_dense=0)
    n = 40_000
    users = SyntheticDataset(config).batch(torch.arange(n)).sparse["user"].values()
    counts = np.sort(torch.unique(users, return_counts=True)[1].numpy())[::-1]
    expected = np.arange(1, 51, dtype=np.float64) ** -exponent
    expected *= n / expected.sum()
    assert len(counts) == 50
    # Five standard deviations of a binomial count; sorting keeps counts within that of the sorted expectation.
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected) + 1)


def test_history_lengths() -> None:
    config = SyntheticConfig(mean_history=5.0, max_history=1000)
    lengths = SyntheticDataset(config).batch(torch.arange(20_000)).sparse["history"].lengths().double()
    assert float(lengths.mean()) == pytest.approx(5.0, abs=5 * 5.5 / 20_000**0.5)
    assert float((lengths == 0).double().mean()) == pytest.approx(1 / 6, abs=0.015)
    short = SyntheticDataset(SyntheticConfig(mean_history=5.0, max_history=3)).batch(torch.arange(500))
    assert int(short.sparse["history"].lengths().max()) == 3
    none = SyntheticDataset(SyntheticConfig(mean_history=0.0)).batch(torch.arange(10))
    assert none.sparse["history"].values().numel() == 0


def test_topics_make_users_of_a_topic_share_items() -> None:
    def distinct(affinity: float) -> int:
        config = SyntheticConfig(num_users=1, topic_affinity=affinity, num_items=64_000, zipf_exponent=0.5)
        return SyntheticDataset(config).batch(torch.arange(3000)).sparse["item"].values().unique().numel()

    assert distinct(1.0) <= 1000  # one user, one topic: 64,000 items / 64 topics
    assert distinct(0.0) > 2000


def test_dense_numbers_and_labels() -> None:
    batch = SyntheticDataset(SyntheticConfig(num_dense=3)).batch(torch.arange(20_000))
    assert batch.dense.shape == (20_000, 3)
    assert batch.dense.dtype == torch.float32
    torch.testing.assert_close(batch.dense.mean(0), torch.zeros(3), atol=0.04, rtol=0)
    torch.testing.assert_close(batch.dense.std(0), torch.ones(3), atol=0.04, rtol=0)
    assert set(batch.labels.tolist()) == {0.0, 1.0}
    high, low = (float(batch.labels[mask].mean()) for mask in (batch.dense[:, 0] > 0, batch.dense[:, 0] <= 0))
    assert high - low > 0.1  # the first number bears on the label
    assert SyntheticDataset(SyntheticConfig(num_dense=0)).batch(torch.arange(4)).dense.shape == (4, 0)


def test_empty_batch() -> None:
    batch = SyntheticDataset().batch(torch.empty(0, dtype=torch.int64))
    assert len(batch) == 0
    assert batch.sparse.stride() == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_users": 0}, r"num_users must be >= 1, got 0"),
        ({"num_samples": -1}, r"num_samples must be >= 0, got -1"),
        ({"zipf_exponent": -0.5}, r"zipf_exponent must be >= 0, got -0.5"),
        ({"mean_history": float("nan")}, r"mean_history must be >= 0, got nan"),
        ({"topic_affinity": 1.5}, r"topic_affinity must be in 0 \.\. 1, got 1.5"),
        ({"num_items": 3, "num_topics": 4}, r"num_topics must be <= num_items \(3\), got 4"),
    ],
)
def test_errors(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyntheticConfig(**settings)  # type: ignore[arg-type]
