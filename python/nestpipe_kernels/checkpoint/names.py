"""Names of the files of a checkpoint. All are flat: no name can lead out of the directory."""

from __future__ import annotations

import re

__all__ = [
    "FILE_NAME",
    "LOCK_NAME",
    "MANIFEST_NAME",
    "MAX_GENERATION",
    "admission_file",
    "dense_file",
    "file_prefix",
    "generation_of",
    "rank_file",
    "table_file",
]

MANIFEST_NAME = "manifest.json"
LOCK_NAME = ".lock"
MAX_GENERATION = 99_999_999
FILE_NAME = re.compile(
    r"g(?P<generation>[0-9]{8})-"
    r"(?:t(?P<table>[0-9]{3,6})-r(?P<rank>[0-9]{5})-(?:p(?P<part>[0-9]{3})|(?P<admission>admission))"
    r"|(?P<dense>dense)|r(?P<own>[0-9]{5}))"
    r"\.safetensors",
    re.ASCII,
)
"""Every name that a manifest may list."""
_REMOVABLE = re.compile(rf"(?:{FILE_NAME.pattern})(?:\.tmp)?", re.ASCII)


def file_prefix(generation: int) -> str:
    """What all names of a generation start with."""
    return f"g{generation:08d}-"


def table_file(generation: int, table: int, rank: int, part: int = 0) -> str:
    """Rows of a table that a rank owned."""
    return f"{file_prefix(generation)}t{table:03d}-r{rank:05d}-p{part:03d}.safetensors"


def admission_file(generation: int, table: int, rank: int) -> str:
    """Admission counts of a table that a rank held."""
    return f"{file_prefix(generation)}t{table:03d}-r{rank:05d}-admission.safetensors"


def dense_file(generation: int) -> str:
    """Dense parameters and dense optimizer state."""
    return f"{file_prefix(generation)}dense.safetensors"


def rank_file(generation: int, rank: int) -> str:
    """Everything else that a rank keeps to itself."""
    return f"{file_prefix(generation)}r{rank:05d}.safetensors"


def generation_of(name: str) -> int | None:
    """The generation that a file (finished or temporary) belongs to; None for other files."""
    match = _REMOVABLE.fullmatch(name)
    return None if match is None else int(match["generation"])
