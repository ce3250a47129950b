"""Opening, replacing and syncing files of a checkpoint; every failure says which path and what to do."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ..errors import CheckpointError

__all__ = ["create_temporary", "explained", "open_regular", "publish", "remove_if_there", "sync_directory"]

_ADVICE = {
    errno.ENOSPC: "free some room or save elsewhere",
    errno.EDQUOT: "the quota is used up: free some room or save elsewhere",
    errno.EFBIG: "the file system or a limit of the process (ulimit -f) allows no file of this size",
    errno.EACCES: "this user may not do that: change the permissions or choose another directory",
    errno.EPERM: "this user may not do that: change the permissions or choose another directory",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.ENOENT: "the directory or file is not there: check the path",
    errno.ENOTDIR: "a part of the path is no directory: check the path",
    errno.EIO: "the device reports an error: check the disk and save elsewhere",
}
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def explained(error: OSError, doing: str, path: str | os.PathLike[str]) -> OSError:
    """The same kind of OSError, saying what was being done with which path and what to do."""
    advice = _ADVICE.get(error.errno or 0, "see the system's message")
    message = f"checkpoint: cannot {doing}: {error.strerror or error}: {advice}"
    return OSError(error.errno if error.errno is not None else errno.EIO, message, os.fspath(path))


def open_regular(path: Path) -> tuple[int, int]:
    """(descriptor for reading, bytes) of a regular file; links are not followed, nothing waits on a pipe.

    Raises:
        CheckpointError: the file is missing, a link, or no regular file.
        OSError: as the system reports it, explained.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_FOLLOW)
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint: {path} is missing: the checkpoint is incomplete (or was replaced by a newer one just now)"
        ) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CheckpointError(f"checkpoint: {path} must be a regular file, got a link or special file") from None
        raise explained(error, "open", path) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"checkpoint: {path} must be a regular file, got a {_kind(status.st_mode)}")
    return descriptor, status.st_size


def create_temporary(path: Path) -> tuple[int, Path]:
    """(descriptor, path) of a new empty file beside `path`; a left-over of the same name is removed first."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        remove_if_there(temporary)
        return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o666), temporary
    except OSError as error:
        raise explained(error, "create", temporary) from error


def publish(temporary: Path, path: Path) -> None:
    """Give a finished temporary file its final name."""
    try:
        os.replace(temporary, path)
    except OSError as error:
        raise explained(error, "rename a finished file to", path) from error


def remove_if_there(path: Path) -> None:
    """Unlink a file that may be missing."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # file systems that cannot sync directories
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise explained(error, "sync", directory) from error


def _kind(mode: int) -> str:
    for test, name in ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket")):
        if test(mode):
            return name
    return "device"
