"""The store in device memory, its kernels run by the emulator in random orders, beside the store in host memory after
the same calls: the same handles, status, rows and metadata, bit for bit; and bugs that must be seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_programs import (
    EXTREMES,
    PROGRAM,
    RULES,
    assert_same,
    bits,
    both,
    contents,
    device_store,
    evictions,
    full_tables,
    random_program,
    spec,
    taken_back,
)  # fmt: skip
from torch import Tensor

import emulated_cuda as emulated
from emulated_cuda import CSRC, EmulatedCuda, seeds_that_see
from nestpipe_kernels import init, policy
from nestpipe_kernels.errors import StoreFullError
from nestpipe_kernels.optim import SGD, RowWiseAdagrad
from nestpipe_kernels.store import DeviceStore, RowMetadata
from nestpipe_kernels.testing.policy_model import hash_name
from nestpipe_kernels.types import DataType, KeyStatus, TableSpec

FOUND, INSERTED, ABSENT, REFUSED = (s.value for s in list(KeyStatus)[:4])


def hashes(keys: np.ndarray, table: str) -> np.ndarray:
    x = keys.astype(np.uint64) ^ np.uint64(hash_name(table))
    for shift, factor in ((32, 0x9FB21C651E98DF25), (29, 0xD6E8FEB86659FD93)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(32))


def home_buckets(keys: np.ndarray, table: str, num_buckets: int) -> np.ndarray:
    return (hashes(keys, table) & np.uint64(0xFFFFFFFF)) * np.uint64(num_buckets) >> np.uint64(32)


def test_emulated_cuda_store_random_program(cuda: EmulatedCuda) -> None:
    random_program(*both(*PROGRAM[0], **PROGRAM[1]))


def test_emulated_cuda_store_repeated_keys_of_several_blocks(cuda: EmulatedCuda) -> None:
    """Each key four times, in warps and blocks that run at the same time: one row, the first occurrence inserts it."""
    device, host = both()
    keys, tables = torch.arange(600) % 150, torch.zeros(600).int()
    for batch in range(2):
        ours, theirs = device.retrieve(keys, tables, None, batch), host.retrieve(keys, tables, None, batch)
        assert torch.equal(ours.handles, theirs.handles) and torch.equal(ours.status, theirs.status)
    assert_same(device, host)
    assert device.erase(keys[:300]).tolist() == [FOUND] * 150 + [ABSENT] * 150
    assert len(device) == 0


def test_emulated_cuda_store_keys_of_one_bucket(cuda: EmulatedCuda) -> None:
    """60 keys with the same home bucket lie in the next ones; those that are erased leave nothing behind."""
    device, pool = device_store(), np.arange(40_000)
    device._memory.take(device._memory.room(200, 1))
    num_buckets = device._memory.tags.shape[0]
    keys = torch.from_numpy(pool[home_buckets(pool, "t", num_buckets) == num_buckets - 1][:60].copy())
    assert device.find_or_insert(keys)[1].tolist() == [INSERTED] * len(keys)
    counts = device._memory.tags.view(torch.uint8).view(num_buckets, 16)
    assert counts[-1, 15] == len(keys) - 15 and counts[0, 15] == len(keys) - 30
    assert device.erase(keys[::2]).tolist() == [FOUND] * len(keys[::2])
    assert device.find(keys)[1].tolist() == [ABSENT, FOUND] * (len(keys) // 2)
    assert device.find_or_insert(keys)[1].tolist() == [INSERTED, FOUND] * (len(keys) // 2)
    assert device.export_table()[1].tolist() == list(range(len(keys)))
    assert device.erase(keys).tolist() == [FOUND] * len(keys)
    assert not bool(device._memory.tags.any())


def test_emulated_cuda_store_looks_at_few_buckets(cuda: EmulatedCuda) -> None:
    """At its highest load, in the mean: buckets and entries that a search looks at for a key that is there, and buckets
    for one that is not."""
    device, keys = device_store(dim=1), np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 2500)
    device.find_or_insert(torch.from_numpy(keys))
    tags = device._memory.tags.numpy().view(np.uint8).reshape(-1, 16)
    stored = device._memory.entries[:, 0].numpy().reshape(-1, 15)
    assert len(keys) / stored.size > 0.74
    places = {int(key): (b, s) for b, row in enumerate(stored) for s, key in enumerate(row) if tags[b, s]}
    buckets = entries = absent = 0
    for key, first, tag in zip(keys, home_buckets(keys, "t", len(tags)), hashes(keys, "t") >> np.uint64(32)):
        bucket, slot = places[int(key)]
        way = [(int(first) + step) % len(tags) for step in range((bucket - int(first)) % len(tags) + 1)]
        equal = tags[way, :15] == max(int(tag) & 0xFF, 1)
        buckets += len(way)
        entries += int(equal[:-1].sum() + equal[-1, : slot + 1].sum())
    for first in range(len(tags)):
        absent += 1 + next(step for step in range(len(tags)) if tags[(first + step) % len(tags), 15] == 0)
    print(buckets / len(keys), entries / len(keys), absent / len(tags))
    assert 1 <= buckets / len(keys) < 1.08
    assert 1 <= entries / len(keys) < 1.04
    assert 1 <= absent / len(tags) < 1.4


@pytest.mark.parametrize(
    ("rule", "undoable"),
    [
        *((rule, True) for rule in RULES),
        (RULES[0], False),
        *(pytest.param(rule, False, marks=pytest.mark.soak) for rule in RULES[1:]),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
)
def test_emulated_cuda_store_evicts_the_rows_that_the_host_store_does(
    cuda: EmulatedCuda, rule: Any, undoable: bool
) -> None:
    evictions(rule, *both(*full_tables(rule), undoable=undoable))


def test_emulated_cuda_store_takes_back_what_can_be(cuda: EmulatedCuda) -> None:
    """Newest first, with keys that come twice; not after an erasing call, nor once evicted rows are free."""
    device, host = both(*full_tables(RULES[0]), undoable=True)
    keys, tables = torch.arange(90).repeat(2), torch.zeros(180).int()
    before = device.retrieve(keys[:60], tables[:60], None, 0), host.retrieve(keys[:60], tables[:60], None, 0)
    counts = torch.arange(100)
    ours, theirs = (s.retrieve(keys[40:140].contiguous(), tables[:100], counts, 2) for s in (device, host))
    assert torch.equal(ours.handles, theirs.handles)
    with pytest.raises(ValueError, match="undo: this is not the newest retrieval of the store: undo newer ones first"):
        device.undo(before[0])
    taken_back(device, host, ours, theirs)
    with pytest.raises(ValueError, match="undo: this retrieval has been undone already"):
        device.undo(ours)
    taken_back(device, host, *before)
    device.retrieve(keys[:60], tables[:60], None, 0)
    evicting = device.retrieve(keys[60:90].contiguous(), tables[:30], None, 2)
    assert len(device.evicted(evicting)[0]) == 60 + 30 - int(70 * 0.75)
    later = device.retrieve(keys[:1], tables[:1], None, 4)
    device.undo(later)
    for call, words in ((device.undo, "undo: rows that"), (device.evicted, "evicted: rows that")):
        with pytest.raises(ValueError, match=f"{words} this retrieval evicted are free"):
            call(evicting)
    newest = device.retrieve(keys[:1], tables[:1], None, 4)
    device.erase(keys[:1], "a")
    with pytest.raises(ValueError, match="undo: keys were erased since this retrieval"):
        device.undo(newest)
    with pytest.raises(ValueError, match="evicted: this store forgets what it does: make it with undoable=True"):
        device_store().evicted(newest.__class__(newest.handles, newest.status, None))


def test_emulated_cuda_store_full_tables_change_nothing_or_refuse_the_last_keys(cuda: EmulatedCuda) -> None:
    device, host = both(spec("a", capacity=40), spec("b"))
    device.find_or_insert(torch.arange(30), "a")
    host.find_or_insert(torch.arange(30), "a")
    before = contents(device)
    full = r"find_or_insert: table 'a' is full: 20 new ones of 21 keys find no room beside its 30 rows \(capacity 40\)"
    with pytest.raises(StoreFullError, match=full):
        device.find_or_insert(torch.arange(29, 50), "a")
    assert contents(device) == before and device.counters("a")["inserted"] == 30
    keys, tables = torch.arange(29, 50).repeat(2), torch.tensor([0, 1]).repeat_interleave(21).int()
    ours, theirs = (store.retrieve(keys, tables, None, -1) for store in (device, host))
    assert torch.equal(ours.handles, theirs.handles) and torch.equal(ours.status, theirs.status)
    assert ours.status.tolist().count(REFUSED) == 10
    assert torch.equal(
        device.read_embeddings(ours.handles, keys, tables), host.read_embeddings(theirs.handles, keys, tables)
    )
    assert_same(device, host)


STARTS = [init.Normal(0.5, 2.0), init.TruncatedNormal(0.0, 1.0, -0.5, 2.0), init.Constant(0.3), None]


@pytest.mark.parametrize(("dim", "data_type"), [(1, DataType.FP32), (7, DataType.FP16), (8, DataType.BF16),
                                                (3, DataType.BF16), (130, DataType.FP32)])  # fmt: skip
def test_emulated_cuda_store_rows_have_the_bits_of_the_host_store(
    cuda: EmulatedCuda, dim: int, data_type: DataType
) -> None:
    tables = [spec(f"t{k}", start=start, seed=k - 1) for k, start in enumerate(STARTS)]
    device, host = both(*tables, dim=dim, data_type=data_type, optimizer=RowWiseAdagrad(lr=0.1))
    keys, of_tables = torch.tensor(EXTREMES).repeat(4), torch.arange(4).repeat_interleave(len(EXTREMES)).int()
    made = keys[::2].contiguous(), of_tables[::2].contiguous()
    ours = device.retrieve(*made, None, -1)
    assert torch.equal(ours.handles, host.retrieve(*made, None, -1).handles)
    values = torch.randn(len(made[0]), dim, generator=torch.Generator().manual_seed(dim)) * 300
    index = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    results = []
    for store in (device, host):
        store.write_embeddings(ours.handles[:7], values[:7])
        handles = store.find_handles(keys, of_tables)
        rows = torch.full((40, store.row_floats), float("nan"))
        store.gather(handles, keys, of_tables, rows, index)
        results.append((handles, bits(rows), bits(store.read_embeddings(handles, keys, of_tables))))
        store.write_metadata(handles[:6], RowMetadata(torch.arange(6), torch.arange(6) + 2**62))
        store.retrieve(*made, torch.full((20,), 2**61 + 2**60), 4)
        store.retrieve(*made, torch.full((20,), 2**61), 4)
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert_same(device, host)
    assert device.last_batch == host.last_batch == 4


def test_emulated_cuda_store_export_and_load(cuda: EmulatedCuda) -> None:
    device, other = device_store(spec("a"), spec("b")), device_store(spec("a"), spec("b"))
    device.find_or_insert(torch.arange(80) * 7, "b", batch=6)
    device.erase(torch.arange(20) * 7, "b")
    keys, rows, metadata = device.export_rows("b")
    assert keys.tolist() == [7 * k for k in range(20, 80)]
    other.find_or_insert(keys[:9], "b")
    other.load_rows(keys, torch.ones(60).int(), rows, metadata)
    assert contents(other, 1) == contents(device, 1)
    assert other.last_batch == 6 and other.counters("b")["inserted"] == 9
    again = torch.tensor([1, 1])
    with pytest.raises(ValueError, match="load_rows: 1 of the new keys are repetitions; nothing was inserted"):
        other.load_rows(again, torch.zeros(2).int(), rows[:2], RowMetadata(again, again))
    small = device_store(spec("b", capacity=59))
    with pytest.raises(StoreFullError, match="load_rows: table 'b' is full: 60 new ones of 60 keys"):
        small.load_rows(keys, torch.zeros(60).int(), rows, metadata)
    assert small.size() == 0


def result_of(store: DeviceStore, keys: Tensor) -> tuple[str, Tensor | None]:
    """What find_or_insert says where memory gives out, or the status."""
    try:
        return "", store.find_or_insert(keys)[1]
    except StoreFullError as error:
        return str(error), None


def test_emulated_cuda_store_out_of_memory_changes_nothing(cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each allocation of a call fails once; the call that then succeeds gives what it would have given at first."""
    device, host = both()
    for store in (device, host):
        store.find_or_insert(torch.arange(20))
    before, memory, failed = contents(device), device.memory(), 0
    keys = torch.arange(10, 120)
    for which in range(40):
        made = [0]

        def allocate(real: Callable[..., Tensor], made: list[int] = made, which: int = which) -> Callable[..., Tensor]:
            def empty(*arguments: Any, **settings: Any) -> Tensor:
                made[0] += 1
                if made[0] == which + 1:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return real(*arguments, **settings)

            return empty

        with monkeypatch.context() as patch:
            for name in ("empty", "zeros"):
                patch.setattr(torch, name, allocate(getattr(torch, name)))
            message, status = result_of(device, keys)
        if status is not None:
            break
        assert message.startswith("find_or_insert: no memory on cpu for") and "nothing was inserted" in message
        failed += 1
        assert contents(device) == before and device.memory() == memory
    assert failed >= 6
    assert status is not None and torch.equal(status, host.find_or_insert(keys)[1])
    assert_same(device, host)


