"""What `memory()` says, against what the process grows by and what the store holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from nestpipe_kernels import optim
from nestpipe_kernels.store import EmbeddingStore

# A process of its own: nothing that was freed before fills what the store asks for.
GROWTH = """
import json, sys, torch
from nestpipe_kernels import optim
from nestpipe_kernels.store import EmbeddingStore
def resident():
    with open("/proc/self/status", encoding="ascii") as status:
        return int(next(x for x in status if x.startswith("VmRSS")).split()[1]) << 10
dim, count = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
keys = torch.randperm(count) * 7919
def fill(store, first, end):
    for begin in range(first, end, 5000):
        store.find_or_insert(keys[begin : begin + 5000], batch=0)
fill(EmbeddingStore(dim=dim, optimizer=optim.RowWiseAdagrad(0.1), name="warm"), 0, 5000)
store = EmbeddingStore(dim=dim, optimizer=optim.RowWiseAdagrad(0.1), name="item")
before = resident()
fill(store, 0, count)
print(json.dumps([resident() - before, store.memory()]))
"""


@pytest.mark.parametrize(("dim", "count"), [(64, 150_000), pytest.param(8, 400_000, marks=pytest.mark.soak)])
def test_process_grows_by_what_memory_says(dim: int, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(dim), str(count)], capture_output=True, text=True, timeout=120, check=True
    )
    grown, memory = json.loads(done.stdout)
    said = memory["index"] + memory["slabs"] + memory["metadata"] + memory["admission"] - memory["untouched"]
    assert grown == pytest.approx(said, rel=0.1)


def test_room_for_more_rows_is_an_eighth_at_most() -> None:
    store = EmbeddingStore(dim=32, optimizer=optim.RowWiseAdagrad(0.1), name="item")
    for end in range(20_000, 100_001, 20_000):
        store.find_or_insert(torch.arange(end - 20_000, end), batch=0)
        memory = store.memory()
        assert memory["untouched"] < (memory["slabs"] + memory["metadata"]) / 8
    assert len(store.keys()) == 100_000


def test_parts_add_up() -> None:
    store = EmbeddingStore(dim=8, optimizer=optim.RowWiseAdagrad(0.1), name="item")
    assert {store.memory()[part] for part in ("keys", "rows", "file", "admission")} == {0}
    store.find_or_insert(torch.arange(1000), batch=0)
    full = store.memory()
    assert full["keys"] == 12_000
    assert full["rows"] % 4000 == 0 and full["rows"] >= 1000 * (8 + 1 + 1) * 4
    assert full["waste"] == full["index"] - full["keys"] + full["slabs"] - full["rows"]
    assert 0 < full["untouched"] < full["slabs"] + full["metadata"]
    store.erase(torch.arange(500))
    erased = store.memory()
    assert erased["rows"] == full["rows"] // 2 and erased["keys"] == 6000
    assert erased["waste"] - full["waste"] == full["rows"] // 2 + 6000
    assert erased["untouched"] == full["untouched"]
