"""What single ranks kept to themselves, for another number of ranks: what serves any rank stays, the rest cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestpipe_kernels.checkpoint.files import FileRecord, TensorFile, TensorFileWriter, open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.names import rank_file
from nestpipe_kernels.checkpoint.tools.text import count
from nestpipe_kernels.errors import CheckpointError

__all__ = ["reshard_ranks"]

_AT_ONCE = 4 << 20
_GENERATORS, _LOADER = "generators", "loader"
_OF_ONE_RANK = ("before", "before_draw", "fingerprint")
"""Fields of a loader's position: generators of the old rank, and a batch of it."""


def reshard_ranks(
    source: tuple[Path, Manifest], target: tuple[Path, int, int]
) -> tuple[list[dict[str, Any]], dict[str, FileRecord], list[str]]:
    """Trees and files of the new ranks.

    Every rank gets what loading at another number of ranks would give it: rank 0's state (buffers, extra objects), the
    position of a loader that serves any number of ranks, and no random generators.

    Args:
        source: directory and manifest.
        target: directory, generation, number of ranks.

    Returns:
        The trees by rank, records of the files by name, and lines that say what was kept and what was not.

    Raises:
        CheckpointError: a file is damaged. OSError: as the system says.
    """
    directory, manifest = source
    out, generation, ranks = target
    loader, loader_rank, notes = _position(manifest)
    tree = dict(manifest.ranks[0])
    if _GENERATORS in tree:
        notes.append(
            f"dropped: random generators of {count(manifest.world_size, 'rank')}; the new ranks start with theirs"
        )
        tree[_GENERATORS] = {}
    if _LOADER in tree:
        tree[_LOADER] = loader
    kept = sorted(name for name, value in tree.items() if value and name not in (_GENERATORS, _LOADER))
    if kept:
        notes.append(f"kept for every rank, as rank 0 had it: {', '.join(kept)}")
    if rank_file(manifest.generation, 0) not in manifest.files:
        return [tree] * ranks, {}, notes
    wanted = {name: 0 for key, value in tree.items() if key != _LOADER for name in _tensors(value)}
    wanted |= dict.fromkeys(_tensors(loader if _LOADER in tree else None), loader_rank)
    files = {}
    with contextlib.ExitStack() as stack:
        names = {rank: rank_file(manifest.generation, rank) for rank in {0, loader_rank}}
        opened = {
            rank: stack.enter_context(open_tensor_file(directory / name, manifest.files[name]))
            for rank, name in names.items()
        }
        for rank in range(ranks):
            name = rank_file(generation, rank)
            files[name] = _write(out / name, opened, wanted)
    return [tree] * ranks, files, notes


def _position(manifest: Manifest) -> tuple[dict[str, Any], int, list[str]]:
    """The loader's position for all new ranks, the rank whose file has its tensors, and a note."""
    records = [tree.get(_LOADER) for tree in manifest.ranks]
    known = [record for record in records if isinstance(record, dict)]
    if all(record.get("kind") in ("none", "unknown") for record in known):
        return (known[0] if known else {}), 0, []
    for rank, record in enumerate(records):
        if isinstance(record, dict) and record.get("kind") == "state" and record.get("any_world_size") is True:
            shared = {name: value for name, value in record.items() if name not in _OF_ONE_RANK}
            note = f"kept: the position of the loader ({record.get('class')}), which serves any number of ranks"
            return {**shared, "in_flight": []}, rank, [note]
    held = next((record["class"] for record in known if "class" in record), "a loader that had ended")
    note = (
        f"dropped: the position of the loader ({held}), which holds for {count(manifest.world_size, 'rank')} only; "
        "load with start_epoch=True"
    )
    return {"kind": "unknown"}, 0, [note]


def _tensors(tree: Any) -> Iterator[str]:
    """Names of the tensors that a tree refers to."""
    if isinstance(tree, dict):
        if len(tree) == 1:
            tag, name = next(iter(tree.items()))
            if tag in ("$tensor", "$array") and isinstance(name, str):
                yield name
                return
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _tensors(value)


def _write(path: Path, opened: dict[int, TensorFile], wanted: dict[str, int]) -> FileRecord:
    for name, rank in wanted.items():
        if name not in opened[rank].regions:
            raise CheckpointError(
                f"checkpoint: {opened[rank].path}: there is no tensor {name!r}, which the manifest names"
            )
    regions = {name: opened[rank].regions[name] for name, rank in wanted.items()}
    with TensorFileWriter(path, {name: (region.dtype, region.shape) for name, region in regions.items()}) as writer:
        for name, rank in wanted.items():
            region = regions[name]
            rows = region.shape[0] if region.shape else 1
            step = max(_AT_ONCE // max(region.row_bytes, 1), 1)
            for first in range(0, rows, step):
                writer.write(name, opened[rank].read(name, first, min(step, rows - first)))
        return writer.close()
