"""The Criteo reader: both layouts, values by hand, and every error."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from nestpipe_kernels.data import CriteoDataset, read_criteo

HEADER = ",".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])
NUMBERS = ["", "-1", "19.0", "0", *[""] * 9]
CATEGORIES = ["68fd1e64", "", "ffffffff", "80000000", *["0000000a"] * 22]
ROW = ["1", *NUMBERS, *CATEGORIES]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "criteo.txt"
    path.write_text(text)
    return path


def check_values(data: CriteoDataset) -> None:
    batch = data.batch(torch.tensor([0]))
    assert batch.labels.tolist() == [1.0]
    expected = [0.0, -math.log(2), math.log(20), 0.0, *[0.0] * 9]
    assert batch.dense.dtype == torch.float32
    torch.testing.assert_close(batch.dense[0], torch.tensor(expected))
    features = {key: bag.values().tolist() for key, bag in batch.sparse.to_dict().items()}
    assert features["C1"] == [0x68FD1E64]
    assert features["C2"] == []
    assert features["C3"] == [2**32 - 1]
    assert features["C4"] == [2**31]
    assert features["C26"] == [10]
    assert batch.sparse.values().dtype == torch.int64


def test_csv_with_header_and_official_tsv_agree(tmp_path: Path) -> None:
    check_values(CriteoDataset(write(tmp_path, f"{HEADER}\n{','.join(ROW)}\n")))
    check_values(CriteoDataset(write(tmp_path, "\t".join(ROW) + "\n")))
    check_values(CriteoDataset(write(tmp_path, "\t".join(ROW) + "\r\n")))


def test_order_of_a_batch_is_key_major(tmp_path: Path) -> None:
    other = ["0", *NUMBERS, "", "00000001", *["0000000b"] * 24]
    data = CriteoDataset(write(tmp_path, "\n".join("\t".join(row) for row in (ROW, other))))
    batch = data.batch(torch.tensor([1, 0, 1]))
    assert [row.tolist() for row in batch.sparse["C1"].to_dense()] == [[], [0x68FD1E64], []]
    assert [row.tolist() for row in batch.sparse["C2"].to_dense()] == [[1], [], [1]]
    assert batch.labels.tolist() == [0, 1, 0]


def test_chunks_and_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "\n".join("\t".join([str(i % 2), *ROW[1:]]) for i in range(5)))
    assert [chunk.labels.tolist() for chunk in read_criteo(path, 2)] == [[0, 1], [0, 1], [0]]
    assert len(CriteoDataset(path)) == 5
    assert len(CriteoDataset(path, max_rows=3)) == 3


def test_first_rows_are_read_without_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path, "\t".join(ROW) + "\n" + "broken\n")
    assert len(CriteoDataset(path, max_rows=1)) == 1


def test_sample(criteo_sample: Path) -> None:
    data = CriteoDataset(criteo_sample)
    assert len(data) == 200
    assert data.num_dense == 13
    batch = data.batch(torch.arange(200))
    # First row: 0,,3,260.0,,17668.0,,,33.0,,,,0.0,,05db9164,08d6d899,... ,c0d61a5c,, (C19, C20, C22, C25, C26 blank)
    expected = [0, math.log1p(3), math.log1p(260), 0, math.log1p(17668), 0, 0, math.log1p(33), 0, 0, 0, 0, 0]
    torch.testing.assert_close(batch.dense[0], torch.tensor(expected))
    first = {key: bag.to_dense()[0].tolist() for key, bag in batch.sparse.to_dict().items()}
    assert first["C1"] == [0x05DB9164]
    assert first["C24"] == [0xC0D61A5C]
    assert [key for key, ids in first.items() if not ids] == ["C19", "C20", "C22", "C25", "C26"]
    assert batch.dense[1, 1].item() == pytest.approx(-math.log(2))
    lines = criteo_sample.read_text().splitlines()[1:]
    assert batch.labels.tolist() == [float(line[0]) for line in lines]
    filled = sum(bool(field) for line in lines for field in line.split(",")[14:])
    assert batch.sparse.values().numel() == filled
    assert int(batch.sparse.values().max()) >= 2**31


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW[:-1], r"line 2: expected 40 fields \(label, 13 numbers, 26 categories\), got '39 fields'"),
        (["2", *ROW[1:]], r"line 2: expected label 0 or 1, got '2'"),
        (["1", "x", *ROW[2:]], r"line 2: expected a number I1, got 'x'"),
        (["1", "nan", *ROW[2:]], r"line 2: expected a finite number I1, got 'nan'"),
        ([*ROW[:14], "xyz", *ROW[15:]], r"line 2: expected up to 8 hex digits C1, got 'xyz'"),
        ([*ROW[:14], "0123456789", *ROW[15:]], r"line 2: expected up to 8 hex digits C1, got '0123456789'"),
        ([*ROW[:14], "-1", *ROW[15:]], r"line 2: expected up to 8 hex digits C1, got '-1'"),
    ],
)
def test_malformed_rows(tmp_path: Path, row: list[str], message: str) -> None:
    path = write(tmp_path, "\t".join(ROW) + "\n" + "\t".join(row) + "\n")
    with pytest.raises(ValueError, match=message) as error:
        CriteoDataset(path)
    assert str(path) in str(error.value)


def test_other_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"criteo: no such file: .*absent\.txt"):
        CriteoDataset(tmp_path / "absent.txt")
    with pytest.raises(IsADirectoryError, match=r"criteo: expected a file, got the folder"):
        CriteoDataset(tmp_path)
    with pytest.raises(ValueError, match=r"criteo: .* is empty"):
        CriteoDataset(write(tmp_path, ""))
    with pytest.raises(ValueError, match=r"criteo: .* has a header but no rows"):
        CriteoDataset(write(tmp_path, HEADER + "\n"))
    with pytest.raises(ValueError, match=r"line 1: expected the header label,I1\.\.I13,C1\.\.C26, got 'J1'"):
        CriteoDataset(write(tmp_path, HEADER.replace("I1,", "J1,", 1) + "\n"))
    with pytest.raises(ValueError, match=r"expected the header .* got '39 columns'"):
        CriteoDataset(write(tmp_path, HEADER.removesuffix(",C26") + "\n"))
    with pytest.raises(ValueError, match=r"max_rows must be >= 1 or None, got 0"):
        CriteoDataset(tmp_path, max_rows=0)
