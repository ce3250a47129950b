"""What the disk does by itself with files of given sizes: the yardstick for checkpoints."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["copy_files", "drop_from_cache", "read_files", "write_files"]

BLOCK = 4 << 20
"""Bytes of one call; larger ones are not faster."""
SMALL = 1 << 20
"""Bytes below which a file's place does not matter; systems keep small ones although asked to forget them."""
SAMPLES = 16
"""Places of a file at which it is asked whether it is still in memory."""


def write_files(directory: Path, sizes: Sequence[int]) -> float:
    """Write files one after the other from a prepared buffer, each fsynced, then the directory.

    Returns:
        Seconds.
    """
    buffer = memoryview(os.urandom(BLOCK))
    started = time.perf_counter()
    for number, size in enumerate(sizes):
        descriptor = os.open(directory / f"plain-{number:05d}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            left = size
            while left:
                left -= os.write(descriptor, buffer[: min(left, BLOCK)])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _sync_directory(directory)
    return time.perf_counter() - started


def read_files(paths: Iterable[Path]) -> float:
    """Read files front to back into one buffer. Returns seconds."""
    buffer = bytearray(BLOCK)
    started = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def copy_files(paths: Iterable[Path], directory: Path) -> float:
    """Copy files block by block into `directory`, each fsynced, then the directory. Returns seconds."""
    buffer = bytearray(BLOCK)
    started = time.perf_counter()
    for path in paths:
        descriptor = os.open(directory / path.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    done = 0
                    while done < count:
                        done += os.write(descriptor, memoryview(buffer)[done:count])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _sync_directory(directory)
    return time.perf_counter() - started


def drop_from_cache(paths: Iterable[Path]) -> bool | None:
    """Ask the system to forget files that are on the disk already, so that the next read comes from there.

    Returns:
        Whether it did, files below 1 MiB apart; None where that cannot be found out. The disk's own memory, or a
        virtual machine's host, may still hold them: compare with `read_files` of files that were treated alike.
    """
    verdicts = [_drop(path) for path in paths]
    return False if False in verdicts else (None if None in verdicts else True)


def _drop(path: Path) -> bool | None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if not hasattr(os, "posix_fadvise"):
            return None
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return _is_cold(descriptor, size)
    finally:
        os.close(descriptor)


def _is_cold(descriptor: int, size: int) -> bool | None:
    """A read that must not wait for the disk fails where there is nothing in memory."""
    if size < SMALL:
        return True
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    probe = bytearray(1)
    for sample in range(SAMPLES):
        try:
            os.preadv(descriptor, [probe], size * sample // SAMPLES, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return None
            raise
        return False
    return True


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
