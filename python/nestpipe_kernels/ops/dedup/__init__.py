"""Distinct keys of a list, with inverse and counts, in order of first appearance."""

from __future__ import annotations

from torch import Tensor

from .._key_checks import check_implementation, key_vector, table_vector
from . import cuda, native, reference
from .result import DedupResult

__all__ = ["DedupResult", "dedup"]


def dedup(keys: Tensor, tables: Tensor | None = None, *, implementation: str = "native") -> DedupResult:
    """Find the distinct (table, key) pairs of a list, in order of first appearance.

    Linear time; the same result at any number of threads. Does not change its inputs.

    Args:
        keys: int64 [n] (int32 is widened), any values, any stride, on the CPU or a CUDA device; n < 2^31. There the
            call waits for the device once, to learn U.
        tables: int32 [n], the table of each key: equal keys of different tables are distinct. None: one table.
        implementation: "native" or "reference".

    Returns:
        On the keys' device: DedupResult with `unique_index` int64 [U], `inverse` int32 [n] and `counts` int64 [U].

    Raises:
        TypeError: `keys` are not integers of 32 or 64 bits, or `tables` not int32.
        ValueError: wrong number of dimensions, entries or keys, a device without kernels or two devices, or unknown
            implementation.
    """
    check_implementation("dedup", implementation)
    keys = key_vector("dedup", "keys", keys, on_device=True)
    tables = table_vector("dedup", "tables", tables, keys)
    if not keys.is_cpu:
        return cuda.dedup(keys, tables)
    return native.dedup(keys, tables) if implementation == "native" else reference.dedup(keys, tables)
