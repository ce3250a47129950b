"""The .cu sources, compiled by the machine's C++ compiler with the emulator of tests/cuda, as functions on tensors."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe_kernels.types import DataType

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SOURCES = sorted(CSRC.rglob("*.cu"))
HARNESS = [ROOT / "tests" / "cuda" / name for name in ("emulator.cpp", "emulated_operations.cpp")]
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Werror"]


def compiler() -> str:
    """The C++ compiler; without one the test is skipped, or fails where CI=true."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        reason = "no C++ compiler (c++, or CXX) to compile CUDA sources for the CPU with"
        pytest.fail(reason) if os.environ.get("CI", "").lower() == "true" else pytest.skip(reason)
    assert found is not None
    return found


def compile_all(sources: Sequence[Path], folder: Path, *flags: str) -> list[Path]:
    """Object files of the sources, two at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    objects = [folder / f"{source.stem}.o" for source in sources]

    def compile_one(pair: tuple[Path, Path]) -> None:
        source, made = pair
        include = [f"-I{CSRC / 'include'}", f"-I{ROOT / 'tests' / 'cuda' / 'include'}", f"-I{CSRC / 'keys'}"]
        include += [f"-I{CSRC / 'cuda'}"]
        command = [compiler(), *FLAGS, *flags, *include, "-x", "c++", "-c", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, zip(sources, objects)))
    return objects


def link(objects: Sequence[Path], made: Path, *flags: str) -> Path:
    done = subprocess.run([compiler(), *flags, *map(str, objects), "-o", str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


class EmulatedCuda:
    """The operations of one compiled library. Results are filled with garbage before."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def schedule(self, seed: int, resident_blocks: int = 3, yield_percent: int = 30) -> None:
        """How the threads of launches to come are interleaved."""
        self._library.set_schedule(ctypes.c_uint64(seed), resident_blocks, yield_percent)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        message = function(*arguments)
        if message is not None:
            raise RuntimeError(message.decode())

    def dedup(self, keys: Tensor, tables: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        size = keys.numel()
        unique_index, counts = torch.full((size,), -7), torch.full((size,), -7)
        inverse, num_unique = torch.full((size,), -7, dtype=torch.int32), torch.full((1,), -7)
        self._call(
            "emulated_dedup", address(keys), address(tables), long(size), address(unique_index), address(inverse),
            address(counts), address(num_unique),
        )  # fmt: skip
        found = int(num_unique)
        return unique_index[:found], inverse, counts[:found]

    def bucketize(self, buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor, int]:
        order, counts = torch.full((buckets.numel(),), -7), torch.full((num_buckets,), -7)
        bad_position = torch.full((1,), -7)
        self._call(
            "emulated_bucketize", address(buckets), long(buckets.numel()), long(num_buckets), address(order),
            address(counts), address(bad_position),
        )  # fmt: skip
        return order, counts, int(bad_position)

    def gather_rows(self, rows: Tensor, index: Tensor, out: Tensor, data_type: DataType = DataType.FP32) -> int:
        """The first bad position, or -1, as of all that follow."""
        bad_position = torch.tensor([-1])
        self._call(
            "emulated_gather_rows", address(rows), long(rows.shape[0]), long(rows.stride(0)), long(out.shape[1]),
            address(index), long(index.numel()), address(out), long(out.stride(0)), data_type.code,
            address(bad_position),
        )  # fmt: skip
        return int(bad_position)

    def row_sync(self, source: Tensor, target: Tensor, source_index: Tensor, target_index: Tensor) -> int:
        bad_position = torch.tensor([-1])
        self._call(
            "emulated_row_sync", address(source), long(source.shape[0]), address(target), long(target.shape[0]),
            long(source.shape[1]), address(source_index), address(target_index), long(source_index.numel()),
            address(bad_position),
        )  # fmt: skip
        return int(bad_position)

    def scatter_rows(self, kind: str, target: Tensor, index: Tensor, source: Tensor | None) -> int:
        """kind: scatter_rows, scatter_add_rows or zero_rows."""
        bad_position = torch.tensor([-1])
        number = ("scatter_rows", "scatter_add_rows", "zero_rows").index(kind)
        self._call(
            "emulated_scatter_rows", number, address(target), long(target.shape[0]), long(target.stride(0)),
            long(target.shape[1]), address(index), long(index.numel()), address(source),
            long(0 if source is None else source.stride(0)), address(bad_position),
        )  # fmt: skip
        return int(bad_position)
