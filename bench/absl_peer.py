"""What find_or_insert is compared with: absl::flat_hash_map and memcpy, in C++, built when it is first asked for."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["AbslPeer", "load"]

SOURCE = "absl_peer.cpp"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread")
NAMES = {False: "absl::flat_hash_map + memcpy", True: "the same, prefetch and huge pages"}


class AbslPeer:
    """Rows of `dim` floats behind a map for each thread; `tuned`: with prefetch and huge pages.

    Args:
        library: from `load`.
        max_rows: most rows of a thread.
        initial: what a new key's row is filled with.
    """

    def __init__(
        self, library: Any, dim: int, max_rows: int, threads: int, *, tuned: bool, initial: float = 0.0
    ) -> None:
        self.name = NAMES[tuned]
        self._library, self._dim = library, dim
        self._peer = library.peer_new(dim, max_rows, threads, int(tuned), initial)

    def __del__(self) -> None:
        if getattr(self, "_peer", None):
            self._library.peer_delete(self._peer)

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Insert keys int64 [n] with rows float32 [n, dim]."""
        self._library.peer_find_or_insert(self._peer, keys.data_ptr(), keys.numel(), values.data_ptr(), None, None)

    def find_or_insert(self, keys: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """`out` float32 [n, dim], filled with the rows of keys int64 [n], and uint8 [n]: 1 where the key is new."""
        status = torch.empty(keys.numel(), dtype=torch.uint8)
        self._library.peer_find_or_insert(
            self._peer, keys.data_ptr(), keys.numel(), None, out.data_ptr(), status.data_ptr()
        )
        return out, status

    def erase(self, keys: Tensor) -> None:
        """Take keys out; their rows serve later ones."""
        self._library.peer_erase(self._peer, keys.data_ptr(), keys.numel())

    def index_bytes(self) -> int:
        """Of the maps."""
        return int(self._library.peer_index_bytes(self._peer))


def load() -> tuple[Any, str]:
    """The library, or None and what it lacks: a checkout's source, a compiler, or absl."""
    source = next((path for path in (Path(__file__).parent / SOURCE, Path("bench") / SOURCE) if path.exists()), None)
    if source is None:
        return None, f"absl::flat_hash_map (its source, bench/{SOURCE}, comes with a checkout: run in the root of one)"
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None, "absl::flat_hash_map (no C++ compiler)"
    try:
        return _build(source, compiler), ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        reason = next((line for line in said if "error" in line), said[0] if said else "no reason given")
        return None, f"absl::flat_hash_map (not built: {reason}; Debian has it in libabsl-dev)"


@cache
def _build(source: Path, compiler: str) -> Any:
    """Built into the user's cache folder once for each source, compiler and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    native = subprocess.run([compiler, "-march=native", "-Q", "--help=target"], capture_output=True).stdout
    digest = hashlib.sha256(b"\0".join([source.read_bytes(), version, native, repr(FLAGS).encode()])).hexdigest()
    folder = Path.home() / ".cache" / "nestpipe-kernels"
    built = folder / f"absl_peer-{digest[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=folder, suffix=".part")
        os.close(handle)
        try:
            command = [compiler, *FLAGS, str(source), "-o", part, *_absl_libraries()]
            subprocess.run(command, capture_output=True, text=True, check=True)
            os.replace(part, built)
        finally:
            Path(part).unlink(missing_ok=True)
    return _declared(ctypes.CDLL(str(built)))


def _absl_libraries() -> list[str]:
    tool = shutil.which("pkg-config")
    if tool is not None:
        found = subprocess.run([tool, "--cflags", "--libs", "absl_flat_hash_map"], capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.split()
    return ["-labsl_hash", "-labsl_city", "-labsl_low_level_hash", "-labsl_raw_hash_set"]


def _declared(library: Any) -> Any:
    address, number = ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "peer_new": (address, [number, number, ctypes.c_int, ctypes.c_int, ctypes.c_float]),
        "peer_delete": (None, [address]),
        "peer_find_or_insert": (None, [address, address, number, address, address, address]),
        "peer_erase": (None, [address, address, number]),
        "peer_index_bytes": (number, [address]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
