"""The extension `_cuda`, compiled by the machine's C++ compiler with the emulator of tests/cuda in place of CUDA."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe_kernels import _native
from nestpipe_kernels.ops.bucketize import cuda as bucketize_cuda
from nestpipe_kernels.ops.dedup import cuda as dedup_cuda
from nestpipe_kernels.ops.gather_rows import cuda as gather_cuda
from nestpipe_kernels.ops.row_sync import cuda as sync_cuda
from nestpipe_kernels.ops.scatter_add_rows import cuda as scatter_cuda
from nestpipe_kernels.types import DataType

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
SOURCES = sorted(CSRC.rglob("*.cu"))
EMULATOR = ROOT / "tests" / "cuda" / "emulator.cpp"
BINDINGS = sorted((CSRC / "bindings" / "cuda").glob("*.cpp"))
ALL_BINDINGS = "all_bindings.cpp"
"""All of them in one file, not optimized: what they include takes most of the time."""
HEADERS = "headers.h"
COMMON = ["<algorithm>", "<functional>", "<memory>", "<string>", "<vector>", '"nestpipe/cuda/emulated.h"']
"""What most sources include: compiled once for all of them."""
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden"]
INCLUDE = [f"-I{CSRC / 'include'}", f"-I{ROOT / 'tests' / 'cuda' / 'include'}", f"-I{CSRC / 'cuda'}"]
INCLUDE += [f"-I{CSRC / folder}" for folder in ("buffers", "keys", "optim", "pool", "store")]


def python_headers() -> list[str]:
    """pybind11 is asked for where something is compiled: machines with a GPU run tests without it."""
    import pybind11

    return [f"-isystem{sysconfig.get_paths()['include']}", f"-isystem{pybind11.get_include()}"]


def compiler() -> str:
    """The C++ compiler; without one the test is skipped, or fails where CI=true."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        reason = "no C++ compiler (c++, or CXX) to compile CUDA sources for the CPU with"
        pytest.fail(reason) if os.environ.get("CI", "").lower() == "true" else pytest.skip(reason)
    assert found is not None
    return found


def object_of(source: Path, folder: Path) -> Path:
    """Where the object file of a source is."""
    return folder / f"{source.stem}.o"


