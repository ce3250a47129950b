"""Reading text data line by line, with errors that name file and line."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["csv_rows", "malformed", "parse_finite", "parse_key", "read_lines"]


def read_lines(path: Path, what: str) -> Iterator[str]:
    """The lines of a file without their ends. Bytes that are not UTF-8 become U+FFFD (they occur in film titles).

    Raises:
        FileNotFoundError: no such file. IsADirectoryError: a folder. ValueError: an empty file.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{what}: expected a file, got the folder {path}")
    if not path.exists():
        raise FileNotFoundError(f"{what}: no such file: {path}")
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        empty = True
        for line in file:
            empty = False
            yield line.rstrip("\n")
    if empty:
        raise ValueError(f"{what}: {path} is empty")


def csv_rows(lines: Iterable[str], path: Path, first_line: int) -> Iterator[list[str]]:
    """Fields of CSV lines. Raises ValueError naming file and line where the format itself is broken."""
    reader = csv.reader(lines)
    try:
        yield from reader
    except csv.Error as error:
        raise ValueError(f"{path}, line {first_line - 1 + reader.line_num}: {error}") from None


def malformed(path: Path, line_number: int, expected: str, got: object) -> ValueError:
    """The error for a line (counted from 1) that does not say what it should."""
    shown = repr(got)
    if len(shown) > 100:
        shown = shown[:97] + "..."
    return ValueError(f"{path}, line {line_number}: expected {expected}, got {shown}")


def parse_key(text: str, path: Path, line_number: int, column: str) -> int:
    """A decimal int64. Raises ValueError naming file, line and column."""
    try:
        value = int(text)
    except ValueError:
        raise malformed(path, line_number, f"an integer {column}", text) from None
    if not -(2**63) <= value < 2**63:
        raise malformed(path, line_number, f"a 64-bit integer {column}", text)
    return value


def parse_finite(text: str, path: Path, line_number: int, column: str) -> float:
    """A finite number. Raises ValueError naming file, line and column."""
    try:
        value = float(text)
    except ValueError:
        raise malformed(path, line_number, f"a number {column}", text) from None
    if not math.isfinite(value):
        raise malformed(path, line_number, f"a finite number {column}", text)
    return value
