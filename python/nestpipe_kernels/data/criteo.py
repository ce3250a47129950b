"""Criteo display advertising: click labels from 13 numbers and 26 hashed categories.

Two layouts are read, told apart by their first line: CSV with the header `label,I1..I13,C1..C26`, and the official
tab-separated file without header. Numbers become sign(v) * log1p(|v|), so negative ones (I2 goes down to -3) keep
their order; a blank becomes 0, the value of v = 0. A category of up to 8 hex digits becomes an int64 key below 2^32;
a blank is an empty bag (no key, and zeros from the table). Rows stay in file order, which is by time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestpipe_kernels.data.batch import Batch
from nestpipe_kernels.data.dataset import DEFAULT_BATCH_SIZE, TableSchema
from nestpipe_kernels.data.text_files import malformed, parse_finite, read_lines
from nestpipe_kernels.jagged import KeyedJaggedTensor

__all__ = ["CriteoChunk", "CriteoDataset", "read_criteo"]

NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
_HEADER = ("label", *NUMBERS, *CATEGORIES)
_HEX = re.compile(r"[0-9a-fA-F]{1,8}").fullmatch


@dataclass
class CriteoChunk:
    """Consecutive rows of a file."""

    labels: Tensor
    """float32 [n], 0 or 1."""
    dense: Tensor
    """float32 [n, 13], transformed as the module says."""
    keys: Tensor
    """int64 [n, 26]; 0 where blank."""
    present: Tensor
    """bool [n, 26], False where blank."""


def read_criteo(path: str | Path, rows_per_chunk: int = 65536) -> Iterator[CriteoChunk]:
    """Stream a Criteo file in chunks of at most `rows_per_chunk` rows.

    Raises:
        FileNotFoundError, IsADirectoryError: no such file.
        ValueError: an empty file or a row that is not Criteo's, with file, line, expected and got.
    """
    path = Path(path)
    delimiter = ""
    rows: list[tuple[float, list[float], list[int]]] = []
    num_rows = 0
    for number, line in enumerate(read_lines(path, "criteo"), 1):
        if number == 1:
            delimiter = "\t" if "\t" in line else ","
            if line.startswith("label"):
                _check_header(line.split(delimiter), path)
                continue
        rows.append(_parse_row(line.split(delimiter), path, number))
        num_rows += 1
        if len(rows) == rows_per_chunk:
            yield _chunk(rows)
            rows = []
    if not num_rows:
        raise ValueError(f"criteo: {path} has a header but no rows")
    if rows:
        yield _chunk(rows)


def _check_header(names: list[str], path: Path) -> None:
    if tuple(names) != _HEADER:
        wrong = next((n for n, e in zip(names, _HEADER) if n != e), f"{len(names)} columns")
        raise malformed(path, 1, "the header label,I1..I13,C1..C26", wrong)


def _parse_row(fields: list[str], path: Path, number: int) -> tuple[float, list[float], list[int]]:
    """Label, numbers (NaN where blank), keys (-1 where blank)."""
    if len(fields) != len(_HEADER):
        raise malformed(
            path, number, f"{len(_HEADER)} fields (label, 13 numbers, 26 categories)", f"{len(fields)} fields"
        )
    if fields[0] not in ("0", "1"):
        raise malformed(path, number, "label 0 or 1", fields[0])
    numbers = [
        parse_finite(text, path, number, column) if text else float("nan")
        for column, text in zip(NUMBERS, fields[1:14])
    ]
    keys = []
    for column, text in zip(CATEGORIES, fields[14:]):
        if text and not _HEX(text):
            raise malformed(path, number, f"up to 8 hex digits {column}", text)
        keys.append(int(text, 16) if text else -1)
    return float(fields[0]), numbers, keys


def _chunk(rows: list[tuple[float, list[float], list[int]]]) -> CriteoChunk:
    labels, numbers, keys = zip(*rows)
    raw = np.array(numbers, dtype=np.float64)
    dense: npt.NDArray[np.float64] = np.sign(raw) * np.log1p(np.abs(raw))
    ids = torch.tensor(keys, dtype=torch.int64)
    present = ids >= 0
    return CriteoChunk(
        torch.tensor(labels, dtype=torch.float32),
        torch.from_numpy(np.nan_to_num(dense, nan=0.0).astype(np.float32)),
        torch.where(present, ids, 0),
        present,
    )


class CriteoDataset:
    """A Criteo file in memory (300 bytes a row).

    Args:
        path: the file.
        max_rows: read only the first so many rows; None for all.

    Raises:
        FileNotFoundError, IsADirectoryError, ValueError: as `read_criteo`.
    """

    name = "criteo"
    num_dense = len(NUMBERS)
    feature_names = CATEGORIES
    tables = tuple(TableSchema(name, (name,)) for name in CATEGORIES)
    default_batch_size = DEFAULT_BATCH_SIZE

    def __init__(self, path: str | Path, max_rows: int | None = None) -> None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"criteo: max_rows must be >= 1 or None, got {max_rows}")
        chunks, num_rows = [], 0
        for chunk in read_criteo(path, min(65536, max_rows or 65536)):
            chunks.append(chunk)
            num_rows += chunk.labels.numel()
            if max_rows is not None and num_rows >= max_rows:
                break
        self._labels = torch.cat([chunk.labels for chunk in chunks])[:max_rows]
        self._dense = torch.cat([chunk.dense for chunk in chunks])[:max_rows]
        self._keys = torch.cat([chunk.keys for chunk in chunks])[:max_rows]
        self._present = torch.cat([chunk.present for chunk in chunks])[:max_rows]

    def __len__(self) -> int:
        return self._labels.numel()

    def batch(self, indices: Tensor) -> Batch:
        """The rows at `indices` (int64 [m])."""
        present = self._present[indices].t().reshape(-1)  # key-major
        keys = self._keys[indices].t().reshape(-1)[present]
        sparse = KeyedJaggedTensor(self.feature_names, keys, lengths=present.to(torch.int64), stride=indices.numel())
        return Batch(self._dense[indices], sparse, self._labels[indices])
