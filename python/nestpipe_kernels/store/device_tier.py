"""Settings of a store whose rows lie in an accelerator's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..init import Custom
from ..policy import Score

__all__ = ["DeviceTier", "check_device_rules"]

MAX_DIM = 2048
LEAVE_OUT = "leave the DeviceTier out: then rows lie in host memory"


@dataclass(frozen=True)
class DeviceTier:
    """Rows of tables lie in the memory of an accelerator, with their index: for tables that fit there.

    Results are the same bits as without. A pipeline on that device moves rows between the store and its batches by
    kernels; only keys and row numbers cross the link. Reads and writes from outside, checkpoints among them, go through
    host memory. Tables with an admission rule, eviction by a function (policy.Score) or initial values from one
    (init.Custom) are refused, and so are several copies of the tables.

    Attributes:
        device: "cuda", "cuda:1" or a torch.device; "cuda" is the current one when the collection is made.
        load: keys for each slot of the index at most, in (0, 0.9]; the index takes 17 bytes a slot.
        rows_per_slab: rows that are allocated together, a power of two from 32 on; None: 32 MB of them.
        memory_bytes: bytes of index and rows at most, for each rank, and each group of tables with the same dim,
            storage type, optimizer and tier; None: as many as there are. Beyond it, or where the device has no memory
            left, new keys are a StoreFullError.

    Raises:
        TypeError, ValueError: a device that is none, or is the CPU; numbers out of range.
    """

    device: torch.device | str
    load: float = 0.75
    rows_per_slab: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.device, str | torch.device):
            raise TypeError(f"DeviceTier: device must be a torch.device or its name, got {self.device!r}")
        kind = str(self.device).partition(":")[0]
        if kind not in ("cuda", "npu"):
            raise ValueError(
                f"DeviceTier: device must be an accelerator such as 'cuda', got {str(self.device)!r}; for rows in host "
                "memory leave the tier out"
            )
        object.__setattr__(self, "device", str(self.device))
        if isinstance(self.load, bool) or not isinstance(self.load, int | float) or not 0.0 < self.load <= 0.9:
            raise ValueError(f"DeviceTier: load must be in (0, 0.9], got {self.load!r}")
        rows = self.rows_per_slab
        if rows is not None and (not _is_integer(rows) or rows < 32 or rows & (rows - 1)):
            raise ValueError(f"DeviceTier: rows_per_slab must be a power of two from 32 on, or None, got {rows!r}")
        if self.memory_bytes is not None and (not _is_integer(self.memory_bytes) or self.memory_bytes < 1):
            raise ValueError(f"DeviceTier: memory_bytes must be an integer >= 1, or None, got {self.memory_bytes!r}")


def check_device_rules(where: str, dim: int, admission: Any, eviction: Any, init: Any, default: Any) -> None:
    """Raises ValueError for what a table (`where`) cannot have while its rows lie on a device."""
    if dim > MAX_DIM:
        raise ValueError(f"{where}: rows on a device have up to {MAX_DIM} floats, got embedding_dim {dim}; {LEAVE_OUT}")
    if admission is not None:
        raise ValueError(f"{where}: admission {admission!r} does not work with rows on a device; {LEAVE_OUT}")
    if isinstance(eviction, Score):
        raise ValueError(
            f"{where}: eviction by a function (policy.Score) does not work with rows on a device; choose LRU, LFU or "
            f"TTL, or {LEAVE_OUT}"
        )
    if isinstance(init, Custom) or isinstance(default, Custom):
        raise ValueError(
            f"{where}: initial values from a function (init.Custom) do not work with rows on a device; {LEAVE_OUT}"
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
