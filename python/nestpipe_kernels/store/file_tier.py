"""Settings of a store whose rows lie in a file, with only some of them in memory."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileTier", "warn_if_in_memory"]

SMALLEST = 1 << 16
"""Fewer bytes hold no batch."""
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that keep their files in memory."""


@dataclass(frozen=True)
class FileTier:
    """Rows of tables lie in a file; those used last are in memory, others come from the disk when a batch needs them.

    Results are the same bits as without. Index and metadata (64 bytes a row) stay in memory. A pipeline reads ahead:
    once it knows a later batch's keys, it asks the disk for their rows (stage `warm`), so that they are there in time.

    The file has no name: nothing is left behind however the process ends, and removing the directory does no harm. It
    grows with the rows and never shrinks; its space on the disk is free again when the store is, or its process ends.
    A forked child cannot use the store, and keeps the space until it ends, too.

    Attributes:
        directory: where the file is made: an existing directory on a local disk, one for all ranks of a machine or not.
        memory_bytes: how many bytes of rows stay in memory, at least 64 KiB; for each rank, and each group of tables
            with the same dim, storage type, optimizer and tier. Rows of three batches should fit, or are read twice;
            what one batch reads may be in memory beyond it for a moment.

    Raises:
        TypeError, ValueError: not a path, or memory_bytes too small or not an integer.
    """

    directory: str | os.PathLike[str]
    memory_bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | os.PathLike):
            raise TypeError(f"FileTier: directory must be a path, got {self.directory!r}")
        object.__setattr__(self, "directory", str(Path(self.directory).absolute()))
        if isinstance(self.memory_bytes, bool) or not isinstance(self.memory_bytes, int):
            raise TypeError(f"FileTier: memory_bytes must be an integer, got {self.memory_bytes!r}")
        if self.memory_bytes < SMALLEST:
            raise ValueError(
                f"FileTier: memory_bytes must be >= {SMALLEST} (64 KiB), got {self.memory_bytes}: rows of three "
                "batches should fit"
            )


def warn_if_in_memory(tier: FileTier) -> None:
    """Warn where the directory's file system keeps files in memory, so that the tier saves none."""
    try:
        device = os.stat(tier.directory).st_dev
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields = line.split()
        if fields[2] == wanted and fields[fields.index("-") + 1] in IN_MEMORY:
            warnings.warn(
                f"FileTier: directory '{tier.directory}' is on {fields[fields.index('-') + 1]}, which keeps its files "
                "in memory, so rows there save none; choose a directory on a disk",
                UserWarning,
                stacklevel=4,
            )
            return
