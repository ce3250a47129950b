"""A checkpoint's directory as the tools find it: its manifest, or why there is none, and what does not belong to it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from nestpipe_kernels.checkpoint.filesystem import explained
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.names import MANIFEST_NAME, generation_of
from nestpipe_kernels.checkpoint.tools.text import count, size
from nestpipe_kernels.errors import CheckpointError

__all__ = ["describe_leftovers", "leftovers", "read_manifest"]


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a directory.

    Raises:
        CheckpointError: no directory, no manifest (says whether an unfinished save left files), or a damaged one.
        OSError: the system could not read it.
    """
    if not os.path.lexists(directory):
        raise CheckpointError(f"checkpoint: there is no directory {directory}; check the path")
    if not directory.is_dir():
        raise CheckpointError(
            f"checkpoint: {directory} must be the directory of a checkpoint, got a file"
            + (f"; give {directory.parent}" if directory.name == MANIFEST_NAME else "")
        )
    if os.path.lexists(directory / MANIFEST_NAME):
        return Manifest.load(directory)
    left = leftovers(directory, ())
    if left:
        raise CheckpointError(
            f"checkpoint: {directory} has no {MANIFEST_NAME}, only {describe_leftovers(directory, left)}: "
            "its first save did not get to its end; nothing can be loaded, save again"
        )
    raise CheckpointError(
        f"checkpoint: {directory} has no {MANIFEST_NAME}: it is no checkpoint, or was emptied; check the path"
    )


def leftovers(directory: Path, listed: Iterable[str]) -> list[str]:
    """Names of files that a save, or a reshard, wrote and that the manifest does not list.

    Raises:
        OSError: the directory cannot be listed.
    """
    known = set(listed)
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise explained(error, "list", directory) from error
    temporary = f"{MANIFEST_NAME}.tmp"
    return [name for name in names if name not in known and (generation_of(name) is not None or name == temporary)]


def describe_leftovers(directory: Path, names: list[str]) -> str:
    """`3 files of an unfinished save (generation 8, 1.2 GB)`."""
    total = 0
    for name in names:
        try:
            total += os.lstat(directory / name).st_size
        except FileNotFoundError:  # a save that is under way has renamed it meanwhile
            continue
    generations = sorted({g for name in names if (g := generation_of(name)) is not None})
    which = f"generation {', '.join(map(str, generations))}, " if generations else ""
    return f"{count(len(names), 'file')} of an unfinished save ({which}{size(total)})"
