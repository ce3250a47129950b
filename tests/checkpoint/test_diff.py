"""`nestpipe checkpoint diff` and `inspect`: what differs is told, what does not is equal, at any numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from store_cases import fill, make_store, save_stores, specs
from tool_cases import rewrite, run, save_world

from nestpipe_kernels.checkpoint.files import TensorFileWriter, open_tensor_file
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.tools import row_files as row_files_module
from nestpipe_kernels.checkpoint.tools.diff import diff

USER = "g00000001-t000-r00000-p000.safetensors"
DENSE = "g00000001-dense.safetensors"


def change(directory: Path, name: str, edit: Any) -> None:
    """Let `edit` alter the tensors of a file in place, or give others."""
    with open_tensor_file(directory / name) as file:
        tensors = {tensor: file.read(tensor) for tensor in file.regions}
    tensors = edit(tensors) or tensors
    with TensorFileWriter(directory / name, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}) as writer:
        for tensor, value in tensors.items():
            writer.write(tensor, value)
        record = writer.close()

    def note(manifest: Manifest) -> None:
        manifest.files[name] = record
        for table in manifest.tables:
            for k, one in enumerate(table.files):
                if one.name == name:
                    rows = tensors["keys"].numel()
                    table.rows += rows - one.rows
                    table.files[k] = type(one)(name, one.rank, rows, one.first_slice, one.end_slice)

    rewrite(directory, note)


@pytest.mark.parametrize("worlds", [(1, 1), (1, 2), (3, 2)])
def test_equal_checkpoints(tmp_path, capsys, worlds: tuple[int, int]) -> None:
    for name, world in zip("ab", worlds):
        save_world(tmp_path / name, world)
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--metadata")
    how = "equal by the manifests' digests" if worlds[0] == worlds[1] else "equal"
    lines = [f"table 'user': 706 rows, {how}", f"table 'item': 250 rows, {how}"]
    lines.append(
        "table 'never used': 0 rows, equal by the manifests' digests"
        if len(set(worlds)) == 1
        else "table 'never used': 0 rows, equal"
    )
    if worlds[0] != worlds[1]:
        lines.append(f"state of single ranks is not compared: A has {worlds[0]}, B has {worlds[1]} of them")
    assert (code, out.splitlines()) == (0, [*lines, "equal"])


def test_rows_that_differ(tmp_path, capsys) -> None:
    save_world(tmp_path / "a", 1)
    save_world(tmp_path / "b", 1)
    keys: list[int] = []

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        keys.extend(tensors["keys"][[3, 9, 500, 600, 601]].tolist())
        tensors["embedding"][3, 2] = 0.1
        tensors["embedding"][[9, 500, 600, 601], 0] += 2.5
        tensors["state.exp_avg"][9] = -0.0
        tensors["updates"][600] += 7
        tensors["last_used"][601] += 1

    change(tmp_path / "b", USER, edit)
    with open_tensor_file(tmp_path / "a" / USER) as file:
        old, state, updates, used = (file.read(n) for n in ("embedding", "state.exp_avg", "updates", "last_used"))
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--metadata", "--show", "2")
    lines = out.splitlines()
    assert code == 1 and lines[-1] == "DIFFERENT"
    worst = max(2.5, abs(float(old[3, 2]) - 0.1))
    assert lines[2:-1] == [
        f"table 'user': embedding differs in 5 of 706 common rows, by {worst:.3g} at most: key {keys[0]} [2] "
        f"{float(old[3, 2]):.9g} / 0.100000001; key {keys[1]} [0] {float(old[9, 0]):.9g} / "
        f"{float(old[9, 0]) + 2.5:.9g}; ...",
        f"table 'user': state.exp_avg differs in 1 of 706 common rows, by {float(state[9].max()):.3g} at most: "
        f"key {keys[1]} [0] {float(state[9, 0]):.9g} / -0",
        f"table 'user': updates differs in 1 of 706 common rows, by 7 at most: key {keys[3]} {updates[600]} / "
        f"{updates[600] + 7}",
        f"table 'user': last_used differs in 1 of 706 common rows, by 1 at most: key {keys[4]} {used[601]} / "
        f"{used[601] + 1}",
    ]
    assert "last_used" not in run(capsys, "diff", tmp_path / "a", tmp_path / "b")[1]
    out = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--embeddings-only")[1]
    assert "embedding differs in 5" in out and "state" not in out and "updates" not in out


@pytest.mark.parametrize("budget", [1, 12 << 20])
@pytest.mark.parametrize("world", [1, 3])
def test_keys_of_one_side(tmp_path, capsys, monkeypatch, world: int, budget: int) -> None:
    """Also where one side has no row in a part."""
    monkeypatch.setattr(row_files_module, "BUDGET", budget)
    tables = specs()
    few = [torch.arange(-5, 20), torch.arange(0, 30), torch.arange(0)]
    more = [torch.arange(0, 300), torch.arange(0, 31), torch.arange(2)]
    for name, keys, ranks in (("a", few, 1), ("b", more, world)):
        stores = [make_store(tables=tables) for _ in range(ranks)]
        for rank, store in enumerate(stores):
            fill(store, rank, ranks, keys=keys)
        save_stores(tmp_path / name, stores)
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--show", "5")
    assert code == 1
    only_a = next(line for line in out.splitlines() if "only in A" in line)
    assert only_a.startswith("table 'user': 5 keys only in A: ")
    assert set(only_a.split(": ")[-1].split(", ")) == {"-1", "-2", "-3", "-4", "-5"}
    assert "table 'user': 280 keys only in B: " in out and out.count(", ...") == 1
    assert "table 'item': 1 key only in B: 30" in out
    assert "table 'never used': 2 keys only in B: " in out
    assert "differs" not in out
    swapped = run(capsys, "diff", tmp_path / "b", tmp_path / "a")[1]
    assert "table 'user': 280 keys only in A" in swapped and "5 keys only in B" in swapped


def test_bits_are_compared(tmp_path) -> None:
    """A NaN equals itself; -0.0 is not 0.0; a difference of infinities is no number."""
    save_world(tmp_path / "a", 1)
    for row, value in ((0, float("nan")), (1, 0.0), (2, float("inf"))):
        change(tmp_path / "a", USER, lambda t, row=row, value=value: t["embedding"].__setitem__((row, 0), value))
    save_world(tmp_path / "b", 1)
    change(
        tmp_path / "b",
        USER,
        lambda t: t["embedding"].__setitem__((slice(0, 3), 0), torch.tensor([float("nan"), -0.0, 1])),
    )
    differences, _ = diff(tmp_path / "a", tmp_path / "b")
    (line,) = differences
    assert (
        "embedding differs in 2 of 706 common rows, by 0 at most" in line and " 0 / -0; " in line and " inf / 1" in line
    )


def test_storage_types_are_compared_as_float32(tmp_path) -> None:
    save_world(tmp_path / "a", 1)
    save_world(tmp_path / "b", 2)

    def note(manifest: Manifest) -> None:
        manifest.tables[0].data_type = "BF16"
        for name, record in records.items():
            manifest.files[name] = record

    records = {}
    for name in (USER, USER.replace("r00000", "r00001")):
        with open_tensor_file(tmp_path / "b" / name) as file:
            tensors = {tensor: file.read(tensor) for tensor in file.regions}
        tensors["embedding"] = tensors["embedding"].to(torch.bfloat16)
        with TensorFileWriter(
            tmp_path / "b" / name, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
        ) as writer:
            for tensor, value in tensors.items():
                writer.write(tensor, value)
            records[name] = writer.close()
    rewrite(tmp_path / "b", note)
    differences, _ = diff(tmp_path / "a", tmp_path / "b")
    with open_tensor_file(tmp_path / "a" / USER) as file:
        values = file.read("embedding")
    rounded = (values.to(torch.bfloat16).float() != values).any(1).sum()
    assert differences[0] == "table 'user': storage float32 / bfloat16"
    assert f"embedding differs in {rounded} of 706 common rows" in differences[1] and len(differences) == 2


def test_settings_tables_and_state(tmp_path, capsys) -> None:
    save_world(tmp_path / "a", 1)
    save_world(tmp_path / "b", 1)

    def edit(manifest: Manifest) -> None:
        manifest.tables[2].name = "renamed"
        manifest.tables[1].seed = 99
        manifest.position["step_count"] = 1201
        manifest.dense["optimizer"]["lr"] = 0.25
        manifest.dense["optimizer"]["momentum"] = 0.9
        manifest.ranks[0]["loader"]["state"]["sample"] = 641

    rewrite(tmp_path / "b", edit)
    change(tmp_path / "b", DENSE, lambda t: t["parameters.top.weight"].__setitem__((1, 2), 6.5))
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert out.splitlines()[2:] == [
        "table 'item': seed 4 / 99",
        "table 'never used': only in A (0 rows)",
        "table 'renamed': only in B (0 rows)",
        "position step_count: 1200 / 1201",
        "dense optimizer.lr: 0.125 / 0.25",
        "dense optimizer.momentum: only in B (0.9)",
        "dense parameters.top.weight: 1 of 12 elements differ, by 0.5 at most; element 6: 6 / 6.5",
        "rank 0 loader.state.sample: 640 / 641",
        "DIFFERENT",
    ]
    out = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--embeddings-only")[1]
    assert "seed" not in out and "dense" not in out and "only in A (0 rows)" in out


def test_a_damaged_side_is_named(tmp_path, capsys) -> None:
    save_world(tmp_path / "a", 1)
    save_world(tmp_path / "b", 2)
    data = bytearray((tmp_path / "b" / USER).read_bytes())
    data[-1] ^= 1
    (tmp_path / "b" / USER).write_bytes(data)
    code, _, error = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and f"{tmp_path / 'b' / USER}: tensor 'updates' is damaged" in error


def test_admission_counts_are_metadata(tmp_path, capsys) -> None:
    save_world(tmp_path / "a", 1, admission="exact")
    save_world(tmp_path / "b", 2, admission="exact")
    save_world(tmp_path / "c", 1, admission="exact")
    change(tmp_path / "c", "g00000001-t000-r00000-admission.safetensors", lambda t: {**t, "counts": t["counts"] + 1})
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--metadata")[0] == 0
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "c")[0] == 0
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "c", "--metadata")
    assert code == 1 and "table 'user': admission counts differ" in out


def test_unknown_scope() -> None:
    with pytest.raises(ValueError, match="diff: scope must be one of state, metadata, embeddings, got 'all'"):
        diff(Path("a"), Path("b"), "all")


# ----------------------------------------------------------------------------------------------------------- inspect


def test_inspect_shows_everything(tmp_path, capsys) -> None:
    save_world(tmp_path, 2, admission="filter")
    code, out, _ = run(capsys, "inspect", tmp_path)
    assert code == 0
    for text in (
        f"{tmp_path}: generation 1, format version 1, 2 ranks, 12 files, ",
        "position: step_count 1200",
        "table       rows  dim  storage",
        "user         706    4  float32",
        "adam(beta1=0.9, beta2=0.999, ",
        "MinFrequency(count=3, filter=CountingFilter(cells=8192))",
        "dense: 1 tensor, 12 numbers, ",
        "rank  rows  position of its loader",
        "BatchLoader: 3 batches of its epoch, epoch 1, sample 640",
        "buffers, generators",
        "g00000001-t000-r00001-admission.safetensors",
    ):
        assert text in out, text


def test_inspect_as_json(tmp_path, capsys) -> None:
    save_world(tmp_path, 2)
    found = json.loads(run(capsys, "inspect", tmp_path, "--json")[1])
    assert [table["rows"] for table in found["tables"]] == [706, 250, 0]
    assert sum(found["tables"][0]["rows_of_rank"]) == 706
    assert found["position"]["step_count"] == 1200 and found["world_size"] == 2
    assert found["bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir() if path.name != ".lock")
    assert found["ranks"][1]["state"]["loader"]["state"]["epoch"] == 1
