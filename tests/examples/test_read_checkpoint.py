"""examples/read_checkpoint.py reads what the package writes, with nothing of it; so does the safetensors library."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nestpipe_kernels.checkpoint.generation import RankPart, save_generation
from nestpipe_kernels.checkpoint.rows import save_tables
from nestpipe_kernels.comm import LocalCommunicator
from nestpipe_kernels.init import Uniform
from nestpipe_kernels.optim import Adam
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import UNBOUNDED, DataType, TableSpec

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "read_checkpoint.py"


@pytest.fixture(params=[kind.value for kind in DataType])
def saved(tmp_path, request) -> tuple[Path, EmbeddingStore, torch.Tensor]:
    """A checkpoint of one table, its store and its keys."""
    settings = {} if request.param == "FP32" else {"data_type": DataType[request.param]}
    store = EmbeddingStore([TableSpec("item", UNBOUNDED, Uniform(-1, 1), 3)], dim=6, optimizer=Adam(), **settings)
    keys = torch.tensor([5, -7, 2**63 - 1, -(2**63), 0])
    store.retrieve(keys, torch.zeros(5, dtype=torch.int32), torch.tensor([1, 2, 3, 4, 5]), 17)
    save_generation(tmp_path / "a", LocalCommunicator(), lambda generation: RankPart(save_tables(generation, [store])))
    return tmp_path / "a", store, keys


def _example():
    spec = importlib.util.spec_from_file_location("read_checkpoint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_reads_every_row(saved) -> None:
    directory, store, keys = saved
    table = _example().read_table(directory, "item")
    order = np.argsort(table["keys"])
    assert table["keys"][order].tolist() == sorted(keys.tolist())
    found = dict(zip(table["keys"].tolist(), table["embedding"].astype(np.float32)))
    rows, _ = store.find(keys)
    for key, row in zip(keys.tolist(), rows.numpy()):
        assert (found[key] == row).all()
    assert dict(zip(table["keys"].tolist(), table["frequency"].tolist()))[-7] == 2
    assert (table["last_used"] == 17).all() and (table["updates"] == 0).all()
    assert table["state.exp_avg"].shape == table["state.exp_avg_sq"].shape == (5, 6)


def test_it_needs_nothing_but_numpy(saved) -> None:
    imported = {
        name.name.split(".")[0]
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.Import)
        for name in node.names
    } | {node.module for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.ImportFrom)}
    assert imported == {"hashlib", "json", "sys", "pathlib", "numpy"}
    done = subprocess.run(
        [sys.executable, "-I", SCRIPT, saved[0]], capture_output=True, text=True, timeout=60, cwd=saved[0].parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("item {") and "'keys': ('int64', (5,))" in done.stdout


@pytest.mark.parametrize("name", ["manifest.json", "g00000001-t000-r00000-p000.safetensors"])
def test_it_sees_damage(saved, name: str) -> None:
    path = saved[0] / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises((AssertionError, ValueError)):
        _example().read_table(saved[0], "item")


def test_the_safetensors_library_opens_the_files(saved) -> None:
    numpy_reader = pytest.importorskip("safetensors.torch")
    ours = _example().read_table(saved[0], "item")
    theirs = numpy_reader.load_file(saved[0] / "g00000001-t000-r00000-p000.safetensors")
    assert set(theirs) == set(ours)
    for name, tensor in theirs.items():
        assert (tensor.to(torch.float64).numpy() == ours[name].astype(np.float64)).all()