def test_emulated_cuda_store_reserves_memory(cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as asked for, at the highest load; keys that were there stay."""
    device = device_store()
    device.find_or_insert(torch.arange(9))
    device.reserve(500)
    memory = device.memory()
    assert memory["index"] == (int(500 / 11.25) + 1) * (16 + 15 * 16) and memory["slabs"] == 512 * 64
    device.find_or_insert(torch.arange(500))
    assert device.memory() == memory and device.export_table()[1].tolist() == list(range(500))
    with pytest.raises(ValueError, match=r"reserve: num_keys must be in \[0, 2147483647\], got -1"):
        device.reserve(-1)
    monkeypatch.setattr(torch, "zeros", out_of_memory)
    with pytest.raises(StoreFullError, match="reserve: no memory on cpu for 99500 new keys beside its index of 0 MB"):
        device.reserve(100_000)


def out_of_memory(*_: Any, **__: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_emulated_cuda_store_names_what_is_wrong(cuda: EmulatedCuda) -> None:
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1).int()
    device = device_store()
    with pytest.raises(IndexError, match=r"retrieve: table indices must be in \[0, 1\), got 1 that are not"):
        device.retrieve(one, zero + 1, None, 0)
    with pytest.raises(ValueError, match="retrieve: counts must be >= 0, got 1 that are not; nothing was changed"):
        device.retrieve(one, zero, -one, 0)
    assert len(device) == 0
    assert device.read_embeddings(one * 4, one, zero).shape == (1, 4)
    with pytest.raises(IndexError, match="1 row handles or places since the device was last asked do not exist"):
        device.size()
    assert device.size() == 0
    with pytest.raises(TypeError, match="retrieve: keys must be a contiguous tensor on cpu of int64"):
        device.retrieve(one.int(), zero, None, 0)
    behind = torch.zeros(device.row_floats + 1)[1:].view(1, -1)  # a GPU could not move it 16 bytes at a time
    words = "must begin at a multiple of 16 bytes, got a view that begins 4 bytes behind one: pass a clone"
    with pytest.raises(ValueError, match=f"gather: out {words}"):
        device.gather(one, one, zero, behind, None)
    with pytest.raises(ValueError, match=f"write_back: rows {words}"):
        device.write_back(one, behind)
    with pytest.raises(ValueError, match=f"load_rows: rows {words}"):
        device.load_rows(one, zero, behind, RowMetadata(one, one))
    with pytest.raises(ValueError, match="find: keys must be on cpu, got meta: use keys"):
        device.find(torch.empty(1, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="device store: no table 'x': name one of t"):
        device.find(one, "x")
    fixed = DeviceStore([TableSpec("f", 10, None, 0)], dim=4, optimizer=SGD(lr=0.1), device="cpu")
    with pytest.raises(IndexError, match="find_or_insert: 2 keys are outside their fixed table; nothing was inserted"):
        fixed.find_or_insert(torch.tensor([1, 10, -1]))
    assert len(fixed) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tables": [spec(admission=policy.MinFrequency(2))]}, "table 't' has admission MinFrequency.*EmbeddingStore"),
        (
            {"tables": [spec(capacity=9, eviction=policy.Score(len))]},
            "table 't' evicts by a function; LRU, LFU and TTL",
        ),
        ({"tables": [spec(start=init.Custom(len))]}, "table 't' has initial values from a function"),
        ({"tables": [spec(), spec()]}, "device store: table names must be distinct, got"),
        ({"dim": 2049}, r"device store: dim must be an integer in \[1, 2048\], got 2049"),
        ({"load": 0.95}, r"device store: load must be in \(0, 0.9\], got 0.95"),
        ({"rows_per_slab": 48}, "device store: rows_per_slab must be a power of two from 32 on, or None, got 48"),
    ],
)
def test_emulated_cuda_store_refuses_settings(cuda: EmulatedCuda, settings: dict[str, Any], words: str) -> None:
    given = {"tables": [spec()], "dim": 4, "optimizer": SGD(lr=0.1), "device": "cpu", **settings}
    with pytest.raises(ValueError, match=words):
        DeviceStore(given.pop("tables"), **given)


def test_device_store_needs_a_device_and_kernels() -> None:
    with pytest.raises(ValueError, match="unknown device 'tpu'; expected 'cpu', 'cuda'"):
        device_store(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"device 'cuda' (needs a torch that was built with CUDA|is not here)"):
            device_store(device="cuda")
    with pytest.raises(RuntimeError, match="device store: no native kernels for tensors on cpu: install a wheel built"):
        device_store()


# ----------------------------------------------------------------------------------------------------- planted bugs


def store_is_right(cuda: EmulatedCuda) -> bool:
    """Few keys, each in several warps, in an index as full as may be."""
    with cuda.used_for():
        device, host = device_store(load=0.9), both()[1]
        keys = torch.arange(400) % 130
        tables = torch.zeros(400).int()
        ours, theirs = device.retrieve(keys, tables, None, 0), host.retrieve(keys, tables, None, 0)
        same = torch.equal(ours.handles, theirs.handles) and torch.equal(ours.status, theirs.status)
        return same and torch.equal(device.find_handles(keys, tables), theirs.handles) and device.size() == 130


WRITE_NEW = """    launch(write_new, num_blocks(num_new * kWarpSize, kThreads), kThreads, 0, stream, store, places,
           in, missing, rows, num_new);
"""
FINISH = "           places, in, use, missing, rows, plan.num_missing, out);\n"
BUGS = {
    "a lost compare-and-swap of a tag": (
        "device_insert.cu",
        {
            "const std::uint32_t before = atomicCAS(word, seen, seen | tag << 8 * byte);\n":
            "const std::uint32_t before = load_racing(word);\n"
            "    if (before == seen) store_racing(word, seen | tag << 8 * byte);\n"
        },
    ),
    "a slot that is not looked at again": (
        "device_insert.cu",
        {"    if (before == seen) return byte;\n": "    return byte;\n"},
    ),
    "repeated keys that others entered meanwhile": (
        "device_missing.cu",
        {"    walked = head;\n": "    walked = found;\n"},
    ),
    "handles that are read before they are written": ("device_insert.cu", {WRITE_NEW: "", FINISH: FINISH + WRITE_NEW}),
}  # fmt: skip


def plant(objects: list[Path], source: str, changes: dict[str, str], folder: Path) -> Path:
    """The extension with changes in one source or in the headers beside it, which come first for the linker: it takes
    the first of several copies of an inline function."""
    texts = {path: path.read_text() for path in [*(CSRC / "store").glob("*.cuh"), CSRC / "store" / source]}
    for right, wrong in changes.items():
        assert sum(text.count(right) for text in texts.values()) == 1, right
        texts = {path: text.replace(right, wrong) for path, text in texts.items()}
    for path, text in texts.items():
        (folder / path.name).write_text(text.replace('#include "../cuda/', '#include "'))
    made = emulated.compile_all([folder / source], folder, "-O0", "-Wno-error")
    others = [path for path in objects if path.stem != Path(source).stem]
    return emulated.link([*made, *others], folder / "_cuda.so", "-shared")


def test_emulated_cuda_store_sees_nothing_where_nothing_is_planted(emulated_library: Path) -> None:
    assert seeds_that_see(emulated_library, store_is_right) == 0


SHORT = "a lost compare-and-swap of a tag"


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.soak] * (bug != SHORT)) for bug in BUGS])
def test_emulated_cuda_store_sees(emulated_objects: list[Path], tmp_path: Path, bug: str) -> None:
    source, changes = BUGS[bug]
    assert seeds_that_see(plant(emulated_objects, source, changes, tmp_path), store_is_right) >= 2
