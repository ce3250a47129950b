"""Checkpoints that the tools' tests look at: whole and small, with dense state, positions and admission counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from store_cases import fill, make_store

from nestpipe_kernels.checkpoint.generation import Generation, RankPart, save_generation
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.names import admission_file, dense_file, rank_file
from nestpipe_kernels.checkpoint.rows import save_tables
from nestpipe_kernels.checkpoint.tools.hashing import hash_keys, hash_name, shards_of, slices_of
from nestpipe_kernels.cli.main import main
from nestpipe_kernels.testing.threads import run_ranks_as_threads

CELLS = 8192
"""Bytes of the filter of `blocks`: 16 blocks of 512."""


def save_world(
    directory: Path, world: int, *, salt: int = 0, loader: str = "state", admission: str | None = None
) -> None:
    """Save a checkpoint of `world` ranks with everything that one can hold."""
    stores = [make_store() for _ in range(world)]
    for rank, store in enumerate(stores):
        fill(store, rank, world, salt)

    def body(rank: int, communicator: Any) -> None:
        save_generation(directory, communicator, lambda generation: _write(generation, stores[rank], loader, admission))

    run_ranks_as_threads(world, body)


def _write(generation: Generation, store: Any, loader: str, admission: str | None) -> RankPart:
    tables = save_tables(generation, [store])
    own = {
        "generators.torch": torch.full((7,), generation.rank, dtype=torch.uint8),
        "loader.order": torch.arange(5),
        "buffers.mean": torch.tensor([[0.5, 1.5]]),
    }
    generation.write_tensors(rank_file(generation.number, generation.rank), own)
    tree = {
        "generators": {"torch": {"$tensor": "generators.torch"}},
        "loader": {
            "kind": loader,
            "class": "BatchLoader",
            "any_world_size": loader == "state",
            "consumed": 3,
            "state": {"epoch": 1, "sample": 640, "order": {"$tensor": "loader.order"}},
            "in_flight": [{"before_draw": {"torch": {"$tensor": "generators.torch"}}, "fingerprint": None}],
        },
        "buffers": {"mean": {"$tensor": "buffers.mean"}},
        "extra": {},
    }
    if admission is not None:
        _write_admission(generation, tables[0], admission)
    dense = {"parameters": {"top.weight": {"$tensor": "parameters.top.weight"}}, "optimizer": {"lr": 0.125}}
    if generation.rank == 0:
        weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
        generation.write_tensors(dense_file(generation.number), {"parameters.top.weight": weight})
    return RankPart(tables, tree, {"step_count": 1200, "trained": 1200, "modules": {}}, dense)


def _write_admission(generation: Generation, table: Any, kind: str) -> None:
    """Counts of keys that this rank owns: exact, in order; or the blocks of a filter that its slices are in."""
    name = admission_file(generation.number, 0, generation.rank)
    table.admission_files.append(name)
    table.admission = {"name": "MinFrequency", "count": 3, "filter": None}
    keys = torch.arange(-300, 300) * 1_000_003
    hashes = hash_keys(hash_name("user"), keys.numpy())
    slices = torch.from_numpy(slices_of(hashes).astype("int64"))
    mine = slices * generation.world_size // 65536 == generation.rank
    if kind == "exact":
        shards = torch.from_numpy(shards_of(hashes).astype("int64"))
        order = torch.argsort(shards, stable=True)  # keys ascend already
        order = order[mine[order]]
        generation.write_tensors(name, {"keys": keys[order], "counts": keys[order] % 3})
        return
    table.admission["filter"] = {"name": "CountingFilter", "cells": CELLS}
    cells = torch.zeros(16, 512, dtype=torch.uint8)
    for key, at in zip(keys[mine].tolist(), slices[mine].tolist()):
        cells[at * 16 // 65536, key % 512] += 1
    blocks = cells.any(1).nonzero().flatten()
    generation.write_tensors(name, {"blocks": blocks, "cells": cells[blocks]})


def row_files(directory: Path) -> dict[str, bytes]:
    """Names and contents of the files with rows and admission counts."""
    return {path.name: path.read_bytes() for path in sorted(directory.glob("g*-t*.safetensors"))}


def change_bit(path: Path, at: int) -> None:
    """Flip the lowest bit of one byte; negative positions count from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def rewrite(directory: Path, change: Any) -> None:
    """Let `change` alter the manifest, and save it with a digest that fits."""
    manifest = Manifest.load(directory)
    change(manifest)
    manifest.save(directory)


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `nestpipe checkpoint ...`."""
    capsys.readouterr()
    code = main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
