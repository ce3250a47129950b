"""The manifest: what a checkpoint consists of, strictly validated, digested, and written last."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .fields import Field, canonical_bytes, digest_of, parse_canonical
from .files import FileRecord
from .filesystem import create_temporary, explained, open_regular, publish, remove_if_there, sync_directory
from .manifest_checks import check_manifest
from .manifest_parts import OptimizerRecord, TableFile, TableRecord, files_from_field, files_to_json
from .names import MANIFEST_NAME, MAX_GENERATION

__all__ = [
    "FORMAT",
    "MAX_MANIFEST_BYTES",
    "VERSION",
    "Manifest",
    "OptimizerRecord",
    "TableFile",
    "TableRecord",
]

FORMAT = "nestpipe-checkpoint"
VERSION = 1
NUM_SLICES = 65536
MAX_MANIFEST_BYTES = 256 << 20
HASH_NAME = "mix64"
SLICE_OWNER = "slice * world_size // 65536"
_FIELDS = (
    "format",
    "version",
    "generation",
    "writer",
    "world_size",
    "hash",
    "tables",
    "files",
    "position",
    "dense",
    "ranks",
    "sha256",
)


@dataclass
class Manifest:
    """What manifest.json says."""

    generation: int
    """Files of another generation are no part of the checkpoint."""
    writer: dict[str, Any]
    """Versions of what wrote it; informative."""
    world_size: int
    tables: list[TableRecord]
    files: dict[str, FileRecord]
    """Every file, by its name in the directory."""
    position: dict[str, Any] = field(default_factory=dict)
    """Where the training stood: a JSON object."""
    dense: dict[str, Any] | None = None
    """State of dense parameters and their optimizer: a tree whose tensors lie in the dense file."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """[world_size] what each rank keeps to itself: trees whose tensors lie in the rank's file."""

    @property
    def num_shards(self) -> int:
        """Parts that each table's rows were spread over: fewer than the ranks where these had several copies."""
        groups = self.position.get("sparse_groups", 1)
        if type(groups) is not int or groups < 1 or self.world_size % groups:
            raise CheckpointError(
                f"checkpoint: position.sparse_groups must divide the {self.world_size} ranks, got {groups!r}"
            )
        return self.world_size // groups

    def table(self, name: str) -> TableRecord:
        """A table by name. Raises CheckpointError, naming those there are."""
        for table in self.tables:
            if table.name == name:
                return table
        names = ", ".join(table.name for table in self.tables)[:500] or "none"
        raise CheckpointError(f"checkpoint: there is no table {name!r}; it holds {names}")

    def to_json(self) -> dict[str, Any]:
        """The JSON object, its own digest included."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "writer": self.writer,
            "world_size": self.world_size,
            "hash": {"name": HASH_NAME, "slices": NUM_SLICES, "slice_owner": SLICE_OWNER},
            "tables": [table.to_json() for table in self.tables],
            "files": files_to_json(self.files),
            "position": self.position,
            "dense": self.dense,
            "ranks": self.ranks,
        }
        value["sha256"] = digest_of(value)
        return value

    def to_bytes(self) -> bytes:
        """The file's content. Raises CheckpointError if it could not be read back."""
        try:
            value = self.to_json()
            data = canonical_bytes(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"checkpoint: the manifest cannot be written as JSON: {error}") from error
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"checkpoint: a manifest of {len(data)} bytes; {MAX_MANIFEST_BYTES} are the limit")
        Manifest.from_bytes(data, MANIFEST_NAME)
        return data

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write manifest.json: beside it, synced, renamed; the directory is synced before and after.

        Raises:
            CheckpointError: the manifest contradicts itself. OSError: it cannot be written; the old one stands.
        """
        directory = Path(directory)
        data = self.to_bytes()
        sync_directory(directory)
        descriptor, temporary = create_temporary(directory / MANIFEST_NAME)
        try:
            try:
                view = memoryview(data)
                while len(view):
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            except OSError as error:
                raise explained(error, "write", temporary) from error
            finally:
                os.close(descriptor)
            publish(temporary, directory / MANIFEST_NAME)
        except BaseException:
            remove_if_there(temporary)
            raise
        sync_directory(directory)

    @staticmethod
    def load(directory: str | os.PathLike[str]) -> Manifest:
        """Read and check manifest.json.

        Raises:
            CheckpointError: missing, damaged, of a newer version, or contradicting itself; names the field's path.
            OSError: the system could not read it.
        """
        path = Path(directory) / MANIFEST_NAME
        if not os.path.lexists(path):
            raise CheckpointError(
                f"checkpoint: there is no {path}: the directory holds no complete checkpoint; check the path"
            )
        descriptor, size = open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            if size > MAX_MANIFEST_BYTES:
                raise CheckpointError(f"checkpoint: {path} has {size} bytes; {MAX_MANIFEST_BYTES} are the limit")
            try:
                data = file.read(size)
            except OSError as error:
                raise explained(error, "read", path) from error
        return Manifest.from_bytes(data, str(path))

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Manifest:
        """Check the content of manifest.json; `where` names it in messages. Raises CheckpointError."""
        value = parse_canonical(data, where)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise CheckpointError(f"checkpoint: {where} is no manifest: its field 'format' must be {FORMAT!r}")
        _check_version(value, where)
        expected = digest_of(value)
        if value.get("sha256") != expected:
            raise CheckpointError(
                f"checkpoint: {where} is damaged: its SHA-256 is {expected}, its field 'sha256' says "
                f"{str(value.get('sha256'))[:80]!r}; restore it from a copy, or load another checkpoint"
            )
        manifest = _manifest(Field(value, where))
        check_manifest(manifest, where)
        return manifest


def _check_version(value: dict[str, Any], where: str) -> None:
    version = Field(value.get("version"), where, "version").integer(1, 1 << 31)
    if version > VERSION:
        raise CheckpointError(
            f"checkpoint: {where} is of format version {version}, this package reads versions up to {VERSION}: "
            "upgrade nestpipe_kernels (or the file is damaged)"
        )


def _manifest(top: Field) -> Manifest:
    fields = top.members(*_FIELDS)
    hash_fields = fields["hash"].members("name", "slices", "slice_owner")
    hash_fields["name"].one_of([HASH_NAME])
    hash_fields["slices"].integer(NUM_SLICES, NUM_SLICES)
    hash_fields["slice_owner"].one_of([SLICE_OWNER])
    world_size = fields["world_size"].integer(1, NUM_SLICES)
    return Manifest(
        generation=fields["generation"].integer(1, MAX_GENERATION),
        writer=fields["writer"].json_object(),
        world_size=world_size,
        tables=[TableRecord.from_field(one) for one in fields["tables"].items()],
        files=files_from_field(fields["files"]),
        position=fields["position"].json_object(),
        dense=fields["dense"].json_object_or_none(),
        ranks=[one.json_object() for one in fields["ranks"].items(world_size)],
    )
