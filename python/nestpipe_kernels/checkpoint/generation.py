"""One save: all ranks write files of a new generation beside the old one's; the manifest makes them the checkpoint.

Until the new manifest has its name, the old checkpoint is whole; afterwards the new one is. Files of other generations
are garbage: removed after a save, and by the next one where a save was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm import Communicator
from ..errors import CheckpointError
from .exchange import agree, gather_json
from .fields import Field
from .files import FileRecord, TensorFileWriter
from .filesystem import explained, remove_if_there, sync_directory
from .manifest import Manifest
from .manifest_parts import TABLE_SETTINGS, TableRecord, files_from_field, files_to_json
from .names import LOCK_NAME, MANIFEST_NAME, MAX_GENERATION, generation_of
from .writer_facts import writer_facts

__all__ = ["Generation", "RankPart", "Saving", "save_generation", "saving_into"]

_DOING = "saving a checkpoint"
_NUMBER_BYTES = 9
"""Of the number in the lock's file: 8 digits and a newline."""


@dataclass
class RankPart:
    """What one rank adds to the manifest."""

    tables: list[TableRecord] = field(default_factory=list)
    """Every table, with this rank's files and numbers of rows alone; the same tables in the same order on all ranks."""
    rank: dict[str, Any] = field(default_factory=dict)
    """This rank's tree: `Manifest.ranks[rank]`."""
    position: dict[str, Any] = field(default_factory=dict)
    """`Manifest.position`; rank 0's counts."""
    dense: dict[str, Any] | None = None
    """`Manifest.dense`; rank 0's counts."""


@dataclass
class Generation:
    """The files that one rank writes in one save."""

    directory: Path
    number: int
    rank: int
    world_size: int
    files: dict[str, FileRecord] = field(default_factory=dict)
    """Finished files of this rank."""

    def create(self, name: str, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> TensorFileWriter:
        """A writer of one file of this generation (names.py makes names). Hand what its `close` returns to `add`."""
        return TensorFileWriter(self.directory / name, tensors)

    def add(self, name: str, record: FileRecord) -> None:
        """Make a finished file part of the checkpoint."""
        self.files[name] = record

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a whole file. Raises as TensorFileWriter."""
        with self.create(name, {key: (value.dtype, tuple(value.shape)) for key, value in tensors.items()}) as writer:
            for key, value in tensors.items():
                writer.write(key, value)
            self.add(name, writer.close())


def save_generation(
    directory: str | os.PathLike[str], communicator: Communicator, write: Callable[[Generation], RankPart]
) -> Manifest | None:
    """Save a checkpoint. Collective; all ranks see the same directory.

    Args:
        directory: made if it is not there. What it holds beside a checkpoint is left alone.
        communicator: of the ranks that save.
        write: writes this rank's files and describes them; it must not communicate.

    Returns:
        The new manifest on rank 0, None on the others.

    Raises:
        CheckpointError: another process is saving there, or what is there is damaged or of a newer version.
        OSError: full disk, no permission, ...: the message names the path and what to do.
        RemoteRankError: another rank failed.
        In every case the checkpoint that was there is still whole, and files of this save are gone.
    """
    directory = Path(directory)
    lock = _Lock()
    try:
        generation = _begin(directory, communicator, lock)
        try:
            return _write_and_commit(generation, communicator, write)
        except BaseException:
            if generation.rank == 0:
                _clean_up(directory, generation.number)
            raise
    finally:
        lock.release()


def _begin(directory: Path, communicator: Communicator, lock: _Lock) -> Generation:
    number, failure = 0, None
    if communicator.rank == 0:
        try:
            number = _prepare(directory, lock)
        except Exception as error:
            failure = error
    number = gather_json(communicator, number, failure, _DOING, to=None)[0]
    return Generation(directory, number, communicator.rank, communicator.size)


def _write_and_commit(
    generation: Generation, communicator: Communicator, write: Callable[[Generation], RankPart]
) -> Manifest | None:
    value, failure = None, None
    try:
        part = write(generation)
        sync_directory(generation.directory)
        value = _part_to_json(part, generation.files)
    except Exception as error:
        failure = error
    values = gather_json(communicator, value, failure, _DOING, to=0)
    manifest, failure = None, None
    if communicator.rank == 0:
        try:
            manifest = _merge(generation, values)
            _check_files_are_here(generation.directory, manifest)
            manifest.save(generation.directory)
            _remove_others(generation.directory, generation.number)
        except Exception as error:
            failure = error
    agree(communicator, failure, _DOING)
    return manifest


@dataclass(frozen=True)
class Saving:
    """A directory that one process alone writes a new generation into; see `saving_into`."""

    directory: Path
    number: int

    def commit(self, manifest: Manifest) -> None:
        """Make the written files the checkpoint; files of other generations go. Raises CheckpointError or OSError."""
        sync_directory(self.directory)
        _check_files_are_here(self.directory, manifest)
        manifest.save(self.directory)
        _remove_others(self.directory, self.number)


@contextlib.contextmanager
def saving_into(directory: str | os.PathLike[str]) -> Iterator[Saving]:
    """For a process that writes the files of all ranks: what `save_generation` does around them.

    Without a commit the files of the generation go at the end, and the checkpoint that was there is whole.

    Raises:
        CheckpointError, OSError: as `save_generation`.
    """
    directory = Path(directory)
    lock = _Lock()
    try:
        number = _prepare(directory, lock)
        try:
            yield Saving(directory, number)
        finally:
            _clean_up(directory, number)
    finally:
        lock.release()


# ------------------------------------------------------------------------------------------------------- rank 0's part


def _prepare(directory: Path, lock: _Lock) -> int:
    """Make and lock the directory, remove what killed saves left, and choose the generation."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(f"checkpoint: {directory} is no directory: choose another path") from None
    except OSError as error:
        raise explained(error, "make the directory", directory) from error
    lock.acquire(directory)
    previous = None
    if os.path.lexists(directory / MANIFEST_NAME):
        try:
            previous = Manifest.load(directory).generation
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint: {directory} holds a checkpoint that cannot be read, and saving would replace it: save "
                f"elsewhere, or remove it first ({error})"
            ) from None
    seen = [number for name in _listed(directory) if (number := generation_of(name)) is not None]
    _remove_others(directory, previous)
    number = max([previous or 0, lock.last_number(), *seen]) + 1
    if number > MAX_GENERATION:
        raise CheckpointError(f"checkpoint: {directory} has been saved to {MAX_GENERATION} times: save elsewhere")
    lock.note_number(directory, number)
    return number


