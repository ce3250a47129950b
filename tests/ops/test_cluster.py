"""Clustering: the native order against the reference's, what an order must be, and how much it saves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe_kernels._native import core
from nestpipe_kernels.ops.cluster import OBJECTIVES, cluster, cluster_cost, partition_sizes
from nestpipe_kernels.ops.dedup import dedup


def topical_batch(num_samples: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples of `length` ids: most from the sample's topic (skewed), some popular everywhere; shuffled topics."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randint(12, (num_samples, 1), generator=generator)
    depth = (torch.rand(num_samples, length, generator=generator) ** 2 * 60).long()
    own = topic * 60 + depth
    popular = (torch.rand(num_samples, length, generator=generator) ** 3 * 300).long() + 720
    ids = torch.where(torch.rand(num_samples, length, generator=generator) < 0.7, own, popular)
    return torch.arange(num_samples + 1) * length, ids.reshape(-1)


def ragged(lengths: list[int], ids: list[int]) -> tuple[Tensor, Tensor]:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return offsets, torch.tensor(ids, dtype=torch.int64)


def objective_rows(order: Tensor, offsets: Tensor, ids: Tensor, num_parts: int, objective: str) -> int:
    cost = cluster_cost(order, offsets, ids, num_parts)
    if objective == "resend":
        assert isinstance(cost["rows"], int)
        return cost["rows"]
    first, last = cost["first_rows"], cost["last_rows"]
    assert isinstance(first, list)
    assert isinstance(last, list)
    return first[0] + last[-1]


def assert_valid(order: Tensor, num_samples: int, num_parts: int) -> None:
    assert order.dtype == torch.int64
    assert order.sort().values.tolist() == list(range(num_samples))
    for part in order.split(partition_sizes(num_samples, num_parts)):
        assert part.tolist() == sorted(part.tolist())


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("num_samples", "num_parts"), [(2, 2), (9, 3), (14, 4), (17, 5), (3, 8), (12, 7), (1, 4)])
def test_native_equals_reference(num_samples: int, num_parts: int, objective: str) -> None:
    offsets, ids = topical_batch(num_samples, 6, seed=num_samples)
    got = cluster(offsets, ids, num_parts, objective, seed=5)
    assert got.tolist() == cluster(offsets, ids, num_parts, objective, seed=5, implementation="reference").tolist()
    assert_valid(got, num_samples, num_parts)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 12), max_size=5), max_size=7),
    st.integers(1, 6),
    st.sampled_from(OBJECTIVES),
    st.integers(0, 2**64 - 1),
)
def test_property_native_equals_reference(samples: list[list[int]], num_parts: int, objective: str, seed: int) -> None:
    offsets, ids = ragged([len(sample) for sample in samples], [i for sample in samples for i in sample])
    got = cluster(offsets, ids, num_parts, objective, seed)
    assert_valid(got, len(samples), num_parts)
    assert torch.equal(got, cluster(offsets, ids, num_parts, objective, seed, implementation="reference"))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("num_parts", [2, 3, 8, 63, 65, 300])
def test_never_worse_than_the_identity(num_parts: int, objective: str) -> None:
    offsets, ids = topical_batch(200, 20)
    order = cluster(offsets, ids, num_parts, objective)
    assert_valid(order, 200, num_parts)
    rows = objective_rows(order, offsets, ids, num_parts, objective)
    assert rows <= objective_rows(torch.arange(200), offsets, ids, num_parts, objective)


@pytest.mark.parametrize(("objective", "saving"), [("resend", 0.25), ("send_once", 0.3)])
def test_saves_against_a_random_split(objective: str, saving: float) -> None:
    offsets, ids = topical_batch(512, 50)
    generator = torch.Generator().manual_seed(9)
    random = [objective_rows(torch.randperm(512, generator=generator), offsets, ids, 8, objective) for _ in range(3)]
    got = objective_rows(cluster(offsets, ids, 8, objective), offsets, ids, 8, objective)
    assert got < (1 - saving) * min(random)


def test_resend_finds_separable_groups() -> None:
    """Four groups of samples without common ids, dealt out like cards: the best order puts each in its own part."""
    ids = torch.stack([(sample % 4) * 10 + torch.arange(10) for sample in range(32)]).reshape(-1)
    offsets = torch.arange(33) * 10
    assert cluster_cost(cluster(offsets, ids, 4, "resend"), offsets, ids, 4)["rows"] == 40


def test_send_once_evens_out_the_middle() -> None:
    offsets, ids = topical_batch(512, 50)
    order = cluster(offsets, ids, 8, "send_once")
    sizes = partition_sizes(512, 8)
    middle = order[sizes[0] : -sizes[-1]].sort().values
    plain = torch.cat([order[: sizes[0]], middle, order[-sizes[-1] :]])

    def unevenness(of: Tensor) -> int:
        cost = cluster_cost(of, offsets, ids, 8)
        assert isinstance(cost["first_rows"], list)
        assert isinstance(cost["last_rows"], list)
        return sum(rows * rows for rows in cost["first_rows"] + cost["last_rows"])

    assert objective_rows(order, offsets, ids, 8, "send_once") == objective_rows(plain, offsets, ids, 8, "send_once")
    assert unevenness(order) < unevenness(plain)


@pytest.mark.parametrize(
    ("objective", "num_parts", "rows"),
    [
        ("resend", 4, 1977), ("resend", 8, 2907), ("resend", 16, 4131),
        ("send_once", 4, 896), ("send_once", 8, 658), ("send_once", 16, 414),
    ],
)  # fmt: skip
def test_rows_of_a_fixed_batch(objective: str, num_parts: int, rows: int) -> None:
    """Any change of these figures is a change of what every machine computes."""
    offsets, ids = topical_batch(512, 50)
    assert objective_rows(cluster(offsets, ids, num_parts, objective), offsets, ids, num_parts, objective) == rows


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_hot_and_single_ids_change_nothing_but_the_count(objective: str) -> None:
    """An id that all samples use, and ids that one sample alone uses (as many for each), do not move samples."""
    offsets, ids = topical_batch(128, 12)
    rows = ids.reshape(128, 12)
    lonely = torch.arange(128).unsqueeze(1) + 10_000
    wide = torch.cat([rows, lonely, torch.full((128, 1), 99_999)], 1)
    order = cluster(offsets, ids, 4, objective)
    wide_offsets = torch.arange(129) * 14
    got = cluster(wide_offsets, wide.reshape(-1), 4, objective)
    assert torch.equal(got, order)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_samples_with_very_many_ids(objective: str) -> None:
    """Counts that do not fit into 16 bits: as without the ids that all samples have."""
    offsets, ids = topical_batch(24, 6)
    common = (torch.arange(5000) + 10_000).expand(24, 5000)
    wide = torch.cat([ids.reshape(24, 6), common], 1)
    got = cluster(torch.arange(25) * 5006, wide.reshape(-1), 3, objective)
    assert_valid(got, 24, 3)
    assert torch.equal(got, cluster(offsets, ids, 3, objective))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_equal_samples_keep_their_order(objective: str) -> None:
    offsets, ids = ragged([3] * 10, [7, 8, 7] * 10)
    assert cluster(offsets, ids, 4, objective).tolist() == list(range(10))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_empty_bags_between_others(objective: str) -> None:
    lengths = [3, 0, 2, 0, 0, 3, 1, 0, 2, 4]
    offsets, ids = ragged(lengths, [i * i % 7 for i in range(sum(lengths))])
    order = cluster(offsets, ids, 4, objective, seed=1)
    assert_valid(order, 10, 4)
    assert torch.equal(order, cluster(offsets, ids, 4, objective, seed=1, implementation="reference"))


def test_costs_by_hand() -> None:
    offsets, ids = ragged([2, 1, 2, 1], [0, 1, 1, 2, 0, 3])
    cost = cluster_cost(torch.tensor([0, 1, 2, 3]), offsets, ids, 3)  # parts {0, 1}, {2}, {3}
    assert cost == {"rows": 5, "first_rows": [2, 1, 1], "last_rows": [1, 2, 1]}


def test_cost_relations() -> None:
    offsets, ids = topical_batch(100, 10)
    distinct = len(set(ids.tolist()))
    for num_parts in (1, 3, 8):
        cost = cluster_cost(torch.arange(100), offsets, ids, num_parts)
        assert isinstance(cost["first_rows"], list)
        assert isinstance(cost["last_rows"], list)
        assert sum(cost["first_rows"]) == sum(cost["last_rows"]) == distinct
        assert distinct <= int(str(cost["rows"])) <= num_parts * distinct


@pytest.mark.parametrize(("num_samples", "num_parts"), [(26, 3), (24, 4), (29, 5), (17, 20)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_large_batches_go_in_blocks_of_whole_parts(
    objective: str, num_samples: int, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestpipe_kernels.ops.cluster.MOST_TOGETHER", 10)
    offsets, ids = topical_batch(num_samples, 6)
    got = cluster(offsets, ids, num_parts, objective, seed=5)
    assert_valid(got, num_samples, num_parts)
    assert got.tolist() == cluster(offsets, ids, num_parts, objective, seed=5, implementation="reference").tolist()
    block = {3: 9, 4: 8, 5: 10, 20: 20}[num_parts]
    firsts = got[: partition_sizes(num_samples, num_parts)[0]]
    first_block = (
        cluster(offsets[: block + 1], ids[: block * 6], num_parts, objective, seed=5) if num_samples > block else got
    )
    assert firsts[firsts < block].tolist() == first_block[: len(firsts[firsts < block])].tolist()


def test_the_time_of_a_large_batch_grows_with_its_size() -> None:
    """65,536 samples: pricing all pairs of them would take minutes."""
    offsets, ids = topical_batch(65_536, 4)
    assert_valid(cluster(offsets, ids, 8, "resend"), 65_536, 8)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_deterministic_and_independent_of_threads(objective: str) -> None:
    offsets, ids = topical_batch(256, 30)
    first = cluster(offsets, ids, 8, objective, seed=3)
    before = core().num_threads()
    try:
        for threads in (1, 2, 4):
            core().set_num_threads(threads)
            assert torch.equal(cluster(offsets, ids, 8, objective, seed=3), first)
    finally:
        core().set_num_threads(before)
    assert not torch.equal(cluster(offsets, ids, 8, objective, seed=4), first)


def test_ids_need_not_be_dense() -> None:
    offsets, ids = topical_batch(64, 10)
    dense = dedup(ids).inverse.long()  # how other ids are renumbered
    expected = cluster(offsets, dense, 4, "resend")
    assert torch.equal(cluster(offsets, dense.to(torch.int32), 4, "resend"), expected)
    assert torch.equal(cluster(offsets, dense * 2**40 - 2**62, 4, "resend"), expected)
    assert torch.equal(cluster(offsets, torch.stack([dense, dense], 1)[:, 0], 4, "resend"), expected)


def test_repeats_in_a_sample_count_once() -> None:
    offsets, ids = topical_batch(40, 8)
    repeated = ids.reshape(40, 8).repeat(1, 3).reshape(-1)
    assert torch.equal(cluster(offsets * 3, repeated, 4, "resend"), cluster(offsets, ids, 4, "resend"))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_degenerate_inputs_keep_the_order(objective: str) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert cluster(torch.zeros(1, dtype=torch.int64), empty, 4, objective).numel() == 0
    assert cluster(torch.zeros(6, dtype=torch.int64), empty, 2, objective).tolist() == [0, 1, 2, 3, 4]
    offsets, ids = topical_batch(20, 5)
    assert cluster(offsets, ids, 1, objective).tolist() == list(range(20))


def test_partition_sizes() -> None:
    assert partition_sizes(10, 4) == [3, 3, 2, 2]
    assert partition_sizes(2, 4) == [1, 1, 0, 0]
    assert partition_sizes(0, 2) == [0, 0]


@pytest.mark.parametrize(
    ("replace", "error", "message"),
    [
        ({"objective": "x"}, ValueError, "cluster: unknown objective 'x': choose one of send_once, resend"),
        ({"num_parts": 0}, ValueError, "cluster: num_parts must be >= 1, got 0"),
        ({"seed": -1}, ValueError, "cluster: seed must be in [0, 2^64), got -1"),
        ({"implementation": "x"}, ValueError, "cluster: unknown implementation 'x'"),
        ({"ids": torch.zeros(4)}, TypeError, "cluster: ids must be int64 or int32, got float32 (shape [4])"),
        ({"ids": torch.zeros(4, 1, dtype=torch.int64)}, ValueError, "cluster: ids must have one dimension"),
        ({"ids": torch.zeros(4, dtype=torch.int64, device="meta")}, ValueError, "cluster: ids must be on the CPU"),
        ({"sample_offsets": torch.tensor([0, 4], dtype=torch.int32)}, TypeError, "sample_offsets must be int64"),
        ({"sample_offsets": torch.tensor([0, 3])}, ValueError, "must go from 0 to the number of ids 4, got 0 .. 3"),
        ({"sample_offsets": torch.tensor([1, 4])}, ValueError, "must go from 0 to the number of ids 4, got 1 .. 4"),
        ({"sample_offsets": torch.empty(0, dtype=torch.int64)}, ValueError, "number of ids 4, got no entries"),
        (
            {"sample_offsets": torch.tensor([0, 3, 2, 4])},
            ValueError,
            "cluster: sample_offsets must not decrease, got 2 after 3 at position 2",
        ),
    ],
)
def test_errors(replace: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {
        "sample_offsets": torch.tensor([0, 2, 4]),
        "ids": torch.tensor([0, 1, 1, 2]),
        "num_parts": 2,
        "objective": "resend",
        **replace,
    }
    with pytest.raises(error) as raised:
        cluster(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)
