"""Which rank owns each key: the shared hash's virtual slice, looked up in the slice table."""

from __future__ import annotations

import torch
from torch import Tensor

from .._key_checks import check_implementation, check_vector, key_vector, table_vector
from . import native, reference

__all__ = ["NUM_SLICES", "default_slice_owner", "owners"]

NUM_SLICES = 65536
"""Virtual slices that the hash divides all keys into."""


def default_slice_owner(world_size: int) -> Tensor:
    """Slices dealt out in equal consecutive runs.

    Args:
        world_size: number of ranks W, 1 to 65,536.

    Returns:
        int32 [65536], slice * W // 65536.

    Raises:
        ValueError: `world_size` is out of range.
    """
    if not 1 <= world_size <= NUM_SLICES:
        raise ValueError(f"default_slice_owner: world_size must be in [1, {NUM_SLICES}], got {world_size}")
    return (torch.arange(NUM_SLICES, dtype=torch.int64) * world_size // NUM_SLICES).to(torch.int32)


def owners(
    keys: Tensor,
    tables: Tensor | None,
    table_hashes: Tensor,
    slice_owner: Tensor,
    *,
    implementation: str = "native",
) -> Tensor:
    """Find the rank that owns each key: `slice_owner[bits 48-63 of hash(table_hashes[table], key)]`.

    Args:
        keys: int64 [n] (int32 is widened), any values, on the CPU; n < 2^31.
        tables: int32 [n] in [0, T), the table of each key. None: all keys are of table 0.
        table_hashes: int64 [T], the hash of each table's name.
        slice_owner: int32 [65536], the rank that owns each virtual slice.
        implementation: "native" or "reference".

    Returns:
        int32 [n].

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: wrong number of dimensions or entries, not on the CPU, or unknown implementation.
        IndexError: a table is outside [0, T); names position and value.
    """
    check_implementation("owners", implementation)
    keys = key_vector("owners", "keys", keys)
    tables = table_vector("owners", "tables", tables, keys)
    table_hashes = check_vector("owners", "table_hashes", table_hashes, (torch.int64,)).contiguous()
    slice_owner = check_vector("owners", "slice_owner", slice_owner, (torch.int32,), NUM_SLICES).contiguous()
    run = native.owners if implementation == "native" else reference.owners
    found, bad_position = run(keys, tables, table_hashes, slice_owner)
    if bad_position >= 0:
        got = 0 if tables is None else int(tables[bad_position])
        raise IndexError(
            f"owners: tables must be in [0, {table_hashes.numel()}), got {got} at position {bad_position}; "
            "give table_hashes an entry for every table"
        )
    return found
