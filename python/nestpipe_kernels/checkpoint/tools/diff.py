"""`nestpipe checkpoint diff`: what differs between two checkpoints, at whatever numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.manifest_parts import TableRecord
from nestpipe_kernels.checkpoint.names import dense_file, rank_file
from nestpipe_kernels.checkpoint.tools.compare_admission import compare_admission
from nestpipe_kernels.checkpoint.tools.compare_rows import KeyDifference, RowsDifference, Side, compare_rows
from nestpipe_kernels.checkpoint.tools.compare_state import compare_trees
from nestpipe_kernels.checkpoint.tools.directory import read_manifest
from nestpipe_kernels.checkpoint.tools.inspect import STORAGE_NAMES
from nestpipe_kernels.checkpoint.tools.text import count

__all__ = ["SCOPES", "diff"]

SCOPES = ("state", "metadata", "embeddings")
"""What is compared: embeddings alone; all that training computes; that and what admission and eviction go by."""


def diff(first: Path, second: Path, scope: str = "state", show: int = 3) -> tuple[list[str], list[str]]:
    """Compare two checkpoints. Writers, generations and learning rates of tables are not compared.

    Args:
        first, second: directories.
        scope: one of SCOPES.
        show: keys shown of each difference.

    Returns:
        Lines about what differs (empty: equal), and lines about what was compared or could not be.

    Raises:
        CheckpointError: no checkpoint, or one that is damaged where it was read.
        OSError: the system could not read.
        ValueError: unknown scope.
    """
    if scope not in SCOPES:
        raise ValueError(f"diff: scope must be one of {', '.join(SCOPES)}, got {scope!r}")
    ours, theirs = read_manifest(first), read_manifest(second)
    differences: list[str] = []
    notes: list[str] = []
    tables = {table.name: table for table in theirs.tables}
    for table in ours.tables:
        if table.name not in tables:
            differences.append(f"table {table.name!r}: only in A ({count(table.rows, 'row')})")
            continue
        sides = Side(first, ours, table), Side(second, theirs, tables[table.name])
        _compare_table(*sides, scope, show, differences, notes)
    names = {table.name for table in ours.tables}
    differences += [
        f"table {table.name!r}: only in B ({count(table.rows, 'row')})"
        for table in theirs.tables
        if table.name not in names
    ]
    if scope != "embeddings":
        _compare_state((first, ours), (second, theirs), differences, notes)
    return differences, notes


def _compare_table(first: Side, second: Side, scope: str, show: int, differences: list[str], notes: list[str]) -> None:
    a, b = first.table, second.table
    settings = [f"{name} {x} / {y}" for name, x, y in _settings(a, b, scope) if x != y]
    if settings:
        differences.append(f"table {a.name!r}: {'; '.join(settings)}")
    if a.hash_name != b.hash_name:
        notes.append(f"table {a.name!r}: rows are not compared, as its keys are hashed by other names")
        return
    if scope == "metadata":
        text = compare_admission(first, second)
        differences += [f"table {a.name!r}: {text}"] if text else []
    columns = _columns(a, b, scope, notes)
    if _same_digests(first, second, columns):
        notes.append(f"table {a.name!r}: {count(a.rows, 'row')}, equal by the manifests' digests")
        return
    found = compare_rows(first, second, columns, show)
    if found.equal:
        notes.append(f"table {a.name!r}: {count(found.common, 'row')}, equal")
    else:
        differences += [f"table {a.name!r}: {text}" for text in _row_lines(found, show)]


def _settings(a: TableRecord, b: TableRecord, scope: str) -> Iterator[tuple[str, Any, Any]]:
    yield "dim", a.dim, b.dim
    yield "storage", STORAGE_NAMES[a.data_type], STORAGE_NAMES[b.data_type]
    yield "hash name", repr(a.hash_name), repr(b.hash_name)
    if scope != "embeddings":
        yield "optimizer", str(a.optimizer), str(b.optimizer)
        yield "rows of its vocabulary", a.num_embeddings, b.num_embeddings
        yield "seed", a.seed, b.seed
        yield "initial values", a.init, b.init
    if scope == "metadata":
        yield "admission", a.admission, b.admission
        yield "eviction", a.eviction, b.eviction
        yield "counters", a.counters, b.counters


def _columns(a: TableRecord, b: TableRecord, scope: str, notes: list[str]) -> list[str]:
    """Tensors of both whose rows can be compared."""
    ours, theirs = a.tensors(0), b.tensors(0)
    wanted = [name for name in ours if name != "keys" and (scope == "metadata" or name not in _METADATA)]
    if scope == "embeddings":
        wanted = ["embedding"]
    out = []
    for name in wanted:
        if name in theirs and ours[name][1][1:] == theirs[name][1][1:]:
            out.append(name)
        else:
            notes.append(
                f"table {a.name!r}: {name} is not compared, as B has {'another width' if name in theirs else 'none'}"
            )
    return out


_METADATA = ("last_used", "frequency")


def _same_digests(first: Side, second: Side, columns: list[str]) -> bool:
    """The same rows in the same files: nothing need be read."""

    def digests(side: Side) -> list[dict[str, Any]]:
        tensors = [side.manifest.files[file.name].tensors for file in side.table.files]
        return [{name: one[name] for name in ("keys", *columns)} for one in tensors]

    return digests(first) == digests(second)


def _row_lines(found: RowsDifference, show: int) -> Iterator[str]:
    for side, keys in (("A", found.only_first), ("B", found.only_second)):
        if keys.number:
            yield f"{count(keys.number, 'key')} only in {side}: {_keys(keys)}"
    for name, column in found.columns.items():
        if not column.rows:
            continue
        wide = name == "embedding" or name.startswith("state.")
        examples = "; ".join(
            f"key {key}{f' [{element}]' if wide else ''} {_number(a)} / {_number(b)}"
            for key, element, a, b in column.examples[:show]
        )
        yield (
            f"{name} differs in {column.rows:,} of {count(found.common, 'common row')}, by {column.largest:.3g} at "
            f"most: {examples}{'; ...' if column.rows > show else ''}"
        )


def _number(value: float | int) -> str:
    """Enough digits to tell any two float32 apart."""
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def _keys(keys: KeyDifference) -> str:
    return ", ".join(map(str, keys.first)) + (", ..." if keys.number > len(keys.first) else "")


def _compare_state(
    first: tuple[Path, Manifest], second: tuple[Path, Manifest], differences: list[str], notes: list[str]
) -> None:
    (a, ours), (b, theirs) = first, second
    none = ""
    differences += compare_trees("position", (a, ours, ours.position, none), (b, theirs, theirs.position, none))
    files = dense_file(ours.generation), dense_file(theirs.generation)
    differences += compare_trees("dense", (a, ours, ours.dense, files[0]), (b, theirs, theirs.dense, files[1]))
    if ours.world_size != theirs.world_size:
        notes.append(
            f"state of single ranks is not compared: A has {ours.world_size}, B has {theirs.world_size} of them"
        )
        return
    for rank in range(ours.world_size):
        files = rank_file(ours.generation, rank), rank_file(theirs.generation, rank)
        differences += compare_trees(
            f"rank {rank}", (a, ours, ours.ranks[rank], files[0]), (b, theirs, theirs.ranks[rank], files[1])
        )
