"""What must hold between the parts of a manifest: files of tables, ranks, sizes and headers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NoReturn

from ..errors import CheckpointError
from .files import FileRecord, record_layout
from .manifest_parts import TableRecord
from .names import FILE_NAME, admission_file, dense_file, file_prefix, rank_file, table_file

if TYPE_CHECKING:
    from .manifest import Manifest

__all__ = ["check_manifest"]


def check_manifest(manifest: Manifest, where: str) -> None:
    """Compare the parts of a manifest with each other.

    Raises:
        CheckpointError: they contradict each other, or a file that must be there is not listed.
    """
    seen: set[str] = set()
    for table in manifest.tables:
        if table.name in seen:
            _refuse(where, "tables", f"must have distinct names, got {table.name!r} twice")
        seen.add(table.name)
    for name, record in manifest.files.items():
        _check_file(where, name, record, manifest.generation)
    listed: set[str] = set()
    for number, table in enumerate(manifest.tables):
        _check_table_files(manifest, where, number, table)
        _check_admission_files(manifest, where, number, table)
        listed.update(one.name for one in table.files)
        listed.update(table.admission_files)
    rank_files = [rank_file(manifest.generation, rank) for rank in range(manifest.world_size)]
    present = [name in manifest.files for name in rank_files]
    if any(present) and not all(present):
        rank = present.index(False)
        _refuse(where, "files", f"must hold one of every rank, but {rank_files[rank]} (rank {rank}) is missing")
    unknown = set(manifest.files) - listed - set(rank_files) - {dense_file(manifest.generation)}
    if unknown:
        _refuse(where, "files", f"lists {min(unknown)}, which belongs to no table and no rank")


def _check_file(where: str, name: str, record: FileRecord, generation: int) -> None:
    match = FILE_NAME.fullmatch(name)
    if match is None or not name.startswith(file_prefix(generation)):
        _refuse(where, f"files[{name!r}]", f"must belong to generation {generation}")
    try:
        layout = record_layout(record.tensors)
    except CheckpointError as error:
        _refuse(where, f"files[{name!r}].tensors", f"cannot form a file: {error}")
    if layout.size != record.size:
        _refuse(where, f"files[{name!r}].size", f"must be {layout.size} as its tensors add up, got {record.size}")
    digest = hashlib.sha256(layout.prefix).hexdigest()
    if digest != record.header_sha256:
        _refuse(where, f"files[{name!r}].header_sha256", f"must be {digest}, got {record.header_sha256}")


def _check_table_files(manifest: Manifest, where: str, number: int, table: TableRecord) -> None:
    path = f"tables[{number}].files"
    expected: list[str] = []
    parts = [0] * manifest.world_size
    for one in table.files:
        if one.rank >= manifest.world_size:
            _refuse(where, path, f"names rank {one.rank} of a world of {manifest.world_size}")
        expected.append(table_file(manifest.generation, number, one.rank, parts[one.rank]))
        parts[one.rank] += 1
        if one.name != expected[-1]:
            _refuse(where, path, f"must name {expected[-1]} for rank {one.rank}, got {one.name}")
        if one.first_slice > one.end_slice:
            _refuse(where, path, f"of {one.name} have slices {one.first_slice} to {one.end_slice}")
        if one.rows and one.first_slice == one.end_slice:
            _refuse(where, path, f"say that {one.name} has {one.rows} rows, but no slices that keys could be of")
        record = manifest.files.get(one.name)
        if record is None:
            _refuse(where, path, f"name {one.name}, which is not among files")
        wanted = table.tensors(one.rows)
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in record.tensors.items()}
        if wanted != found:
            _refuse_tensors(where, table, one.name, wanted, found)
    if 0 in parts:
        rank = parts.index(0)
        missing = table_file(manifest.generation, number, rank)
        _refuse(where, path, f"must name a file of every rank; that of rank {rank} ({missing}) is missing")
    if [one.rank for one in table.files] != sorted(one.rank for one in table.files):
        _refuse(where, path, "must be ordered by rank")
    total = sum(one.rows for one in table.files)
    if total != table.rows:
        _refuse(where, f"tables[{number}].rows", f"must be {total}, the sum of its files' rows, got {table.rows}")


def _check_admission_files(manifest: Manifest, where: str, number: int, table: TableRecord) -> None:
    path = f"tables[{number}].admission_files"
    allowed = [admission_file(manifest.generation, number, rank) for rank in range(manifest.world_size)]
    if table.admission_files and table.admission_files != allowed:
        _refuse(where, path, f"must name one file of every rank, in order: {allowed[0]} and so on, or none")
    for name in table.admission_files:
        if name not in manifest.files:
            _refuse(where, path, f"name {name}, which is not among files")


def _refuse_tensors(where: str, table: TableRecord, file: str, wanted: object, found: object) -> NoReturn:
    assert isinstance(wanted, dict) and isinstance(found, dict)
    for name in [*wanted, *sorted(found)]:
        if wanted.get(name) != found.get(name):
            _refuse(
                where,
                f"files[{file!r}].tensors",
                f"must describe {name!r} of table {table.name!r} as {_described(wanted.get(name))}, "
                f"got {_described(found.get(name))}",
            )
    raise AssertionError(file)


def _described(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])}"


def _refuse(where: str, path: str, problem: str) -> NoReturn:
    raise CheckpointError(f"checkpoint: {where}: {path} {problem}")
