"""`nestpipe checkpoint reshard`: the same checkpoint for another number of ranks, streamed."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nestpipe_kernels.checkpoint.files import FileRecord, open_tensor_file, record_layout
from nestpipe_kernels.checkpoint.filesystem import create_temporary, explained, publish, remove_if_there
from nestpipe_kernels.checkpoint.generation import saving_into
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.names import LOCK_NAME, MANIFEST_NAME, dense_file, generation_of, rank_file
from nestpipe_kernels.checkpoint.tools.directory import read_manifest
from nestpipe_kernels.checkpoint.tools.reshard_admission import reshard_admission
from nestpipe_kernels.checkpoint.tools.reshard_ranks import reshard_ranks
from nestpipe_kernels.checkpoint.tools.reshard_rows import NUM_SLICES, owner_of_slices, reshard_table
from nestpipe_kernels.checkpoint.tools.text import Progress, count, size
from nestpipe_kernels.checkpoint.writer_facts import writer_facts
from nestpipe_kernels.errors import CheckpointError

__all__ = ["reshard"]

_SPARE_DESCRIPTORS = 64


def reshard(
    source: Path, ranks: int, out: Path | None = None, progress: Callable[[str], None] | None = None
) -> list[str]:
    """Write the checkpoint `source` for another number of ranks.

    Row files are byte for byte those that a run of so many ranks would save after loading it. Everything read is
    compared with its digest on the way; extra memory stays below 64 MiB. Until the new manifest stands, `source` is
    untouched; a reshard that fails or is killed leaves files that the next save or reshard there removes.

    Args:
        source: directory of a checkpoint.
        ranks: 1 to 65,536.
        out: a directory that is empty or not there; None: into `source` itself, as a save would.
        progress: gets a line every few seconds; None: they go to stderr.

    Returns:
        Lines about what was written, and what state of single ranks was kept and dropped.

    Raises:
        ValueError: `ranks` out of range.
        CheckpointError: no checkpoint, a damaged file, `out` holds something, or another process saves there.
        OSError: full disk, no permission, ...: the message names the path and what to do.
    """
    if not 1 <= ranks <= NUM_SLICES:
        raise ValueError(f"reshard: ranks must be in [1, {NUM_SLICES}], got {ranks}")
    started = time.perf_counter()
    manifest = read_manifest(source)
    if out is not None:
        _check_empty(out)
    meter = Progress("reshard", sum(record.size for record in manifest.files.values()), progress)
    with _descriptors(ranks + manifest.world_size), saving_into(source if out is None else out) as saving:
        result, notes = _write(source, manifest, saving.directory, saving.number, ranks, meter)
        saving.commit(result)
    rows = sum(table.rows for table in result.tables)
    seconds = time.perf_counter() - started
    written = sum(record.size for record in result.files.values())
    return [
        f"{source if out is None else out}: {count(manifest.world_size, 'rank')} -> {ranks}, "
        f"{count(len(result.tables), 'table')}, {count(rows, 'row')}, {size(written)} in {seconds:.1f} s",
        *notes,
    ]


def _write(
    source: Path, manifest: Manifest, out: Path, generation: int, ranks: int, meter: Progress
) -> tuple[Manifest, list[str]]:
    files: dict[str, FileRecord] = {}
    tables = []
    owner = owner_of_slices(ranks)
    for number, table in enumerate(manifest.tables):
        record, added = reshard_table((source, manifest, table), (out, generation, number, ranks), meter)
        files |= added
        added = reshard_admission((source, manifest, table), (out, generation, number), owner)
        record.admission_files = list(added)
        files |= added
        tables.append(record)
    dense = dense_file(manifest.generation)
    if dense in manifest.files:
        name = dense_file(generation)
        files[name] = _copy(source / dense, manifest.files[dense], out / name, meter)
    trees, added, notes = _ranks((source, manifest), (out, generation, ranks), meter)
    files |= added
    result = Manifest(
        generation=generation,
        writer=writer_facts(),
        world_size=ranks,
        tables=tables,
        files=files,
        position={name: value for name, value in manifest.position.items() if name != "sparse_groups"},
        dense=manifest.dense,
        ranks=trees,
    )
    return result, notes


def _copy(path: Path, record: FileRecord, target: Path, meter: Progress) -> FileRecord:
    """A file as it is under another name; its digests are compared on the way."""
    with open_tensor_file(path, record) as file:
        descriptor, temporary = create_temporary(target)
        try:
            try:
                _put(descriptor, memoryview(record_layout(record.tensors).prefix))
                for name in file.regions:
                    for piece in file.pieces(name):
                        _put(descriptor, piece)
                        meter.add(len(piece))
                os.fsync(descriptor)
            except OSError as error:
                raise explained(error, "write", temporary) from error
            finally:
                os.close(descriptor)
            publish(temporary, target)
        except BaseException:
            remove_if_there(temporary)
            raise
    return record


def _put(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]


def _ranks(
    source: tuple[Path, Manifest], target: tuple[Path, int, int], meter: Progress
) -> tuple[list[dict[str, Any]], dict[str, FileRecord], list[str]]:
    """Trees and files of the new ranks; as they are if their number stays."""
    (directory, manifest), (out, generation, ranks) = source, target
    if ranks != manifest.world_size:
        return reshard_ranks(source, target)
    files = {}
    for rank in range(ranks):
        old, new = rank_file(manifest.generation, rank), rank_file(generation, rank)
        if old in manifest.files:
            files[new] = _copy(directory / old, manifest.files[old], out / new, meter)
    return manifest.ranks, files, ["kept: all state of single ranks, as their number stays the same"]


def _check_empty(out: Path) -> None:
    try:
        names = os.listdir(out)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise CheckpointError(f"checkpoint: --out {out} is a file; choose a directory that is not there yet") from None
    except OSError as error:
        raise explained(error, "list", out) from error
    names = [name for name in names if name != LOCK_NAME and generation_of(name) is None]
    if MANIFEST_NAME in names:
        raise CheckpointError(
            f"checkpoint: --out {out} holds a checkpoint already ({MANIFEST_NAME}); choose a directory that is not "
            "there yet, or --in-place for PATH itself"
        )
    if names:
        raise CheckpointError(
            f"checkpoint: --out {out} holds {count(len(names), 'entry', 'entries')} already, {min(names)} for one; "
            "choose a directory that is not there yet"
        )


@contextlib.contextmanager
def _descriptors(files: int) -> Iterator[None]:
    """Room for so many open files at once, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files + _SPARE_DESCRIPTORS
    enough = soft == resource.RLIM_INFINITY or soft >= wanted
    if not enough and (hard == resource.RLIM_INFINITY or hard >= wanted):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise CheckpointError(
                f"checkpoint: {count(files, 'file')} must be open at once, and the system allows {hard}: raise "
                "the limit (ulimit -n)"
            ) from error
        raise
    finally:
        if not enough:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
