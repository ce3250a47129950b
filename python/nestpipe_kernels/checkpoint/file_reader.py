"""Reads tensor files, streaming. Nothing in them is trusted.

With the manifest's record the whole header is known beforehand and compared byte by byte; digests are checked
on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .filesystem import explained, open_regular
from .layout import DTYPES, MAX_HEADER_BYTES, FileRecord, Layout, Region, file_layout, record_layout
from .workers import NUM_WORKERS

__all__ = ["TensorFile", "open_tensor_file"]

_PIECE = 8 << 20
"""Bytes that are read and hashed at once."""


_AHEAD = 2
"""Chunks that are read beside the one in use."""
_ANNOUNCED = 3
"""Chunks beyond those that the system is asked to read, so that a disk has several requests at a time."""


class TensorFile:
    """An open file of a checkpoint. Reads that run through a tensor from its start check its digest at its end.

    Several threads may read different tensors at the same time. Use as a context manager, or call `close`.
    """

    def __init__(self, path: Path, descriptor: int, regions: dict[str, Region], digests: dict[str, str]) -> None:
        self.path = path
        self.regions = regions
        """name -> data type, shape and place."""
        self._descriptor = descriptor
        self._digests = digests
        self._hashes: dict[str, tuple[Any, int]] = {}

    def read(self, name: str, first_row: int = 0, rows: int | None = None, into: Tensor | None = None) -> Tensor:
        """Rows first_row .. first_row + rows of a tensor (None: up to its end), a copy; a scalar whole.

        `into`: at least so many rows, which are overwritten and returned; None: a new tensor.

        Raises:
            CheckpointError: no such tensor or rows, the file ended early, or (at the last row of a tensor that was read
                from its start without gaps) the digest is not the manifest's.
            OSError: the system could not read.
        """
        region = self._region(name)
        num_rows = region.shape[0] if region.shape else 1
        rows = num_rows - first_row if rows is None else rows
        if not 0 <= first_row <= first_row + rows <= num_rows:
            raise CheckpointError(
                f"checkpoint: {self.path}: tensor {name!r} has {num_rows} rows, asked for rows "
                f"{first_row} to {first_row + rows}"
            )
        if into is None:
            out = torch.empty((rows, *region.shape[1:]) if region.shape else (), dtype=region.dtype)
        else:
            out = into[:rows]
        view = out.reshape(-1).view(torch.uint8).numpy().data
        start = first_row * region.row_bytes
        hasher, position = self._hashes.get(name) or (hashlib.sha256(), 0)
        for at in range(0, len(view), _PIECE):
            piece = view[at : at + _PIECE]
            self._read_into(name, piece, region.offset + start + at)
            if position == start + at:
                hasher.update(piece)
                position += len(piece)
        self._hashes[name] = (hasher, position)
        if position == region.size and start + len(view) == region.size:
            self._check_digest(name, hasher)
        return out

    def chunks(self, names: Sequence[str], rows: int, ahead: int = _AHEAD) -> Iterator[dict[str, Tensor]]:
        """The same rows of several tensors, `rows` at a time, read and hashed by threads, up to `ahead` chunks further.

        The tensors must have the same first dimension. A chunk is overwritten once the next one is asked for. Digests
        of all of them have been checked when the iterator ends. Raises as `read`.
        """
        num_rows = {self._region(name).shape[0] for name in names}
        if len(num_rows) != 1:
            raise CheckpointError(f"checkpoint: {self.path}: tensors {list(names)} differ in their number of rows")
        return _read_ahead(self, list(names), num_rows.pop(), max(1, rows), ahead)

    def announce(self, name: str, first_row: int, rows: int) -> None:
        """Ask the system to read rows that will be wanted soon."""
        region = self._region(name)
        if hasattr(os, "posix_fadvise") and rows > 0:
            begin = region.offset + first_row * region.row_bytes
            os.posix_fadvise(self._descriptor, begin, rows * region.row_bytes, os.POSIX_FADV_WILLNEED)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes front to back, whatever its shape, 8 MiB at most at a time.

        Each piece is overwritten by the next. The digest has been compared when the iterator ends. Raises as `read`.
        """
        region = self._region(name)
        hasher = hashlib.sha256()
        buffer = memoryview(bytearray(min(_PIECE, region.size)))
        for at in range(0, region.size, _PIECE):
            piece = buffer[: min(_PIECE, region.size - at)]
            self._read_into(name, piece, region.offset + at)
            hasher.update(piece)
            yield piece
        self._check_digest(name, hasher)

    def verify(self) -> None:
        """Read everything and compare all digests. Raises as `read`; the message names file and tensor."""
        for name in self.regions:
            for _ in self.pieces(name):
                pass

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _region(self, name: str) -> Region:
        if name not in self.regions:
            raise CheckpointError(
                f"checkpoint: {self.path}: no tensor {name!r}; it has {', '.join(self.regions)[:500] or 'none'}"
            )
        return self.regions[name]

    def _read_into(self, name: str, view: Any, offset: int) -> None:
        while len(view):
            try:
                count = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise explained(error, f"read tensor {name!r} of", self.path) from error
            if count == 0:
                raise CheckpointError(f"checkpoint: {self.path}: tensor {name!r}: the file ends at byte {offset}")
            view, offset = view[count:], offset + count

    def _check_digest(self, name: str, hasher: Any) -> None:
        expected, got = self._digests.get(name), hasher.hexdigest()
        if expected is not None and expected != got:
            raise CheckpointError(
                f"checkpoint: {self.path}: tensor {name!r} is damaged: its SHA-256 must be {expected}, got {got}; "
                "restore the file from a copy, or load another checkpoint"
            )


