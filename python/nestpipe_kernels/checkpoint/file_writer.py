"""Writes one tensor file, streaming, with a SHA-256 per tensor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .filesystem import create_temporary, explained, publish, remove_if_there
from .layout import FileRecord, TensorRecord, dtype_name, file_layout
from .workers import OrderedWorkers

__all__ = ["TensorFileWriter"]

_PIECE = 8 << 20
"""Bytes that are hashed and written at once."""
_THREADS_FROM = 4 << 20
"""Bytes of a file from which on threads hash and write."""
_BYTES_BEHIND = 16 << 20
"""What may wait to be written, bytes."""


class TensorFileWriter:
    """Writes one file beside its final name, and gives it that name when all is on the disk.

    Rows of each tensor are given in order; tensors may take turns. Hashing and writing happen in threads of its own,
    up to 16 MiB behind, so a chunk must not be changed after it was given. Use as a context manager: leaving
    it before `close` returned removes the temporary file.

    Args:
        path: the final name; a temporary file `<name>.tmp` lies beside it meanwhile.
        tensors: name -> (data type, shape), complete.
        inline: hash and write in the calling thread. Different tensors may then be written by different threads.

    Raises:
        CheckpointError: a data type, name or shape that files cannot hold.
        OSError: the file cannot be made; PermissionError, FileNotFoundError and so on as the system says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        *,
        inline: bool = False,
    ) -> None:
        self.path = Path(path)
        self._layout = file_layout({name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()})
        self._inline = inline or self._layout.size < _THREADS_FROM
        self._written = dict.fromkeys(self._layout.regions, 0)
        self._hashes = {name: hashlib.sha256() for name in self._layout.regions}
        self._descriptor, self._temporary = create_temporary(self.path)
        self._workers = OrderedWorkers(_BYTES_BEHIND, f"write {self.path.name}")
        try:
            self._put(self._layout.prefix, 0)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, chunk: Tensor) -> None:
        """The next rows of a tensor.

        Args:
            name: of the tensor.
            chunk: [rows, *shape[1:]] of the tensor's data type; for a scalar the scalar itself.

        Raises:
            CheckpointError: unknown tensor, wrong data type or shape, or more rows than announced.
            OSError: an earlier or this chunk could not be written; the temporary file is gone.
        """
        region = self._layout.regions.get(name)
        if region is None:
            raise CheckpointError(f"checkpoint: {self.path}: no tensor {name!r} was announced")
        chunk = chunk.detach().cpu().contiguous()
        if chunk.numel() == 1:  # counts as contiguous with any stride, which view() refuses
            chunk = chunk.clone(memory_format=torch.contiguous_format)
        if chunk.dtype != region.dtype or chunk.shape[1:] != torch.Size(region.shape[1:]):
            raise CheckpointError(
                f"checkpoint: {self.path}: tensor {name!r} takes {region.dtype} rows of {list(region.shape[1:])}, "
                f"got {chunk.dtype} {list(chunk.shape)}"
            )
        data = chunk.reshape(-1).view(torch.uint8).numpy().data
        at = self._written[name]
        if at + len(data) > region.size:
            raise CheckpointError(
                f"checkpoint: {self.path}: tensor {name!r} has {region.size} bytes, got {at + len(data)}"
            )
        self._written[name] = at + len(data)
        if self._inline:
            self._store(name, region.offset + at, data)
            return
        try:
            self._workers.put(name, lambda: self._store(name, region.offset + at, data), len(data))
        except BaseException:
            self.abort()
            raise

    def close(self) -> FileRecord:
        """Wait for everything, sync, give the file its name, and say what it holds.

        The directory is not synced: the caller does that once for all its files.

        Raises:
            CheckpointError: a tensor is not complete.
            OSError: something could not be written; the temporary file is gone.
        """
        try:
            self._workers.finish()
            for name, region in self._layout.regions.items():
                if self._written[name] != region.size:
                    raise CheckpointError(
                        f"checkpoint: {self.path}: tensor {name!r} has {region.size} bytes, "
                        f"only {self._written[name]} were given"
                    )
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise explained(error, "sync", self._temporary) from error
            os.close(self._descriptor)
            self._descriptor = -1
            publish(self._temporary, self.path)
        except BaseException:
            self.abort()
            raise
        tensors = {
            name: TensorRecord(dtype_name(region.dtype), region.shape, self._hashes[name].hexdigest())
            for name, region in self._layout.regions.items()
        }
        return FileRecord(self._layout.size, hashlib.sha256(self._layout.prefix).hexdigest(), tensors)

    def abort(self) -> None:
        """Give up: the temporary file goes. Nothing happens after `close`."""
        if self._descriptor < 0:
            return
        self._workers.cancel()
        os.close(self._descriptor)
        self._descriptor = -1
        remove_if_there(self._temporary)

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    # ------------------------------------------------------------------------------------------------------ writing

    def _store(self, name: str, offset: int, data: Any) -> None:
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            self._hashes[name].update(piece)
            self._put(piece, offset + start)

    def _put(self, data: Any, offset: int) -> None:
        view = memoryview(data)
        begin = offset
        try:
            while len(view):
                count = os.pwrite(self._descriptor, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise explained(error, "write", self._temporary) from error
        _start_writing(self._descriptor, begin, offset - begin)


def _start_writing(descriptor: int, offset: int, size: int) -> None:
    """Ask the system to write a range out already, so that the sync at the end has little left to do."""
    if hasattr(os, "posix_fadvise") and size >= 1 << 16:
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
