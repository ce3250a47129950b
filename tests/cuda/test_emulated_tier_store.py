"""A collection's store in device memory beside the one in host memory, after the same calls of the same protocol: bits,
handles, status, counters; retrievals taken back; what gives out; what is refused. Kernels are run by the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from store_programs import EXTREMES, RULES, bits, contents, some_pairs, spec
from torch import Tensor

import nestpipe_kernels as nk
from emulated_cuda import EmulatedCuda
from nestpipe_kernels import init, policy
from nestpipe_kernels.errors import NonFiniteGradientError, StoreFullError
from nestpipe_kernels.optim import SGD, Adagrad
from nestpipe_kernels.store import DeviceTierStore, EmbeddingStore, RowMetadata
from nestpipe_kernels.types import DataType, TableSpec

Store = DeviceTierStore | EmbeddingStore


@pytest.fixture(params=[1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 6))])
def cuda(request: pytest.FixtureRequest, emulated_extension: EmulatedCuda) -> Iterator[EmulatedCuda]:
    """The extension with an order of threads drawn from a seed; what is below needs no more than one each time."""
    emulated_extension.schedule(request.param)
    with emulated_extension.used_for():
        yield emulated_extension
    emulated_extension.schedule(1)


def tier_store(*tables: TableSpec, dim: int = 4, optimizer: Any = None, **settings: Any) -> DeviceTierStore:
    made = {"device": "cpu", "rows_per_slab": 32, "optimizer": optimizer or SGD(lr=0.1), **settings}
    return DeviceTierStore(tables or (spec(),), dim=dim, **made)


def both(*tables: TableSpec, dim: int = 4, optimizer: Any = None, **settings: Any) -> tuple[Store, Store]:
    tables = tables or (spec(),)
    host = EmbeddingStore(tables, dim=dim, optimizer=optimizer or SGD(lr=0.1), **settings)
    return tier_store(*tables, dim=dim, optimizer=optimizer, **settings), host


def everything(store: Store) -> list[Any]:
    """What can be seen of a store."""
    facts: list[Any] = [store.last_batch, len(store)]
    for t in range(len(store.tables)):
        keys, handles = store.export_table(t)
        facts += [contents(store, t), store.counters(t), store.size(t), keys.tolist(), handles.tolist()]
    return facts


def test_emulated_cuda_tier_store_takes_back_what_it_retrieved(cuda: EmulatedCuda) -> None:
    """Two retrievals at a time, taken back newest first or kept, in tables with and without room; index and rows
    grow in some that are taken back."""
    device, host = both(spec("a"), spec("b", capacity=60, default=init.Zeros()), dim=5, optimizer=Adagrad(lr=0.1))
    generator = torch.Generator().manual_seed(7)
    for step in range(6):
        before = everything(device)
        assert before == everything(host)
        calls = []
        for ahead in range(2):
            keys, tables = some_pairs(generator, (40, 0, 130, 20)[(step + ahead) % 4], 2, 40 + 10 * step)
            counts = torch.randint(0, 4, keys.shape, generator=generator)
            calls.append((keys, tables, counts, step + ahead))
        found = [[store.retrieve(*call) for call in calls] for store in (device, host)]
        for ours, theirs in zip(*found):
            assert torch.equal(ours.handles, theirs.handles) and torch.equal(ours.status, theirs.status)
        assert everything(device) == everything(host)
        for store, retrievals in zip((device, host), found):
            for retrieval in reversed(retrievals):
                store.undo(retrieval)
        assert everything(device) == before == everything(host)
        for store in (device, host):
            kept = store.retrieve(*calls[0])
            assert torch.equal(kept.handles, found[0][0].handles)
            rows = torch.ones(len(kept.handles), store.row_floats) * step
            store.write_back(kept.handles, rows)
        assert [part.numel() for part in device.evicted(found[0][0])] == [0, 0]
    assert everything(device) == everything(host)
    assert device.counters("b")["refused"] > 0


def test_emulated_cuda_tier_store_says_what_cannot_be_taken_back(cuda: EmulatedCuda) -> None:
    store, keys, tables = tier_store(), torch.arange(5), torch.zeros(5).int()
    first, second = (store.retrieve(keys + k, tables, None, k) for k in range(2))
    with pytest.raises(ValueError, match="undo: this is not the newest retrieval of the store: undo newer ones first"):
        store.undo(first)
    store.undo(second)
    with pytest.raises(ValueError, match="undo: this retrieval has been undone already"):
        store.undo(second)
    store.erase(keys[:1])
    with pytest.raises(ValueError, match="undo: keys were erased since this retrieval"):
        store.undo(first)


@pytest.mark.parametrize(
    "rule",
    [RULES[0], *(pytest.param(rule, marks=pytest.mark.soak) for rule in RULES[1:])],
    ids=lambda r: type(r).__name__,
)
def test_emulated_cuda_tier_store_brings_evicted_rows_back(cuda: EmulatedCuda, rule: Any) -> None:
    """A batch and the next one retrieved; both are taken back, or the second alone, and retrieved again."""
    device, host = both(spec("a", capacity=40, eviction=rule), spec("b", capacity=25), optimizer=Adagrad(lr=0.1))
    generator = torch.Generator().manual_seed(4)
    gone = 0
    for step in range(4):
        calls = [(*some_pairs(generator, 30, 2, 45), None, step + ahead) for ahead in range(2)]
        keys = [torch.stack(call[:2]).unique(dim=1) for call in calls]
        calls = [
            (pairs[0].contiguous(), pairs[1].int().contiguous(), None, call[3]) for pairs, call in zip(keys, calls)
        ]
        found = [[store.retrieve(*call) for call in calls] for store in (device, host)]
        for ours, theirs in zip(*found):
            assert torch.equal(ours.handles, theirs.handles) and torch.equal(ours.status, theirs.status)
            left = device.evicted(ours), host.evicted(theirs)
            assert torch.equal(left[0][0], left[1][0]) and torch.equal(left[0][1], left[1][1])
            gone += left[0][0].numel()
        for store, retrievals in zip((device, host), found):
            for retrieval in reversed(retrievals[step % 2 :]):
                store.undo(retrieval)
        assert everything(device) == everything(host)
        for store in (device, host):
            if step % 2 == 0:
                store.retrieve(*calls[0])
            handles = store.find_handles(*calls[0][:2])
            store.write_back(handles, torch.full((len(handles), store.row_floats), float(step)))
        assert everything(device) == everything(host)
    assert gone > 0


@pytest.mark.parametrize("data_type", [pytest.param(DataType.FP32, marks=pytest.mark.soak), DataType.BF16])
def test_emulated_cuda_tier_store_serves_a_table_by_itself(cuda: EmulatedCuda, data_type: DataType) -> None:
    device, host = both(spec("a"), spec("b", start=init.Zeros()), dim=3, optimizer=Adagrad(lr=0.5), data_type=data_type)
    keys = torch.tensor(EXTREMES)
    grads = torch.randn(len(keys), 3, generator=torch.Generator().manual_seed(1))
    results: list[list[Any]] = []
    for store in (device, host):
        said: list[Any] = [*store.find_or_insert(keys[:7], "a", batch=3), *store.find(keys, "a")]
        given = torch.empty(2, 3)
        said += [store.find_or_insert(keys[6:8].int(), "b", out=given)[0], given]
        said += [store.apply_gradients(keys, grads, step=1, table="a"), store.erase(keys[1:3], "a")]
        metadata = store.metadata(keys, "a")
        handles = store.find_handles(keys, torch.zeros(len(keys)).int())
        rows = torch.full((12, store.row_floats), float("nan"))
        store.gather(handles, keys, torch.zeros(len(keys)).int(), rows, torch.arange(len(keys)) + 1)
        store.write_embeddings(handles, grads)
        store.write_metadata(handles[3:5], RowMetadata(torch.tensor([8, 9]), torch.tensor([1, 2])))
        said += [metadata.last_used, metadata.frequency, bits(rows), store.keys("a"), store.removals]
        store.load_counters("b", {**store.counters("b"), "refused": 4})
        results.append([*said, everything(store), store.read_embeddings(handles, keys, torch.zeros(10).int())])
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs
    with pytest.raises(NonFiniteGradientError):
        device.apply_gradients(keys, grads / 0, step=1, table="a")
    for store in (device, host):
        store.clear("a")
        assert store.counters("b")["refused"] == 4
        store.clear()
    assert everything(device) == everything(host)


def test_emulated_cuda_tier_store_exports_and_loads_as_the_host_store_does(cuda: EmulatedCuda) -> None:
    """By shard and key, in columns of bytes."""
    device, host = both(spec("a"), spec("b"), optimizer=Adagrad(lr=0.1))
    keys = torch.randint(-(2**62), 2**62, (300,), generator=torch.Generator().manual_seed(3))
    for store in (device, host):
        store.reserve_keys("b", 300)
        store.find_or_insert(keys, "b", batch=2)
    device.reserve_keys("a", 100)
    memory = device.memory()
    for store in (device, host):
        store.find_or_insert(keys[:100], "a")
    assert device.memory() == memory
    assert torch.equal(device.shard_sizes("b"), host.shard_sizes("b"))
    ours, theirs = device.export_shards("b", 3, 200, 300), host.export_shards("b", 3, 200, 300)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    parts = [(0, torch.empty(len(ours[0]), 4)), (16, torch.empty(len(ours[0]), 2, 2)), (32, ours[0].int())]
    device.copy_columns(ours[1], parts)
    expected = [(at, torch.empty_like(part)) for at, part in parts]
    host.copy_columns(ours[1], expected)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(parts, expected))
    used = RowMetadata(torch.arange(len(ours[0])), torch.arange(len(ours[0])) + 5)
    other, plain = both(spec("b"), optimizer=Adagrad(lr=0.1))
    for store in (other, plain):
        store.load_columns(ours[0], "b", parts[:2], used)
    assert everything(other) == everything(plain)
    device.erase(keys[:50], "b")  # what was sorted no longer holds
    assert int(device.shard_sizes("b").sum()) == 250
    assert device.export_shards("b", 0, 256, 300)[0].numel() == 250
    assert device.admission_state("b") == {} and device.admission_state("b", (0, 1)) == {}
    device.load_admission_state("b", {})
    for call, error, words in (
        (lambda: device.export_shards("b", 0, 300, 1), IndexError, r"export_shards: shards must be in \[0, 256\]"),
        (lambda: device.export_shards("b", 0, 256, 249), ValueError, "250 keys do not fit into 249"),
        (lambda: device.copy_columns(keys * 0 - 1, []), IndexError, "no row to copy from for handle -1"),
        (lambda: other.copy_columns(keys[:2] * 0, [(60, keys[:2])]), IndexError, "bytes 60 to 68 are outside a row"),
        (lambda: device.load_admission_state("b", {"keys": keys}), ValueError, "table 'b' has no admission rule"),
        (lambda: device.load_counters("b", {"new": 1}), ValueError, "load_counters: need"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_emulated_cuda_tier_store_without_memory_is_unchanged(
    cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, keys, tables = tier_store(memory_limit=20_000), torch.arange(40), torch.zeros(40).int()
    device.retrieve(keys, tables, None, 0)
    before, many = everything(device), torch.arange(3000)
    full = r"retrieve: no memory on cpu for 2960 new keys beside .*; nothing was inserted"
    with pytest.raises(StoreFullError, match=full):
        device.retrieve(many, torch.zeros(3000).int(), None, 1)
    with pytest.raises(StoreFullError, match="reserve: no memory on cpu for 89960 new keys"):
        device.reserve_keys("t", 90_000)
    assert everything(device) == before
    taken = device.retrieve(many[:60], torch.zeros(60).int(), None, 1)
    device.undo(taken)
    assert everything(device) == before
    assert sum(list(device.memory().values())[:2]) <= 20_000

    def none_left(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(device, "_put", none_left)
        with pytest.raises(StoreFullError, match="retrieve: no memory on cpu for the keys of the call"):
            device.retrieve(keys, tables, None, 1)
    assert everything(device) == before


def test_emulated_cuda_tier_store_names_what_is_wrong(cuda: EmulatedCuda) -> None:
    keys, tables = torch.arange(2), torch.zeros(2).int()
    store = tier_store(TableSpec("f", 10, None, 0), TableSpec("g", 10, None, 0, trainable=False))
    for call, error, words in (
        (lambda: store.retrieve(keys.int(), tables, None, 0), TypeError, "retrieve: keys must be a contiguous CPU"),
        (lambda: store.retrieve(keys, tables, keys - 1, 0), ValueError, "counts must be >= 0, got -1 at position 0"),
        (lambda: store.find(keys + 9, "f"), IndexError, r"find: key 10 at position 1 is outside \[0, 10\)"),
        (lambda: store.find(keys), ValueError, "no table None: name one of f, g"),
        (lambda: store.apply_gradients(keys, torch.ones(2, 4), step=1, table="g"), ValueError, "'g' is frozen"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert len(store) == 0 and store.tier is None and store.touched is None
    store.warm(keys, tables)


REFUSED = {
    "admission": (
        {"admission": policy.MinFrequency(2)},
        r"table 't': admission MinFrequency.* does not work with rows",
    ),
    "score": (
        {"eviction": policy.Score(lambda keys, used, frequency, batch: keys), "capacity": 5},
        r"table 't': eviction by a function \(policy.Score\) does not work with rows on a device; choose LRU, LFU or",
    ),
    "custom": ({"init": init.Custom(lambda keys, dim, seed: None)}, r"table 't': initial values from a function"),
    "default": ({"default_row": init.Custom(lambda keys, dim, seed: None)}, r"table 't': initial values from a func"),
    "wide": ({"embedding_dim": 2049}, "table 't': rows on a device have up to 2048 floats, got embedding_dim 2049"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_cuda_tier_of_a_table_refuses_what_it_cannot_do(what: str) -> None:
    settings, words = REFUSED[what]
    with pytest.raises(ValueError, match=words):
        nk.EmbeddingBagConfig(nk.UNBOUNDED, settings.get("embedding_dim", 4), "t", tier=nk.DeviceTier("cuda"),
                              **{k: v for k, v in settings.items() if k != "embedding_dim"})  # fmt: skip
    if what == "score":
        with pytest.raises(ValueError, match=words):
            tier_store(spec("t", **settings))


def test_cuda_tier_checks_its_fields() -> None:
    for settings, error, words in (
        ({"device": "cpu"}, ValueError, "device must be an accelerator such as 'cuda', got 'cpu'; for rows in host"),
        ({"device": 3}, TypeError, "DeviceTier: device must be a torch.device or its name, got 3"),
        ({"load": 1.0}, ValueError, r"DeviceTier: load must be in \(0, 0.9\], got 1.0"),
        ({"rows_per_slab": 33}, ValueError, "rows_per_slab must be a power of two from 32 on, or None, got 33"),
        ({"memory_bytes": 0}, ValueError, "memory_bytes must be an integer >= 1, or None, got 0"),
    ):
        with pytest.raises(error, match=words):
            nk.DeviceTier(**{"device": "cuda", **settings})
    assert nk.DeviceTier(torch.device("cuda", 1)) == nk.DeviceTier("cuda:1")
    with pytest.raises(TypeError, match="tier must be a FileTier, a DeviceTier or None, got 'cuda'"):
        nk.EmbeddingBagConfig(10, 4, "t", tier="cuda")  # type: ignore[arg-type]


def test_cuda_tier_without_a_device_is_one_clear_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    tables = [nk.EmbeddingBagConfig(10, 4, "t", tier=nk.DeviceTier("cuda"))]
    with pytest.raises(RuntimeError, match=r"device 'cuda' (needs a torch that was built with CUDA|is not here)"):
        nk.EmbeddingBagCollection(tables, optimizer=SGD(lr=0.1))
