"""Saves, loads or deals out a table of a few hundred MB and prints how much memory that took beyond what was there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from store_cases import load_stores, save_one

from nestpipe_kernels.checkpoint.tools.diff import diff
from nestpipe_kernels.checkpoint.tools.reshard import reshard
from nestpipe_kernels.checkpoint.tools.verify import verify
from nestpipe_kernels.init import Uniform
from nestpipe_kernels.optim import Adam
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import UNBOUNDED, TableSpec

ROWS, DIM = 400_000, 64  # 0.3 GB in files


def _store() -> EmbeddingStore:
    return EmbeddingStore([TableSpec("t", UNBOUNDED, Uniform(-1, 1), 3)], dim=DIM, optimizer=Adam())


def _insert(store: EmbeddingStore) -> None:
    for first in range(0, ROWS, 50_000):
        keys = torch.arange(first, first + 50_000) * 7919
        store.retrieve(keys, torch.zeros(50_000, dtype=torch.int32), None, 1)


def _status(name: str) -> int:
    """A line of /proc/self/status, bytes."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def _use_tool(tool: str, directory: Path) -> None:
    """Reshard to several ranks beside it, and back; compare and verify what is there then."""
    if tool == "reshard":
        reshard(directory, 5, directory.with_name("dealt out"))
        reshard(directory.with_name("dealt out"), 1, directory.with_name("back"))
    elif tool == "diff":
        assert diff(directory, directory.with_name("dealt out"), "embeddings")[0] == []
    else:
        assert verify(directory.with_name("dealt out")).problems == []


def main() -> None:
    directory = Path(sys.argv[2])
    if sys.argv[1] in ("reshard", "diff", "verify"):
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        _use_tool(sys.argv[1], directory)
        print(_status("VmHWM") - before)
        return
    store = _store()
    _insert(store)
    if sys.argv[1] == "load":  # the rows' own memory is there already: what loading adds is extra
        store.clear()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    if sys.argv[1] == "save":
        save_one(directory, store)
    else:
        load_stores(directory, [store])
        assert len(store) == ROWS
    print(_status("VmHWM") - before)


if __name__ == "__main__":
    main()