def _read_ahead(file: TensorFile, names: list[str], total: int, rows: int, ahead: int) -> Iterator[dict[str, Tensor]]:
    """Chunks in order. A tensor's chunks are read one after another; tensors are read side by side.

    Buffers take turns: new ones for each chunk would cost the system about as much as copying into them.
    """
    rows = max(1, min(rows, total))
    firsts = range(0, total, rows) or range(1)
    buffers = [
        {name: torch.empty((rows, *file.regions[name].shape[1:]), dtype=file.regions[name].dtype) for name in names}
        for _ in range(min(ahead + 1, len(firsts)))
    ]

    def read(name: str, number: int, first: int) -> Tensor:
        announced = first + rows * _ANNOUNCED
        for begin in range(rows, announced + 1, rows) if first == 0 else (announced,):
            file.announce(name, begin, min(rows, total - begin))
        return file.read(name, first, min(rows, total - first), buffers[number % len(buffers)][name])

    under_way: deque[dict[str, Future[Tensor]]] = deque()
    pools = [ThreadPoolExecutor(1, f"read {file.path.name}") for _ in range(NUM_WORKERS)]
    lanes = _balanced(file, names)
    try:
        for number, first in enumerate(firsts):
            under_way.append({name: pools[lanes[name]].submit(read, name, number, first) for name in names})
            if len(under_way) > ahead:
                yield {name: one.result() for name, one in under_way.popleft().items()}
        while under_way:
            yield {name: one.result() for name, one in under_way.popleft().items()}
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _balanced(file: TensorFile, names: list[str]) -> dict[str, int]:
    """A lane for each tensor, so that lanes have about the same number of bytes."""
    load = [0] * NUM_WORKERS
    lanes = {}
    for name in sorted(names, key=lambda one: -file.regions[one].size):
        lanes[name] = load.index(min(load))
        load[lanes[name]] += file.regions[name].size
    return lanes


# ---------------------------------------------------------------------------------------------------------- opening


def open_tensor_file(path: str | os.PathLike[str], record: FileRecord | None = None) -> TensorFile:
    """Open a file and check its size and header, before anything is allocated for its tensors.

    Args:
        path: of the file; links are not followed.
        record: what the manifest says; None accepts any header that the writer could have written, without digests.

    Raises:
        CheckpointError: missing, no regular file, or another size or header than recorded; names the file.
        OSError: the system could not open or read it.
    """
    path = Path(path)
    descriptor, size = open_regular(path)
    try:
        if record is None:
            layout, digests = _unrecorded_layout(path, descriptor, size), {}
        else:
            layout = record_layout(record.tensors)
            digests = {name: tensor.sha256 for name, tensor in record.tensors.items()}
            _check_against_record(path, descriptor, size, layout.prefix, record.size)
        if layout.size != size:
            raise CheckpointError(
                f"checkpoint: {path}: its header describes {layout.size} bytes, the file has {size}: it is damaged"
            )
        return TensorFile(path, descriptor, layout.regions, digests)
    except BaseException:
        os.close(descriptor)
        raise


def _check_against_record(path: Path, descriptor: int, size: int, prefix: bytes, expected_size: int) -> None:
    if size != expected_size:
        what = "truncated" if size < expected_size else "longer than it was"
        raise CheckpointError(
            f"checkpoint: {path} must have {expected_size} bytes, got {size}: the file is {what}; "
            "restore it from a copy"
        )
    found = _read_exactly(path, descriptor, min(len(prefix), size))
    if found != prefix:
        at = next((i for i, (a, b) in enumerate(zip(found, prefix)) if a != b), len(found))
        raise CheckpointError(
            f"checkpoint: {path}: its header is not the one in the manifest (first difference at byte {at}): "
            "the file is damaged or belongs to another checkpoint; restore it from a copy"
        )


def _unrecorded_layout(path: Path, descriptor: int, size: int) -> Layout:
    length = int.from_bytes(_read_exactly(path, descriptor, min(8, size)), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"checkpoint: {path}: no header of {length} bytes fits into a file of {size} bytes")
    prefix = _read_exactly(path, descriptor, 8 + length)
    problem = "its header is not written as this package writes it"
    try:
        entries = json.loads(prefix[8:])
        layout = file_layout({name: (DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in entries.items()})
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint: {path}: {problem}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"checkpoint: {path}: {problem}: {type(error).__name__} {str(error)[:200]}") from None
    if layout.prefix != prefix:
        raise CheckpointError(f"checkpoint: {path}: {problem}: other order, offsets, fields or padding")
    return layout


def _read_exactly(path: Path, descriptor: int, size: int) -> bytes:
    try:
        data = os.pread(descriptor, size, 0)
    except OSError as error:
        raise explained(error, "read the header of", path) from error
    if len(data) != size:
        raise CheckpointError(f"checkpoint: {path}: the file ends at byte {len(data)} of its header")
    return data
