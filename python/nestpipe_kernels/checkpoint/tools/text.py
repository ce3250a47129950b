"""Words of the tools' output: sizes, counts, tables, and progress of long work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

__all__ = ["Progress", "align", "count", "size"]

REPORT_S = 5.0


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 row`, `12,345 rows`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size(number: int) -> str:
    """Bytes in decimal units: `512 B`, `1.3 GB`."""
    if number < 1000:
        return f"{number} B"
    amount, units = number / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while amount >= 999.5 and len(units) > 1:
        amount /= 1000
        del units[0]
    unit = units[0]
    return f"{amount:.3g} {unit}" if amount < 100 else f"{amount:.0f} {unit}"


def align(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Lines of a table whose first row names the columns; `right` lists the columns that are aligned on the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if c in right else cell.ljust(w) for c, (cell, w) in enumerate(zip(row, widths))]
        lines.append(indent + "  ".join(cells).rstrip())
    return lines


class Progress:
    """A line on stderr every few seconds: how much of the work is done, and how fast."""

    def __init__(self, what: str, total: int, write: Callable[[str], None] | None = None) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._started = self._reported = time.perf_counter()
        self._write = write or (lambda line: print(line, file=sys.stderr, flush=True))

    def add(self, number: int) -> None:
        """So many more bytes are done."""
        self._done += number
        now = time.perf_counter()
        if now - self._reported >= REPORT_S:
            self._reported = now
            self._write(f"{self._what}: {size(self._done)} of {size(self._total)} {self.rate()}")

    @property
    def done(self) -> int:
        """Bytes so far."""
        return self._done

    def rate(self) -> str:
        """`in 0.1 s`, and from a second on also bytes a second since the start."""
        seconds = time.perf_counter() - self._started
        return f"in {seconds:.1f} s" + (f", {size(int(self._done / seconds))}/s" if seconds >= 1 else "")