def compile_all(sources: Sequence[Path], folder: Path, *flags: str) -> list[Path]:
    """Object files of the sources, two at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    headers = ["-include", str(folder / HEADERS)] if (folder / f"{HEADERS}.gch").exists() else []

    def compile_one(source: Path) -> Path:
        kind = ["-O0", *python_headers()] if source.name == ALL_BINDINGS else ["-O1", *WARNINGS, *headers]
        return _compile("c++", source, object_of(source, folder), *kind, *flags)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def _compile(language: str, source: Path, made: Path, *flags: str) -> Path:
    command = [compiler(), *FLAGS, *flags, *INCLUDE, "-x", language, "-c", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


def link(objects: Sequence[Path], made: Path, *flags: str) -> Path:
    done = subprocess.run([compiler(), *flags, *map(str, objects), "-o", str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


def build(folder: Path) -> list[Path]:
    """Object files of the whole extension, the emulator included, and the extension `_cuda.so` beside them.

    Test processes that share a folder wait for the first of them.
    """
    bindings, made = folder / ALL_BINDINGS, folder / "_cuda.so"
    sources = [bindings, *SOURCES, EMULATOR]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            headers = folder / HEADERS
            headers.write_text("".join(f"#include {name}\n" for name in COMMON))
            _compile("c++-header", headers, folder / f"{HEADERS}.gch", "-O1", *WARNINGS)
            bindings.write_text("".join(f'#include "{path}"\n' for path in BINDINGS))
            linked = link(compile_all(sources, folder), folder / "linked.so", "-shared")
            linked.rename(made)
    return [object_of(source, folder) for source in sources]


def load(library: Path) -> Any:
    """The extension of a linked library. pybind11 keeps one module for each name, so the name has the path in it."""
    spec = importlib.util.spec_from_file_location(f"{str(library.parent).replace('.', '_')}._cuda", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class EmulatedCuda:
    """One compiled extension, on tensors of the CPU. Results of rows are filled by the caller before."""

    def __init__(self, library: Path) -> None:
        self.module = load(library)
        self._library = ctypes.CDLL(str(library))

    def schedule(self, seed: int, resident_blocks: int = 3, yield_percent: int = 30) -> None:
        """How the threads of launches to come are interleaved."""
        self._library.set_schedule(ctypes.c_uint64(seed), resident_blocks, yield_percent)

    @contextmanager
    def used_for(self, device_type: str = "cpu") -> Iterator[None]:
        """Let `ops.<op>.cuda` take it for tensors of a device type."""
        _native.use_kernels(device_type, self.module)
        try:
            yield
        finally:
            _native.use_kernels(device_type, None)

    def dedup(self, keys: Tensor, tables: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        with self.used_for():
            return dedup_cuda.dedup(keys, tables)

    def bucketize(self, buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor, int]:
        with self.used_for():
            return bucketize_cuda.bucketize(buckets, num_buckets)

    def gather_rows(self, rows: Tensor, index: Tensor, out: Tensor, data_type: DataType = DataType.FP32) -> int:
        """The first bad position, or -1, as of all that follow."""
        bad_position = torch.tensor([-1])
        with self.used_for():
            gather_cuda.gather_rows(rows, index, out.shape[1], out, data_type, bad_position)
        return int(bad_position)

    def row_sync(self, source: Tensor, target: Tensor, source_index: Tensor, target_index: Tensor) -> int:
        bad_position = torch.tensor([-1])
        with self.used_for():
            sync_cuda.row_sync(source, target, source_index, target_index, bad_position)
        return int(bad_position)

    def scatter_rows(self, kind: str, target: Tensor, index: Tensor, source: Tensor | None) -> int:
        """kind: scatter_rows, scatter_add_rows or zero_rows."""
        bad_position = torch.tensor([-1])
        given = (target, index) if source is None else (target, index, source)
        with self.used_for():
            getattr(scatter_cuda, kind)(*given, bad_position=bad_position)
        return int(bad_position)


PLANTED_SEEDS = range(1, 7)


def planted(objects: list[Path], source: str, bugs: dict[str, str], folder: Path, user: str = "") -> Path:
    """The extension with one source changed, or one header, which is tried in the source `user`."""
    changed = _copy(CSRC / source, folder, bugs)
    compiled = _copy(CSRC / user, folder, {}) if user else changed
    (made,) = compile_all([compiled], folder, "-O0", "-Wno-error")
    others = [path for path in objects if path.stem != compiled.stem]
    return link([made, *others], folder / "_cuda.so", "-shared")  # of functions of a header the first ones are taken


def _copy(source: Path, folder: Path, bugs: dict[str, str]) -> Path:
    """A source in the folder, with the bugs, and with the headers of the folder, if there are any."""
    text = source.read_text()
    for right, wrong in bugs.items():
        assert text.count(right) == 1, f"{source} has {text.count(right)} times {right!r}"
        text = text.replace(right, wrong)
    made = folder / source.name
    made.write_text(text.replace('#include "../cuda/', '#include "'))
    return made


def seeds_that_see(library: Path, is_right: Callable[[EmulatedCuda], bool]) -> int:
    """How many of the seeds give something wrong, an error or a crash; each in a fork, which a bug may bring down."""
    seen = 0
    for seed in PLANTED_SEEDS:
        pid = os.fork()
        if pid == 0:
            faulthandler.disable()
            try:
                cuda = EmulatedCuda(library)
                cuda.schedule(seed)
                os._exit(0 if is_right(cuda) else 1)
            except BaseException:
                os._exit(1)
        seen += os.waitpid(pid, 0)[1] != 0
    return seen
