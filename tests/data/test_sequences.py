"""Histories in pieces, the items that come next, what is held out; and KuaiRand's files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kuairand_files import HEADER, write_log

from nestpipe_kernels.capture.split import split
from nestpipe_kernels.data import Interactions, SequenceBatch, SequenceDataset, batches, open_data, read_clicks


def interactions(rows: list[tuple[int, int, float]]) -> Interactions:
    users, items, times = zip(*rows) if rows else ((), (), ())
    return Interactions(
        torch.tensor(users, dtype=torch.int64), torch.tensor(items, dtype=torch.int64),
        torch.tensor(times, dtype=torch.float64),
    )  # fmt: skip


ROWS = [
    (7, 14, 500), (7, 10, 100), (7, 11, 200), (7, 12, 300), (7, 13, 400),  # in no order
    (8, 10, 1), (8, 20, 2),  # too short
    (-3, 30, 50), (-3, 31, 50), (-3, 32, 50),  # equal times: the order given
]  # fmt: skip


def lists(batch: SequenceBatch, name: str) -> list[list[int]]:
    return [part.tolist() for part in batch.sparse[name].to_dense()]


def test_pieces_have_what_came_next_and_leave_the_last_item_out() -> None:
    data = SequenceDataset("x", interactions(ROWS), max_length=2, num_candidates=5)
    whole = data.batch(torch.arange(len(data)))
    assert lists(whole, "sequence") == [[30], [10, 11], [12]]
    assert lists(whole, "target") == [[31], [11, 12], [13]]
    assert [part.tolist() for part in whole.times.to_dense()] == [[50], [100, 200], [300]]
    assert {len(part) for part in lists(whole, "candidates")} == {5}
    ranking = data.ranking()
    held_out = ranking.batch(torch.arange(len(ranking)))
    assert lists(held_out, "sequence") == [[30, 31], [12, 13]]
    assert lists(held_out, "target") == [[32], [14]]
    assert lists(held_out, "candidates") == [[10, 11, 12, 13, 14, 20, 30, 31, 32]] * 2


def test_a_sample_has_the_same_candidates_each_time() -> None:
    rows = [(user, item, item) for user in range(9) for item in range(user, user + 12)]
    data = SequenceDataset("x", interactions(rows), num_candidates=20)
    first = lists(data.batch(torch.arange(9)), "candidates")
    assert lists(data.batch(torch.tensor([4, 2])), "candidates") == [first[4], first[2]]
    assert len({tuple(each) for each in first}) == 9
    assert {key for each in first for key in each} <= set(range(20))
    other = SequenceDataset("x", interactions(rows), num_candidates=20, seed=1)
    assert lists(other.batch(torch.arange(9)), "candidates") != first


def test_batches_can_be_split_and_drawn() -> None:
    data = SequenceDataset("x", interactions(ROWS), max_length=2)
    (batch,) = batches(data, 8)
    second, first = split(batch, [torch.tensor([2, 0]), torch.tensor([1])])
    assert lists(second, "sequence") == [[12], [30]]
    assert second.times.values().tolist() == [300, 50]
    assert lists(first, "target") == [[11, 12]]
    assert len(batch.to("cpu")) == 3


@pytest.mark.parametrize("name", ["max_length", "num_candidates"])
@pytest.mark.parametrize("size", [0, 1.5, True])
def test_sizes_that_make_no_sense(name: str, size: Any) -> None:
    with pytest.raises(ValueError, match=rf"SequenceDataset: {name} must be an integer >= 1, got {size}"):
        SequenceDataset("x", interactions(ROWS), **{name: size})


def test_parts_of_seconds_count_for_the_order() -> None:
    data = SequenceDataset("x", interactions([(1, 10, 1.0), (1, 13, 2.9), (1, 12, 2.6), (1, 11, 2.1)]))
    assert lists(data.batch(torch.tensor([0])), "sequence") == [[10, 11]]
    assert data.ranking().batch(torch.tensor([0])).times.values().tolist() == [1, 2, 2]


@pytest.mark.parametrize("time", [1e300, float("nan"), -float("inf")])
def test_times_that_are_no_seconds(time: float) -> None:
    with pytest.raises(ValueError, match="x: times must be seconds within 2\\^53 of 0"):
        SequenceDataset("x", interactions([(1, 10, 1.0), (1, 11, 2.0), (1, 12, time)]))


def test_a_batch_of_no_samples() -> None:
    assert len(SequenceDataset("x", interactions(ROWS)).batch(torch.zeros(0, dtype=torch.int64))) == 0


def test_nothing_to_learn() -> None:
    with pytest.raises(ValueError, match="x: no user has three interactions"):
        SequenceDataset("x", interactions([(1, 2, 3), (1, 3, 4), (2, 5, 6)]))
    with pytest.raises(ValueError, match="x: no user has three interactions"):
        SequenceDataset("x", interactions([]))


def test_kuairand_gives_clicks(tmp_path: Path) -> None:
    clicked = write_log(tmp_path / "log_standard_4_08_to_4_21_pure.csv", 5, 40, 200)
    (tmp_path / "user_features_pure.csv").write_text("user_id\n")
    clicked += write_log(tmp_path / "log_standard_4_22_to_5_08_pure.csv", 5, 40, 200, seed=1)
    found = read_clicks(tmp_path)
    assert list(zip(found.users.tolist(), found.items.tolist(), found.times.floor().tolist())) == clicked
    data = open_data(f"kuairand:{tmp_path}", sequences=True)
    assert data.name == "kuairand" and len(data) >= 5


def test_movielens_as_sequences(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("1\t5\t3\t30\n1\t6\t3\t10\n1\t7\t1\t20\n")
    data = open_data(f"movielens:{tmp_path}", sequences=True)
    batch = data.batch(torch.tensor([0]))
    assert (lists(batch, "sequence"), lists(batch, "target")) == ([[6]], [[7]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "user_id,video_id\n",
            r"line 1: expected columns user_id, video_id, time_ms, is_click \(missing: time_ms, is_",
        ),
        (HEADER + "\n1,2\n", r"line 2: expected 19 fields, got \['1', '2'\]"),
        (HEADER + "\n1,2,3,4,5,maybe" + ",0" * 13 + "\n", r"line 2: expected is_click 0 or 1, got 'maybe'"),
        (HEADER + "\nx,2,3,4,5,1" + ",0" * 13 + "\n", r"line 2: expected an integer user_id, got 'x'"),
        (HEADER + "\n1,2,3,4,5,0" + ",0" * 13 + "\n", r"has no clicks"),
        (HEADER + "\n1" + "2" * 200_000 + ",1\n", r"line 2: field larger than field limit"),
        ("", r"is empty"),
    ],
)
def test_kuairand_errors(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "log_x.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_clicks(tmp_path)


def test_folder_without_logs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"kuairand: the folder {tmp_path} has no log_*.csv")):
        read_clicks(tmp_path)


def test_data_without_sequences() -> None:
    with pytest.raises(ValueError, match="data synthetic has no sequences: choose movielens:PATH or kuairand:PATH"):
        open_data("synthetic", sequences=True)
