"""Positions of the keys that two lists share."""

from __future__ import annotations

from torch import Tensor

from .._key_checks import check_implementation, key_vector, table_vector
from . import cuda, native, reference

__all__ = ["intersect"]


def intersect(
    keys_a: Tensor,
    tables_a: Tensor | None,
    keys_b: Tensor,
    tables_b: Tensor | None,
    *,
    implementation: str = "native",
) -> tuple[Tensor, Tensor]:
    """Find the (table, key) pairs that are in both lists.

    Meant for lists without duplicates. Should `a` repeat a pair, its first position counts; should `b`, each is listed.
    Linear time; the same result at any number of threads.

    Args:
        keys_a: int64 [n] (int32 is widened), any values, on the CPU or a CUDA device; n < 2^31. There the call waits
            for the device once, to learn m. All four are on one device.
        tables_a: int32 [n], the table of each key, or None (then `tables_b` too): one table.
        keys_b: int64 [k].
        tables_b: int32 [k] or None.
        implementation: "native" or "reference".

    Returns:
        index_a int64 [m], index_b int64 [m], on the keys' device: `keys_a[index_a]` equals `keys_b[index_b]`; index_b
        is ascending.

    Raises:
        TypeError: keys are not integers of 32 or 64 bits, or tables not int32.
        ValueError: one list has tables and the other not, wrong number of dimensions or entries, a device without
            kernels or two devices, or unknown implementation.
    """
    check_implementation("intersect", implementation)
    keys_a = key_vector("intersect", "keys_a", keys_a, on_device=True)
    keys_b = key_vector("intersect", "keys_b", keys_b, others=keys_a)
    if (tables_a is None) != (tables_b is None):
        given, missing = ("tables_b", "tables_a") if tables_a is None else ("tables_a", "tables_b")
        raise ValueError(f"intersect: {given} is given but {missing} is None; give both or neither")
    tables_a = table_vector("intersect", "tables_a", tables_a, keys_a)
    tables_b = table_vector("intersect", "tables_b", tables_b, keys_b)
    if not keys_a.is_cpu:
        return cuda.intersect(keys_a, tables_a, keys_b, tables_b)
    run = native.intersect if implementation == "native" else reference.intersect
    return run(keys_a, tables_a, keys_b, tables_b)
