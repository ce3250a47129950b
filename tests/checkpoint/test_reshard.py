"""`nestpipe checkpoint reshard`: what a run of so many ranks would have saved, from any number, source untouched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from store_cases import contents, load_stores, make_store, save_stores
from tool_cases import change_bit, rewrite, row_files, run, save_world

from nestpipe_kernels.checkpoint.files import open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.tools import row_files as row_files_module
from nestpipe_kernels.checkpoint.tools.directory import leftovers
from nestpipe_kernels.checkpoint.tools.reshard import reshard
from nestpipe_kernels.init import Uniform
from nestpipe_kernels.ops.owners import default_slice_owner, owners
from nestpipe_kernels.policy import CountingFilter, MinFrequency
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import UNBOUNDED, TableSpec

WORLDS = [(1, 2), (2, 1), (1, 4), (2, 2)]
UNEVEN = [(4, 3), (3, 5)]
"""Some blocks of a filter belong to two ranks: see test_shared_blocks_take_the_larger_cells."""


@pytest.mark.parametrize(
    "before, after, admission",
    [(*w, a) for w in WORLDS for a in (None, "exact", "filter")] + [(*w, a) for w in UNEVEN for a in (None, "exact")],
)
def test_files_are_those_of_a_run_of_so_many_ranks(tmp_path, before: int, after: int, admission) -> None:
    save_world(tmp_path / "a", before, admission=admission)
    save_world(tmp_path / "b", after, admission=admission)
    reshard(tmp_path / "a", after, tmp_path / "out")
    assert row_files(tmp_path / "out") == row_files(tmp_path / "b")
    ours, theirs = Manifest.load(tmp_path / "out"), Manifest.load(tmp_path / "b")
    assert ours.tables == theirs.tables
    assert (ours.world_size, ours.position, ours.dense) == (after, theirs.position, theirs.dense)


def test_fault_41_ranks_4_2_3_1(tmp_path) -> None:
    """One after the other, by this tool alone: the last files are those of the start."""
    save_world(tmp_path / "4", 4)
    for before, after in ((4, 2), (2, 3), (3, 1), (1, 4)):
        reshard(tmp_path / str(before), after, tmp_path / (f"{after}" if after != 4 else "4 again"))
    assert row_files(tmp_path / "4 again") == row_files(tmp_path / "4")
    stores = [make_store() for _ in range(3)]
    load_stores(tmp_path / "3", stores)
    originals = [make_store() for _ in range(4)]
    load_stores(tmp_path / "4", originals)
    assert contents(stores) == contents(originals)


@pytest.mark.parametrize("budget", [1, 1000, 20_000])
def test_small_parts_give_the_same_files(tmp_path, monkeypatch, budget: int) -> None:
    save_world(tmp_path / "a", 3)
    reshard(tmp_path / "a", 2, tmp_path / "whole")
    monkeypatch.setattr(row_files_module, "BUDGET", budget)
    reshard(tmp_path / "a", 2, tmp_path / "pieces")
    assert row_files(tmp_path / "pieces") == row_files(tmp_path / "whole")


def test_shared_blocks_take_the_larger_cells(tmp_path) -> None:
    save_world(tmp_path / "a", 3, admission="filter")
    reshard(tmp_path / "a", 1, tmp_path / "out")
    manifests = Manifest.load(tmp_path / "a"), Manifest.load(tmp_path / "out")
    expected = torch.zeros(16, 512, dtype=torch.uint8)
    for name in manifests[0].tables[0].admission_files:
        with open_tensor_file(tmp_path / "a" / name, manifests[0].files[name]) as file:
            blocks = file.read("blocks")
            expected[blocks] = torch.maximum(expected[blocks], file.read("cells"))
    (name,) = manifests[1].tables[0].admission_files
    with open_tensor_file(tmp_path / "out" / name, manifests[1].files[name]) as file:
        assert file.read("blocks").tolist() == expected.any(1).nonzero().flatten().tolist()
        assert torch.equal(file.read("cells"), expected[file.read("blocks")])


def test_in_place_replaces_the_checkpoint(tmp_path, capsys) -> None:
    save_world(tmp_path / "a", 2)
    save_world(tmp_path / "b", 3)
    code, out, _ = run(capsys, "reshard", tmp_path / "a", "--ranks", 3, "--in-place")
    assert code == 0 and out.startswith(f"{tmp_path / 'a'}: 2 ranks -> 3, 3 tables, 956 rows, ")
    assert Manifest.load(tmp_path / "a").generation == 2
    assert list(row_files(tmp_path / "a").values()) == list(row_files(tmp_path / "b").values())
    assert leftovers(tmp_path / "a", Manifest.load(tmp_path / "a").files) == []
    assert run(capsys, "verify", tmp_path / "a")[0] == 0


def test_state_of_single_ranks(tmp_path, capsys) -> None:
    save_world(tmp_path / "a", 2)
    code, out, _ = run(capsys, "reshard", tmp_path / "a", "--ranks", 3, "--out", tmp_path / "out")
    assert code == 0
    assert out.splitlines()[1:] == [
        "kept: the position of the loader (BatchLoader), which serves any number of ranks",
        "dropped: random generators of 2 ranks; the new ranks start with theirs",
        "kept for every rank, as rank 0 had it: buffers",
    ]
    manifest = Manifest.load(tmp_path / "out")
    for tree in manifest.ranks:
        assert tree["generators"] == {} and tree["loader"]["in_flight"] == []
        assert tree["loader"]["state"]["sample"] == 640 and "before" not in tree["loader"]
    with open_tensor_file(tmp_path / "out" / "g00000001-r00002.safetensors") as file:
        assert set(file.regions) == {"loader.order", "buffers.mean"}
        assert file.read("buffers.mean").tolist() == [[0.5, 1.5]]


def test_a_position_for_one_number_of_ranks_is_dropped(tmp_path) -> None:
    save_world(tmp_path / "a", 2, loader="count")
    notes = reshard(tmp_path / "a", 1, tmp_path / "out")
    assert notes[1] == (
        "dropped: the position of the loader (BatchLoader), which holds for 2 ranks only; load with start_epoch=True"
    )
    assert Manifest.load(tmp_path / "out").ranks[0]["loader"] == {"kind": "unknown"}


def test_the_same_number_of_ranks_keeps_everything(tmp_path) -> None:
    save_world(tmp_path / "a", 2)
    notes = reshard(tmp_path / "a", 2, tmp_path / "out")
    assert notes[1:] == ["kept: all state of single ranks, as their number stays the same"]
    assert Manifest.load(tmp_path / "out").ranks == Manifest.load(tmp_path / "a").ranks
    assert run_files(tmp_path / "a") == run_files(tmp_path / "out")


def run_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}


# ------------------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("file", ["g00000001-t000-r00001-p000", "g00000001-dense", "g00000001-r00000"])
@pytest.mark.parametrize("at", [20, -10])
def test_damage_is_named_and_nothing_is_left(tmp_path, capsys, file: str, at: int) -> None:
    save_world(tmp_path / "a", 2)
    change_bit(tmp_path / "a" / f"{file}.safetensors", at)
    before = run_files(tmp_path / "a")
    code, _, error = run(capsys, "reshard", tmp_path / "a", "--ranks", 3, "--out", tmp_path / "out")
    assert code == 1 and error.count("\n") == 1
    assert f"{file}.safetensors" in error and ("header" if at == 20 else "SHA-256") in error
    assert os.listdir(tmp_path / "out") == [".lock"]
    code, _, error = run(capsys, "reshard", tmp_path / "a", "--ranks", 3, "--in-place")
    assert code == 1 and run_files(tmp_path / "a") == before
    assert Manifest.load(tmp_path / "a").world_size == 2


def test_a_full_disk_leaves_the_source_intact(tmp_path, capsys, monkeypatch) -> None:
    save_world(tmp_path / "a", 2)
    before = run_files(tmp_path / "a")
    written = [0]
    real = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        written[0] += len(data)
        if written[0] > 30_000:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    code, _, error = run(capsys, "reshard", tmp_path / "a", "--ranks", 3, "--in-place")
    assert code == 1 and error.count("\n") == 1
    assert "No space left on device" in error and "free some room" in error and ".safetensors.tmp" in error
    monkeypatch.setattr(os, "pwrite", real)
    assert run_files(tmp_path / "a") == before
    assert run(capsys, "verify", tmp_path / "a")[0] == 0


@pytest.mark.parametrize("out", ["holds something", "a file", "a checkpoint"])
def test_out_must_be_new(tmp_path, capsys, out: str) -> None:
    save_world(tmp_path / "a", 1)
    target = tmp_path / "out"
    if out == "a file":
        target.write_text("x")
    elif out == "a checkpoint":
        save_world(target, 1)
    else:
        target.mkdir()
        (target / "notes.txt").write_text("x")
    code, _, error = run(capsys, "reshard", tmp_path / "a", "--ranks", 2, "--out", target)
    assert code == 1
    assert f"--out {target} " in error and "choose a directory that is not there yet" in error
    if out != "a file":
        assert "notes.txt" in error or "manifest.json" in error


def test_an_unfinished_reshard_can_be_repeated(tmp_path, capsys) -> None:
    save_world(tmp_path / "a", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "g00000001-t000-r00000-p000.safetensors.tmp").write_bytes(b"x")
    (tmp_path / "out" / ".lock").write_bytes(b"")
    assert run(capsys, "reshard", tmp_path / "a", "--ranks", 2, "--out", tmp_path / "out")[0] == 0
    assert run(capsys, "verify", tmp_path / "out")[1].count("\n") == 1


def test_rows_of_two_ranks_with_one_key(tmp_path, capsys) -> None:
    """A checkpoint whose digests are right and whose rows are not."""
    save_world(tmp_path / "a", 2)

    def swap(manifest: Manifest) -> None:
        first, second = (f"g00000001-t000-r0000{rank}-p000.safetensors" for rank in range(2))
        (tmp_path / "a" / second).write_bytes((tmp_path / "a" / first).read_bytes())
        manifest.files[second] = manifest.files[first]
        table = manifest.tables[0]
        table.files[1] = type(table.files[1])(second, 1, table.files[0].rows, *_slices(table.files[1]))
        table.rows = 2 * table.files[0].rows

    rewrite(tmp_path / "a", swap)
    code, _, error = run(capsys, "reshard", tmp_path / "a", "--ranks", 3, "--out", tmp_path / "out")
    assert code == 1 and "is in " in error and "a key has one row" in error
    code, out, _ = run(capsys, "verify", tmp_path / "a")
    assert code == 1 and "does not belong into the file of rank 1 for slices 32768 to 65535" in out


def _slices(file) -> tuple[int, int]:
    return file.first_slice, file.end_slice


@pytest.mark.parametrize("ranks", [65537, 10**9])
def test_too_many_ranks(tmp_path, capsys, ranks: int) -> None:
    code, _, error = run(capsys, "reshard", tmp_path, "--ranks", ranks, "--out", tmp_path / "out")
    assert code == 1 and f"reshard: ranks must be in [1, 65536], got {ranks}" in error


# ------------------------------------------------------------------------------------------------- loading, then saving


@pytest.mark.parametrize("rule", [MinFrequency(3), MinFrequency(3, CountingFilter(20_000))], ids=["exact", "filter"])
@pytest.mark.parametrize("before, after", [(1, 3), (2, 3), (3, 2), (3, 5), (5, 3)])
def test_the_same_as_loading_and_saving(tmp_path, before: int, after: int, rule) -> None:
    """Admission counts included, also of blocks of a filter that several ranks have."""
    tables = [TableSpec("t", UNBOUNDED, Uniform(-1, 1), 3, admission=rule)]
    save_stores(tmp_path / "a", [_used_store(tables, rank, before) for rank in range(before)])
    stores = [make_store(tables=tables) for _ in range(after)]
    load_stores(tmp_path / "a", stores)
    save_stores(tmp_path / "loaded and saved", stores)
    reshard(tmp_path / "a", after, tmp_path / "resharded")
    assert row_files(tmp_path / "resharded") == row_files(tmp_path / "loaded and saved")
    assert len(row_files(tmp_path / "resharded")) == 2 * after
    ours, theirs = (Manifest.load(tmp_path / name).tables for name in ("resharded", "loaded and saved"))
    assert ours == theirs


def _used_store(tables: list[TableSpec], rank: int, world: int) -> EmbeddingStore:
    store = make_store(tables=tables)
    generator = torch.Generator().manual_seed(5)
    for batch in range(3):
        keys = torch.randint(-500, 500, (400,), generator=generator).unique()
        numbers = torch.zeros(keys.numel(), dtype=torch.int32)
        mine = owners(keys, numbers, store.table_hashes, default_slice_owner(world)) == rank
        store.retrieve(keys[mine], numbers[mine], torch.ones_like(keys[mine]), batch)
    return store