def _merge(generation: Generation, values: list[Any]) -> Manifest:
    """One manifest of all ranks' parts."""
    files: dict[str, FileRecord] = {}
    tables: list[TableRecord] = []
    for rank, value in enumerate(values):
        files.update(files_from_field(Field(value["files"], f"files of rank {rank}")))
        own = [TableRecord.from_field(Field(one, f"tables of rank {rank}")) for one in value["tables"]]
        if rank == 0:
            tables = own
            continue
        if len(own) != len(tables):
            raise CheckpointError(f"checkpoint: rank {rank} saves {len(own)} tables, rank 0 saves {len(tables)}")
        for table, more in zip(tables, own):
            _add_rank(table, more, rank)
    return Manifest(
        generation=generation.number,
        writer=writer_facts(),
        world_size=generation.world_size,
        tables=tables,
        files=files,
        position=values[0]["position"],
        dense=values[0]["dense"],
        ranks=[value["rank"] for value in values],
    )


def _add_rank(table: TableRecord, more: TableRecord, rank: int) -> None:
    for name in TABLE_SETTINGS:
        if getattr(table, name) != getattr(more, name):
            raise CheckpointError(
                f"checkpoint: ranks disagree on {name} of table {table.name!r}: rank 0 has "
                f"{getattr(table, name)}, rank {rank} has {getattr(more, name)}"
            )
    table.rows += more.rows
    table.files += more.files
    table.admission_files += more.admission_files
    for name, count in more.counters.items():
        table.counters[name] = table.counters.get(name, 0) + count


def _check_files_are_here(directory: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        try:
            size = os.stat(directory / name, follow_symlinks=False).st_size
        except FileNotFoundError:
            size = -1
        if size != record.size:
            found = "is not there" if size < 0 else f"has {size} bytes, not {record.size}"
            raise CheckpointError(
                f"checkpoint: {directory / name} {found} as rank 0 sees it: all ranks must save to the same file system"
            )


def _clean_up(directory: Path, number: int) -> None:
    """After a failure: remove the generation's files, unless its manifest stands."""
    try:
        stands = os.path.lexists(directory / MANIFEST_NAME) and Manifest.load(directory).generation == number
        if not stands:
            _remove(directory, lambda generation: generation == number)
    except (OSError, CheckpointError):
        return  # the next save removes them


def _remove_others(directory: Path, number: int | None) -> None:
    """Remove files of other generations; what cannot be removed is left to the next save."""
    try:
        _remove(directory, lambda generation: generation != number)
    except OSError:
        return


def _remove(directory: Path, unwanted: Callable[[int], bool]) -> None:
    for name in _listed(directory):
        generation = generation_of(name)
        if generation is not None and unwanted(generation):
            with contextlib.suppress(OSError):  # one that stays must not keep the others
                remove_if_there(directory / name)


def _listed(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        raise explained(error, "list", directory) from error


def _part_to_json(part: RankPart, files: dict[str, FileRecord]) -> dict[str, Any]:
    return {
        "tables": [table.to_json() for table in part.tables],
        "files": files_to_json(files),
        "rank": part.rank,
        "position": part.position,
        "dense": part.dense,
    }


class _Lock:
    """Keeps two saves out of one directory, where the file system has locks; it ends with its process.

    Its file holds the number of the last generation that was begun. A rank that was given up by the others (stopped,
    or on a machine that hangs) may go on writing much later, so no other save may use the names of its files again.
    """

    def __init__(self) -> None:
        self._descriptor = -1

    def acquire(self, directory: Path) -> None:
        """Raises CheckpointError if another save holds it, OSError if the directory cannot be written."""
        path = directory / LOCK_NAME
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise explained(error, "write to the directory, with its lock", path) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"checkpoint: another process or thread is saving to {directory} right now; wait for it, or save "
                "elsewhere"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise explained(error, "lock", path) from error

    def last_number(self) -> int:
        """What `note_number` noted last; 0 if that is not known."""
        text = os.pread(self._descriptor, _NUMBER_BYTES, 0)
        return int(text) if text[:-1].isdigit() and len(text) == _NUMBER_BYTES else 0

    def note_number(self, directory: Path, number: int) -> None:
        """Note that generation `number` begins. Raises OSError."""
        try:
            os.pwrite(self._descriptor, b"%0*d\n" % (_NUMBER_BYTES - 1, number), 0)
            os.fsync(self._descriptor)
        except OSError as error:
            raise explained(error, "write", directory / LOCK_NAME) from error

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # forked children may hold the descriptor too
            os.close(self._descriptor)
            self._descriptor = -1
