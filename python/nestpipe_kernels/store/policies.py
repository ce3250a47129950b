"""Rules of admission and eviction on their way to native code: checks, numbers, and the call of a score function."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..policy import LFU, LRU, TTL, MinFrequency, Probability, Score
from ..types import TableSpec

__all__ = [
    "SEED_MASK",
    "check_policies",
    "has_policy",
    "native_admission",
    "native_eviction",
    "rows_in_bytes",
    "score_caller",
]

SEED_MASK = (1 << 64) - 1
RECORD_BYTES = 40
"""Of each row: key, table, last_used (and a short form of it), frequency, and what aligning them takes."""
INDEX_BYTES = 24
"""Of the index for each row, at its lowest load."""

ScoreCaller = Callable[[int, bytearray, bytearray, bytearray, int, int], None]


def check_policies(spec: TableSpec) -> None:
    """Raises TypeError or ValueError for rules that a table cannot have; the message names table and field."""
    if not isinstance(spec.admission, (MinFrequency, Probability, type(None))):
        raise TypeError(
            f"store: admission of table {spec.name!r} must be a MinFrequency or Probability of nestpipe_kernels.policy "
            f"or None, got {spec.admission!r}"
        )
    if not isinstance(spec.eviction, (LRU, LFU, TTL, Score, type(None))):
        raise TypeError(
            f"store: eviction of table {spec.name!r} must be an LRU, LFU, TTL or Score of nestpipe_kernels.policy or "
            f"None, got {spec.eviction!r}"
        )
    if spec.eviction is not None and spec.capacity is None and not isinstance(spec.eviction, TTL):
        raise ValueError(
            f"store: table {spec.name!r} has eviction {spec.eviction!r} but no capacity, so it would never evict: give "
            "capacity (rows) or capacity_bytes"
        )
    if spec.default is not None and not (hasattr(spec.default, "kind") and hasattr(spec.default, "parameters")):
        raise TypeError(
            f"store: default of table {spec.name!r} must be an nk.init object such as nk.init.Zeros() or None, "
            f"got {spec.default!r}"
        )


def has_policy(spec: TableSpec) -> bool:
    """Whether keys may stay without a row by rule, so that it is no error."""
    return spec.admission is not None or spec.eviction is not None


def rows_in_bytes(capacity_bytes: int, row_bytes: int, slack: float, where: str = "store") -> int:
    """Rows of `row_bytes` each that fit with records, index, and the rows in limbo of one round of eviction.

    Raises:
        ValueError: not an integer, or too small for a single row.
    """
    if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int):
        raise TypeError(f"{where}: capacity_bytes must be an integer, got {capacity_bytes!r}")
    each = row_bytes + RECORD_BYTES + INDEX_BYTES
    rows = int(capacity_bytes / (each * (1.0 + slack)))
    if rows < 1:
        raise ValueError(
            f"{where}: capacity_bytes {capacity_bytes} holds no row: one takes {each} bytes with its index"
        )
    return rows


def native_admission(spec: TableSpec) -> tuple[int, int, int, float, int]:
    """(kind, count, filter cells, probability, seed): csrc/include/nestpipe/admission.h."""
    rule = spec.admission
    if isinstance(rule, MinFrequency):
        return (1, rule.count, 0 if rule.filter is None else rule.filter.cells, 1.0, 0)
    if isinstance(rule, Probability):
        return (2, 1, 0, float(rule.probability), rule.seed & SEED_MASK)
    return (0, 1, 0, 1.0, 0)


def native_eviction(spec: TableSpec) -> tuple[int, int, int, int]:
    """(kind, rows to keep, steps, interval): csrc/include/nestpipe/eviction.h."""
    rule = spec.eviction
    if rule is None:
        return (0, 0, 0, 1)
    kind = {LRU: 1, LFU: 2, TTL: 3, Score: 4}[type(rule)]
    keep = 0 if spec.capacity is None else int(spec.capacity * (1.0 - rule.slack))
    return (kind, keep, rule.steps, rule.interval) if isinstance(rule, TTL) else (kind, keep, 0, 1)


def score_caller(tables: Sequence[TableSpec]) -> ScoreCaller | None:
    """What native code calls to rank rows: (table, keys, last_used, frequency as bytes of int64, batch, address of the
    float64 scores). None where no table evicts by score.
    """
    if not any(isinstance(spec.eviction, Score) for spec in tables):
        return None

    def call(table: int, keys: bytearray, last_used: bytearray, frequency: bytearray, batch: int, out: int) -> None:
        spec = tables[table]
        arguments = [torch.frombuffer(data, dtype=torch.int64) for data in (keys, last_used, frequency)]
        with torch.no_grad():
            scores = spec.eviction.function(*arguments, batch)
        values = _checked(spec.name, scores, arguments[0].numel())
        ctypes.memmove(out, values.data_ptr(), values.numel() * 8)

    return call


def _checked(table: str, scores: Tensor, size: int) -> Tensor:
    """float64 [size], contiguous, on the CPU, without NaN."""
    wanted = f"retrieve: the score function of table {table!r} must return a CPU tensor of float64 [{size}]"
    if not isinstance(scores, Tensor):
        raise TypeError(f"{wanted}, got {type(scores).__name__}; nothing was changed")
    found = f"{str(scores.dtype).removeprefix('torch.')} {list(scores.shape)} on {scores.device}"
    if scores.layout != torch.strided:
        raise TypeError(f"{wanted}, got {str(scores.layout).removeprefix('torch.')}; nothing was changed")
    if not scores.dtype.is_floating_point:
        raise TypeError(f"{wanted}, got {found}; nothing was changed")
    if list(scores.shape) != [size] or scores.device.type != "cpu":
        raise ValueError(f"{wanted}, got {found}; nothing was changed")
    values = scores.detach().to(torch.float64).contiguous()
    bad = int(values.isnan().sum())
    if bad:
        raise ValueError(f"{wanted} without NaN, got {bad} NaN; nothing was changed")
    return values
