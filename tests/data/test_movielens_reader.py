"""The MovieLens reader: every layout, histories by hand and against a loop, and every error."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from nestpipe_kernels.data import Batch, MovieLensDataset, read_ratings

ROWS = [(7, 10, 5, 300), (8, 11, 3, 100), (7, 12, 4, 200), (7, 13, 2, 300), (8, 10, 4, 50)]
LAYOUTS = {
    "u.data": ["\t".join(map(str, row)) for row in ROWS],
    "ratings.dat": ["::".join(map(str, row)) for row in ROWS],
    "ratings.csv": ["userId,movieId,rating,timestamp", *(",".join(map(str, row)) for row in ROWS)],
    "x.inter": [
        "timestamp:float\tuser_id:token\titem_id:token\trating:float",
        *(f"{t}\t{u}\t{i}\t{r}" for u, i, r, t in ROWS),
    ],
    "sample.txt": [
        "user_id,movie_id,rating,timestamp,title,genres",
        *(f'{u},{i},{r},{t},"Film, The (1990)",Drama|War' for u, i, r, t in ROWS),
    ],
}


def bags(batch: Batch, feature: str) -> list[list[int]]:
    return [bag.tolist() for bag in batch.sparse[feature].to_dense()]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("\n".join(LAYOUTS[name]) + "\n")
    table = read_ratings(path)
    assert list(zip(table.users.tolist(), table.items.tolist(), table.ratings.tolist(), table.timestamps.tolist())) == [
        (float(u), i, r, t) for u, i, r, t in ROWS
    ]
    data = MovieLensDataset(path)
    batch = data.batch(torch.arange(len(data)))
    # By time: 8 rates 10 (50), 8 rates 11 (100), 7 rates 12 (200), then 10 and 13 (both 300, in file order).
    assert bags(batch, "user") == [[8], [8], [7], [7], [7]]
    assert bags(batch, "item") == [[10], [11], [12], [10], [13]]
    assert bags(batch, "history") == [[], [10], [], [12], [12, 10]]
    assert batch.labels.tolist() == [1, 0, 1, 1, 0]
    assert batch.dense.shape == (5, 0)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "sample.txt"])
def test_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n".join(LAYOUTS[name]))
    assert read_ratings(tmp_path).users.tolist() == [row[0] for row in ROWS]


def test_history_is_cut_to_the_latest(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("".join(f"1\t{i}\t4\t{i}\n" for i in range(60)))
    full = MovieLensDataset(tmp_path)
    assert bags(full.batch(torch.tensor([59])), "history") == [list(range(9, 59))]
    short = MovieLensDataset(tmp_path, history_length=2)
    assert bags(short.batch(torch.tensor([5, 1, 0])), "history") == [[3, 4], [0], []]
    none = MovieLensDataset(tmp_path, history_length=0)
    assert bags(none.batch(torch.tensor([5])), "history") == [[]]


def test_sample(movielens_sample: Path) -> None:
    data = MovieLensDataset(movielens_sample)
    assert len(data) == 200
    table = read_ratings(movielens_sample)
    assert (table.users[0], table.items[0], table.ratings[0]) == (3299, 235, 4)
    batch = data.batch(torch.arange(200))
    assert batch.labels.sum() == (table.ratings >= 4).sum()


def check_histories_against_a_loop(path: Path, stride: int) -> None:
    table, data = read_ratings(path), MovieLensDataset(path)
    order = sorted(range(len(data)), key=lambda i: (float(table.timestamps[i]), i))
    seen: dict[int, list[int]] = defaultdict(list)
    chosen = torch.arange(0, len(data), stride)
    histories = bags(data.batch(chosen), "history")
    for place, i in enumerate(order):
        user = int(table.users[i])
        if place % stride == 0:
            assert histories[place // stride] == seen[user][-50:]
        seen[user].append(int(table.items[i]))


def test_sample_histories(movielens_sample: Path) -> None:
    check_histories_against_a_loop(movielens_sample, 1)


def test_ml100k(ml100k: Path) -> None:
    data = MovieLensDataset(ml100k)
    assert len(data) == 100_000
    labels = data.batch(torch.arange(len(data))).labels
    assert int(labels.sum()) == 55_375
    check_histories_against_a_loop(ml100k, 97)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\t2\t3\n", r"line 1: expected 4 fields, got \['1', '2', '3'\]"),
        ("1\t2\t3\t4\n1\tx\t3\t4\n", r"line 2: expected an integer item, got 'x'"),
        ("1::2::five::4\n", r"line 1: expected a number rating, got 'five'"),
        ("1::2::3::inf\n", r"line 1: expected a finite number timestamp, got 'inf'"),
        (f"1::{2**63}::3::4\n", r"line 1: expected a 64-bit integer item, got '9223372036854775808'"),
        ("userId,movieId,rating\n1,2,3\n", r"line 1: expected one column timestamp in the header"),
        ("userId,movieId,rating,timestamp\n1,2,3,4\n1,2\n", r"line 3: expected 4 fields, got \['1', '2'\]"),
        ("item_id:token\trating:float\n", r"line 1: expected one column user_id or userId in the header"),
        ("hello\n", r"line 1: expected a \.inter header, .* or a CSV header, got 'hello'"),
        ("userId,movieId,rating,timestamp\n", r"has a header but no ratings"),
        ("", r"movielens: .* is empty"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ratings"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        MovieLensDataset(path)
    assert str(path) in str(error.value)


def test_long_lines_are_shortened_in_errors(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("x" * 5000)
    with pytest.raises(ValueError, match=r"got 'x+\.\.\.$") as error:
        read_ratings(tmp_path / "r")
    assert len(str(error.value)) < 500


def test_other_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"movielens: no such file: .*absent"):
        MovieLensDataset(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"has none of \*\.inter, u\.data, ratings\.dat, ratings\.csv"):
        MovieLensDataset(tmp_path)
    with pytest.raises(ValueError, match=r"history_length must be >= 0, got -1"):
        MovieLensDataset(tmp_path, history_length=-1)
    for name in ("u.data", "ratings.dat"):
        (tmp_path / name).write_text("\n".join(LAYOUTS[name]))
    with pytest.raises(ValueError, match=r"has several ratings files \(u\.data, ratings\.dat\); name one"):
        MovieLensDataset(tmp_path)
