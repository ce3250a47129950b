"""`nestpipe checkpoint verify`: every byte of every file against the manifest, and rows in order where they belong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nestpipe_kernels.checkpoint.files import TensorFile, open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.manifest_parts import TableFile, TableRecord
from nestpipe_kernels.checkpoint.names import MANIFEST_NAME
from nestpipe_kernels.checkpoint.tools.directory import describe_leftovers, leftovers, read_manifest
from nestpipe_kernels.checkpoint.tools.hashing import hash_keys, hash_name, shards_of, slices_of
from nestpipe_kernels.checkpoint.tools.merge import check_sorted
from nestpipe_kernels.checkpoint.tools.text import Progress
from nestpipe_kernels.errors import CheckpointError

__all__ = ["Report", "verify"]

KEYS_AT_ONCE = 1 << 19


@dataclass
class Report:
    """What `verify` found.

    Attributes:
        problems: one line each; empty if the checkpoint is as it was written.
        bad_files: names of the files that the problems are in.
        num_files: files that were looked at, the manifest included.
        num_bytes: bytes that were read, headers and the manifest included.
        rate: how long that took, and how fast it was, in words.
        leftovers: files of an unfinished save, in words; None without any. They do no harm.
    """

    problems: list[str] = field(default_factory=list)
    bad_files: set[str] = field(default_factory=set)
    num_files: int = 0
    num_bytes: int = 0
    rate: str = ""
    leftovers: str | None = None


def verify(directory: Path, progress: Callable[[str], None] | None = None) -> Report:
    """Read everything. Goes on after a problem, so that the report has all of them.

    Args:
        directory: of the checkpoint.
        progress: gets a line every few seconds; None: they go to stderr.

    Raises:
        CheckpointError: no checkpoint, or its manifest is damaged or newer: then no file can be told right from wrong.
        OSError: the directory or the manifest could not be read.
    """
    manifest = read_manifest(directory)
    tables = {file.name: (table, file) for table in manifest.tables for file in table.files}
    own_size = (directory / MANIFEST_NAME).stat().st_size
    meter = Progress("verify", own_size + sum(record.size for record in manifest.files.values()), progress)
    meter.add(own_size)
    report = Report(num_files=len(manifest.files) + 1)
    for name in sorted(manifest.files):
        found = _file_problems(directory, manifest, name, tables.get(name), meter)
        if found:
            report.bad_files.add(name)
        report.problems += found
    report.num_bytes, report.rate = meter.done, meter.rate()
    left = leftovers(directory, manifest.files)
    report.leftovers = describe_leftovers(directory, left) if left else None
    return report


def _file_problems(
    directory: Path, manifest: Manifest, name: str, rows: tuple[TableRecord, TableFile] | None, meter: Progress
) -> list[str]:
    try:
        file = open_tensor_file(directory / name, manifest.files[name])
    except (CheckpointError, OSError) as error:
        return [_text(error)]
    problems = []
    with file:
        meter.add(manifest.files[name].size - sum(region.size for region in file.regions.values()))  # the header
        for tensor, region in file.regions.items():
            try:
                for piece in file.pieces(tensor):
                    meter.add(len(piece))
            except (CheckpointError, OSError) as error:
                problems.append(_text(error))
                continue
            if rows is not None and tensor == "keys" and region.size:
                problems += _row_problems(file, manifest, *rows)
    return problems


def _row_problems(file: TensorFile, manifest: Manifest, table: TableRecord, part: TableFile) -> list[str]:
    """Digests are right; whether the writer was, too."""
    table_hash = hash_name(table.hash_name)
    num_shards = manifest.num_shards
    last_key, last_shard = np.empty(0, np.int64), np.empty(0, np.uint8)
    for first in range(0, part.rows, KEYS_AT_ONCE):
        keys = file.read("keys", first, min(KEYS_AT_ONCE, part.rows - first)).numpy()
        hashes = hash_keys(table_hash, keys)
        shards = shards_of(hashes)
        try:
            check_sorted(str(file.path), np.concatenate([last_shard, shards]), np.concatenate([last_key, keys]))
        except CheckpointError as error:
            return [_text(error)]
        last_key, last_shard = keys[-1:], shards[-1:]
        slices = slices_of(hashes).astype(np.int64)
        wrong = (slices < part.first_slice) | (slices >= part.end_slice)
        wrong |= slices * num_shards // 65536 != part.rank
        if wrong.any():
            at = int(np.argmax(wrong))
            return [
                f"checkpoint: {file.path}: key {keys[at]} of table {table.name!r} (slice {slices[at]}) does not belong "
                f"into the file of rank {part.rank} for slices {part.first_slice} to {part.end_slice - 1}"
            ]
    return []


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
