"""Rows, slots and metadata survive any change of the number of ranks."""

from __future__ import annotations

import safetensors.torch
import torch
from store_cases import all_keys, contents, fill, load_stores, make_store, save_stores

from nestpipe_kernels.checkpoint import rows_load, rows_save
from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.rows import TableTarget, load_tables
from nestpipe_kernels.checkpoint.settings import row_parts
from nestpipe_kernels.init import Uniform
from nestpipe_kernels.ops.owners import default_slice_owner, owners
from nestpipe_kernels.optim import Adagrad
from nestpipe_kernels.testing.threads import run_ranks_as_threads
from nestpipe_kernels.types import UNBOUNDED, TableSpec


def _saved(tmp_path, world: int = 1):
    stores = [make_store() for _ in range(world)]
    for rank, store in enumerate(stores):
        fill(store, rank, world)
    save_stores(tmp_path, stores)
    return stores


def test_fault_41_one_to_four_to_two_to_three_to_one_ranks_keep_every_row_and_slot(tmp_path) -> None:
    stores = _saved(tmp_path)
    expected = contents(stores)
    assert len(expected) == sum(keys.numel() for keys in all_keys())
    for world in (4, 2, 3, 1):
        stores = [make_store() for _ in range(world)]
        load_stores(tmp_path, stores)
        assert contents(stores) == expected
        for rank, store in enumerate(stores):  # rows lie where routing looks for them
            for table in range(3):
                keys = store.keys(table)
                numbers = torch.full((keys.numel(),), table, dtype=torch.int32)
                assert bool((owners(keys, numbers, store.table_hashes, default_slice_owner(world)) == rank).all())
        save_stores(tmp_path, stores)
    assert Manifest.load(tmp_path).generation == 5


def test_the_official_library_reads_the_rows(tmp_path) -> None:
    (store,) = _saved(tmp_path)
    manifest = Manifest.load(tmp_path)
    found = safetensors.torch.load_file(tmp_path / manifest.table("item").files[0].name)
    assert set(found) == {
        "keys",
        "embedding",
        "state.exp_avg",
        "state.exp_avg_sq",
        "updates",
        "last_used",
        "frequency",
    }
    keys = found["keys"]
    assert sorted(keys.tolist()) == all_keys()[1].tolist()
    assert torch.equal(found["embedding"], store.find(keys, "item")[0])
    assert torch.equal(found["last_used"], keys % 31)
    assert torch.equal(found["frequency"], keys % 5 + 1)
    assert torch.equal(found["updates"].to(torch.int64), keys % 17)
    assert torch.equal(found["state.exp_avg"][:, 0], (keys % 1000 + 7).to(torch.float32) * 2)


def test_fault_43_empty_stores_and_features_never_used_round_trip(tmp_path) -> None:
    save_stores(tmp_path, [make_store(), make_store()])
    for world in (1, 3):
        stores = [make_store() for _ in range(world)]
        loaded = load_stores(tmp_path, stores)
        assert loaded == [{"user": 0, "item": 0, "never used": 0}] * world
        assert contents(stores) == {}


def test_fault_43_a_load_brings_back_the_rows_not_only_the_rest(tmp_path) -> None:
    stores = _saved(tmp_path, 2)
    (fresh,) = [make_store()]
    assert sum(sum(one.values()) for one in load_stores(tmp_path, [fresh])) == len(contents(stores)) == len(fresh) > 900


def test_loading_replaces_what_tables_held(tmp_path) -> None:
    stores = _saved(tmp_path)
    others = [make_store(), make_store()]
    for rank, store in enumerate(others):
        fill(store, rank, 2, salt=9, keys=[torch.arange(-50, 50), torch.arange(1, 500, 2), torch.arange(30)])
    load_stores(tmp_path, others)
    assert contents(others) == contents(stores)


def test_files_of_other_slices_are_not_opened(tmp_path, monkeypatch) -> None:
    _saved(tmp_path, 4)
    opened: list[str] = []
    real = rows_load.open_tensor_file

    def watched(path, record):
        opened.append(path.name)
        return real(path, record)

    monkeypatch.setattr(rows_load, "open_tensor_file", watched)
    load_stores(tmp_path, [make_store() for _ in range(4)])
    assert sorted(opened) == sorted(f"g00000001-t{t:03d}-r{r:05d}-p000.safetensors" for t in (0, 1) for r in range(4))
    opened.clear()
    load_stores(tmp_path, [make_store(), make_store()])
    assert len(opened) == 8


def test_some_tables_and_other_names(tmp_path) -> None:
    """A subset of tables goes into a model that has others, too; a renamed table's rows find their new owners."""
    stores = _saved(tmp_path, 2)
    expected = {key: row for (table, key), row in contents(stores).items() if table == "user"}
    init = Uniform(-0.5, 0.5)
    tables = [TableSpec("new", UNBOUNDED, init, 1), TableSpec("customer", UNBOUNDED, init, 3)]
    others = [make_store(tables=tables) for _ in range(3)]
    manifest = Manifest.load(tmp_path)

    def body(rank, communicator):
        others[rank].retrieve(torch.tensor([rank]), torch.zeros(1, dtype=torch.int32), None, 1)
        return load_tables(tmp_path, manifest, communicator, [TableTarget(others[rank], 1, "user")])

    run_ranks_as_threads(3, body)
    found = contents(others)
    assert {key: row for (table, key), row in found.items() if table == "customer"} == expected
    assert {key for table, key in found if table == "new"} == {0, 1, 2}
    for rank, store in enumerate(others):
        keys = store.keys("customer")
        numbers = torch.ones(keys.numel(), dtype=torch.int32)
        assert bool((owners(keys, numbers, store.table_hashes, default_slice_owner(3)) == rank).all())


def test_small_chunks_give_the_same_rows(tmp_path, monkeypatch) -> None:
    """Tables of many chunks, with the whole of a save and a load in a bounded number of them at a time."""
    expected = contents(_saved(tmp_path, 2))
    monkeypatch.setattr(rows_save, "CHUNK_BYTES", 700)
    monkeypatch.setattr(rows_save, "_KEYS_AT_ONCE", 40)
    again = [make_store()]
    load_stores(tmp_path, again)
    assert contents(again) == expected
    save_stores(tmp_path, again)
    last = [make_store(), make_store(), make_store()]
    load_stores(tmp_path, last)
    assert contents(last) == expected


def test_a_chunk_stays_within_its_bytes() -> None:
    for dim in (1, 64, 5000):
        parts = row_parts(make_store(dim=dim))
        rows = rows_save.rows_per_chunk(parts)
        assert rows * parts.row_floats * 4 <= rows_save.CHUNK_BYTES
        assert rows * parts.bytes_per_row() <= rows_save.CHUNK_BYTES
    assert rows_save.rows_per_chunk(row_parts(make_store(dim=1 << 22))) == 1


def test_embeddings_alone_leave_the_optimizer_fresh(tmp_path) -> None:
    """Another rule, other slots: rows keep embeddings and metadata; state and updates start anew."""
    stores = _saved(tmp_path, 2)
    other = make_store(optimizer=Adagrad(initial_accumulator_value=0.25))
    load_stores(tmp_path, [other], optimizer_state=False)
    old, new = contents(stores), contents([other])
    assert set(old) == set(new)
    for place, (row, last_used, frequency) in new.items():
        values = torch.frombuffer(bytearray(row), dtype=torch.float32)
        assert row[:16] == old[place][0][:16] and (last_used, frequency) == old[place][1:]
        assert values[4:8].tolist() == [0.25] * 4 and int(values.view(torch.int32)[8]) == 0
