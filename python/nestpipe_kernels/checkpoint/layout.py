"""Where the tensors of a file lie: the safetensors header, determined by names, data types and shapes alone.

A file is 8 bytes (little-endian length of the header), the header (JSON, padded with spaces), and the tensors' bytes,
little-endian, in C order, without gaps. Tensors are laid out by descending size of their elements, then by name, so
that each is aligned. The header of given tensors has exactly one spelling; a reader builds it and compares bytes, and
so needs no parser for what the manifest already says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import CheckpointError

__all__ = [
    "DTYPES",
    "MAX_HEADER_BYTES",
    "MAX_TENSOR_BYTES",
    "FileRecord",
    "Layout",
    "Region",
    "TensorRecord",
    "dtype_name",
    "file_layout",
    "record_layout",
]

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Data types of tensors in files, by their safetensors names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_TENSOR_BYTES = 1 << 60
_MAX_DIMENSIONS = 64
_ALIGNMENT = 64


@dataclass(frozen=True)
class Region:
    """One tensor's place in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    size: int
    """Bytes."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension; of the whole for a scalar."""
        row = self.dtype.itemsize
        for extent in self.shape[1:]:
            row *= extent
        return row


@dataclass(frozen=True)
class Layout:
    """The bytes before the tensors, and where each tensor lies, in the file's order."""

    prefix: bytes
    """Length and header."""
    regions: dict[str, Region]
    size: int
    """Bytes of the whole file."""


@dataclass(frozen=True)
class TensorRecord:
    """What the manifest knows about one tensor of a file."""

    dtype: str
    """A name of DTYPES."""
    shape: tuple[int, ...]
    sha256: str
    """Of the tensor's bytes in the file."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows about one file."""

    size: int
    """Bytes."""
    header_sha256: str
    """Of all bytes before the first tensor: the header and its length."""
    tensors: dict[str, TensorRecord]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch data type in files.

    Raises:
        CheckpointError: files cannot hold it.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            f"checkpoint: tensors of {dtype} cannot be saved; convert them to one of {', '.join(map(str, _NAMES))}"
        )
    return _NAMES[dtype]


def file_layout(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Layout:
    """The layout of a file with these tensors: name -> (data type, shape).

    Raises:
        CheckpointError: a name or shape that no file can have, or too many of them.
    """
    sizes = {}
    for name, (dtype, shape) in tensors.items():
        _check_name(name)
        dtype_name(dtype)
        sizes[name] = _num_bytes(name, dtype, shape)
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    entries, end = {}, 0
    for name in order:
        dtype, shape = tensors[name]
        entries[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    if len(header) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"checkpoint: the header of {len(entries)} tensors would take {len(header)} bytes; "
            f"a file's header has at most {MAX_HEADER_BYTES}"
        )
    prefix = len(header).to_bytes(8, "little") + header
    regions, at = {}, len(prefix)
    for name in order:
        dtype, shape = tensors[name]
        regions[name] = Region(dtype, tuple(shape), at, sizes[name])
        at += sizes[name]
    return Layout(prefix, regions, at)


def record_layout(tensors: Mapping[str, TensorRecord]) -> Layout:
    """The layout of a file with recorded tensors. Raises CheckpointError as `file_layout`."""
    return file_layout({name: (DTYPES[t.dtype], t.shape) for name, t in tensors.items()})


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= 4096 or name == "__metadata__":
        raise CheckpointError(f"checkpoint: a tensor's name must be 1 to 4,096 characters, got {str(name)[:100]!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"checkpoint: the tensor name {name[:100]!r} is no valid text") from None


def _num_bytes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    if len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(f"checkpoint: tensor {name[:100]!r} has {len(shape)} dimensions; 64 are the limit")
    size = dtype.itemsize
    for extent in shape:
        if isinstance(extent, bool) or not isinstance(extent, int) or not 0 <= extent < MAX_TENSOR_BYTES:
            raise CheckpointError(f"checkpoint: tensor {name[:100]!r} has the shape {str(list(shape))[:200]}")
        size *= extent
        if size >= MAX_TENSOR_BYTES:
            raise CheckpointError(
                f"checkpoint: tensor {name[:100]!r} of shape {str(list(shape))[:200]} is larger than any file"
            )
    return size
