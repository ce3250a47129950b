"""What the disk does by itself with files of given sizes: the yardstick for checkpoints."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["cached_share", "copy_files", "drop_from_cache", "random_reads", "read_files", "write_files"]

BLOCK = 4 << 20
"""Bytes of one call; larger ones are not faster."""
ATTEMPTS = 3
"""To make the system forget files: others may hold on to pages for a moment."""
COLD = 0.01
"""Share of pages that may still be in memory where files count as forgotten."""


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


def random_reads(path: Path, count: int, seed: int) -> float:
    """Read pages at random places as a tier does: ask for all at once, then touch each through a mapping.

    The file must not be in the system's cache (`drop_from_cache`). Returns seconds.
    """
    chosen = random.Random(seed).sample(range(path.stat().st_size // mmap.PAGESIZE), count)
    chosen.sort()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        started = time.perf_counter()
        for page in chosen:
            os.posix_fadvise(file.fileno(), page * mmap.PAGESIZE, mmap.PAGESIZE, os.POSIX_FADV_WILLNEED)
        for page in chosen:
            mapped[page * mmap.PAGESIZE]
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
    """Sync files and ask the system to forget them, so that the next read comes from the disk.

    Returns:
        Whether it did, up to 1 % of their pages; None where the system cannot tell. The disk's own memory, or a
        virtual machine's host, may still hold them: compare with `read_files` of files that were treated alike.
    """
    paths = list(paths)
    if not hasattr(os, "posix_fadvise"):
        return None
    share: float | None = None
    for _ in range(ATTEMPTS):
        for path in paths:
            _drop(path)
        share = cached_share(paths)
        if share is None or share <= COLD:
            break
        time.sleep(0.1)
    return None if share is None else share <= COLD


def _drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # pages that wait to be written stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_share(paths: Iterable[Path]) -> float | None:
    """Share of the pages of files that are in memory, by mincore(2), which reads none; None where it cannot tell."""
    pages = cached = 0
    for path in paths:
        found = _pages_in_memory(path)
        if found is None:
            return None
        pages += len(found)
        cached += sum(page & 1 for page in found)
    return cached / max(1, pages)


def _pages_in_memory(path: Path) -> bytes | None:
    """One byte for each page of a file."""
    size = path.stat().st_size
    if size == 0:
        return b""
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError):
        return None
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    found = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    # Private and writable, as ctypes takes no address of read-only memory; nothing is written.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        place = ctypes.c_char.from_buffer(mapped)
        failed = mincore(ctypes.addressof(place), size, found)
        del place
    return None if failed else found.raw


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
