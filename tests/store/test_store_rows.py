"""Rows of a store: layout, copies in and out, initial values, and the errors of its calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stores import StateOf, item_store, keys_of, table_zero, whole_rows

from nestpipe_kernels._native import core
from nestpipe_kernels.init import Constant, Normal, Uniform, Zeros
from nestpipe_kernels.init.reference import hash_name
from nestpipe_kernels.store import EmbeddingStore, RowMetadata
from nestpipe_kernels.types import KeyStatus, TableSpec

DIMS = [1, 3, 7, 64, 65, 129, 1280]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("factor", [0, 1, 2])
def test_fault_10_every_dim_keeps_whole_rows(dim, factor):
    store = EmbeddingStore(name="t", dim=dim, optimizer=StateOf(factor), init=Normal(0.0, 1.0), seed=4)
    used = dim * (1 + factor) + 1
    stride = store.row_floats * 4
    assert store.row_floats >= used
    assert stride % (16 if stride < 256 else 64) == 0
    assert stride - used * 4 < 64
    keys = torch.arange(-40, 40)
    embeddings, _ = store.find_or_insert(keys)
    expected = torch.from_numpy(Normal(0.0, 1.0).reference(4, "t", keys.numpy(), dim))
    assert torch.equal(embeddings, expected)
    rows = whole_rows(store, keys)
    assert torch.equal(rows[:, :dim], expected)
    assert (rows[:, dim : used - 1] == 0.5).all()
    assert (rows[:, used - 1 :].contiguous().view(torch.int32) == 0).all()
    written = torch.arange(rows.numel(), dtype=torch.float32).reshape(rows.shape)
    handles = store.find_handles(keys, table_zero(keys))
    store.write_back(handles, written)
    back = whole_rows(store, keys)
    assert torch.equal(back[:, :used], written[:, :used])
    assert (back[:, used:] == 0).all()
    assert torch.equal(store.find(keys)[0], written[:, :dim])
    store.write_embeddings(handles, expected)
    assert torch.equal(whole_rows(store, keys)[:, :dim], expected)
    assert torch.equal(whole_rows(store, keys)[:, dim:used], written[:, dim:used])


@pytest.mark.parametrize("init", [Zeros(), Constant(1.5), Uniform(-0.1, 0.2), Normal(1.0, 0.1)], ids=repr)
def test_initial_values_depend_on_seed_table_and_key_alone(init):
    keys = torch.randperm(5000, generator=torch.Generator().manual_seed(0)) - 2500
    expected = torch.from_numpy(init.reference(9, "b", keys.numpy(), 6))
    for threads, pieces in [(1, 1), (2, 7), (4, 50)]:
        core().set_num_threads(threads)
        specs = [TableSpec("a", -1, Uniform(0.0, 1.0), 1), TableSpec("b", -1, init, 9)]
        store = EmbeddingStore(specs, dim=6, optimizer=StateOf())
        order = torch.randperm(5000, generator=torch.Generator().manual_seed(pieces))
        for piece in order.chunk(pieces):
            store.find_or_insert(keys[piece], table="a")
            store.find_or_insert(keys[piece], table="b")
        assert torch.equal(store.find(keys, table="b")[0], expected)
        store.erase(keys[:100], table="b")
        assert torch.equal(store.find_or_insert(keys, table="b")[0], expected)


def test_default_initial_values():
    keys = torch.arange(2000)
    values = item_store(dim=16).find(keys)[0]
    assert 0.24 < values.abs().max() <= 0.25
    values = item_store(dim=16, num_embeddings=10_000).find(keys)[0]
    assert 0.0099 < values.abs().max() <= 0.01


def test_results_are_copies():
    store = item_store()
    rows, _ = store.find_or_insert(keys_of(1))
    rows.zero_()
    assert (store.find(keys_of(1))[0] != 0).any()


def test_gather_goes_where_the_index_says():
    store = item_store()
    store.find_or_insert(keys_of(5))
    keys = keys_of(5, 6)
    handles = store.find_handles(keys, table_zero(keys))
    assert handles[1] == -1
    out = torch.full((4, store.row_floats), float("nan"))
    store.gather(handles, keys, table_zero(keys), out, keys_of(3, 0))
    assert torch.equal(out[[3, 0]], whole_rows(store, keys))
    assert out[1:3].isnan().all()
    with pytest.raises(IndexError, match="store: gather to row 4 of a buffer of 4"):
        store.gather(handles, keys, table_zero(keys), out, keys_of(0, 4))


def test_write_back_skips_absent_rows():
    store = item_store()
    store.find_or_insert(keys_of(5))
    before = whole_rows(store, keys_of(5, 6))
    store.write_back(keys_of(-1, -1), torch.zeros(2, store.row_floats))
    assert torch.equal(whole_rows(store, keys_of(5, 6)), before)
    with pytest.raises(IndexError, match=r"row handles must be in \[-1, 1\), got 1 at position 0"):
        store.write_back(keys_of(1), torch.zeros(1, store.row_floats))


def test_metadata_can_be_restored():
    store = item_store()
    keys = keys_of(1, 2)
    handles = store.retrieve(keys, table_zero(keys), None, 0).handles
    store.write_metadata(handles, RowMetadata(keys_of(17, 4), keys_of(100, 1)))
    assert store.metadata(keys_of(2, 1)).last_used.tolist() == [4, 17]
    assert store.metadata(keys_of(2, 1)).frequency.tolist() == [1, 100]


def test_table_hashes_are_those_of_the_names():
    specs = [TableSpec("a", -1, None, 0), TableSpec("b", -1, None, 0)]
    store = EmbeddingStore(specs, dim=1, optimizer=StateOf())
    assert store.table_hashes.numpy().view(np.uint64).tolist() == [hash_name("a"), hash_name("b")]


def test_fault_14_a_fixed_table_names_the_bad_key():
    store = item_store(num_embeddings=10)
    for bad in (10, -1):
        for call in (store.find, store.find_or_insert, store.erase, store.metadata):
            message = f"{call.__name__}: key {bad} at position 2 is outside \\[0, 10\\) of table 'item'"
            with pytest.raises(IndexError, match=message):
                call(keys_of(0, 9, bad, 11))
    assert len(store) == 0


def test_fault_16_strided_keys_equal_contiguous_ones():
    keys = torch.arange(40).reshape(20, 2)[:, 1]
    store = item_store()
    rows, _ = store.find_or_insert(keys)
    assert store.keys().tolist() == keys.tolist()
    assert torch.equal(rows, store.find(keys.contiguous())[0])
    assert store.find(keys.to(torch.int32))[1].tolist() == [KeyStatus.FOUND] * 20


def test_no_keys_at_all():
    store = item_store(dim=3)
    rows, status = store.find_or_insert(keys_of())
    assert rows.shape == (0, 3)
    assert status.dtype == torch.uint8
    assert store.keys().tolist() == []
    assert store.erase(keys_of()).tolist() == []


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (torch.zeros(8, 3), TypeError, r"find: keys must be int64, got float32 \(shape \[8, 3\]\)"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, r"find: keys must have shape \[n\], got \[2, 2\]"),
        ([1, 2], TypeError, "find: keys must be an int64 tensor, got list"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "find: keys must be on the CPU, got meta"),
    ],
)
def test_bad_keys_are_refused(keys, error, message):
    with pytest.raises(error, match=message):
        item_store().find(keys)


def test_bad_tensors_of_the_protocol_are_refused():
    store = item_store(dim=4)
    keys = keys_of(1, 2)
    with pytest.raises(
        TypeError, match=r"retrieve: tables must be a contiguous CPU tensor of int32 \[2\], got int64 \[2\]"
    ):
        store.retrieve(keys, keys, None, 0)
    with pytest.raises(ValueError, match=r"write_back: rows must be .* float32 \[2, 12\], got float32 \[2, 4\]"):
        store.write_back(keys, torch.zeros(2, 4))
    with pytest.raises(IndexError, match=r"table indices must be in \[0, 1\), got 1"):
        store.find_handles(keys, torch.ones(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dim": 0}, ValueError, "store: dim must be an integer in .1, 268435456., got 0"),
        ({"dim": 1 << 62}, ValueError, "store: dim must be an integer in .1, 268435456., got 4611686018427387904"),
        ({"num_embeddings": 0}, ValueError, "num_embeddings of table 'item' must be >= 1 or UNBOUNDED"),
        ({"num_embeddings": 1.5}, TypeError, "num_embeddings of table 'item' must be an integer, got 1.5"),
        ({"capacity": -1}, ValueError, "capacity of table 'item' must be >= 0 or None, got -1"),
        (
            {"init": "uniform"},
            TypeError,
            "init of table 'item' must be a Zeros, Constant, Uniform, Normal, TruncatedNormal or Custom",
        ),
    ],
)
def test_bad_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        item_store(**settings)


def test_bad_tables_are_refused():
    spec = TableSpec("a", -1, None, 0)
    with pytest.raises(ValueError, match=r"store: table names must be distinct, got \['a', 'a'\]"):
        EmbeddingStore([spec, spec], dim=1, optimizer=StateOf())
    with pytest.raises(ValueError, match="store: give either tables, or name"):
        EmbeddingStore([spec], name="a", dim=1, optimizer=StateOf())
    with pytest.raises(ValueError, match="store: a table needs a name, got ''"):
        EmbeddingStore(name="", dim=1, optimizer=StateOf())
    store = EmbeddingStore([spec, TableSpec("b", -1, None, 0)], dim=1, optimizer=StateOf())
    with pytest.raises(ValueError, match="store: no table None: name one of a, b"):
        store.find(keys_of(1))
    with pytest.raises(ValueError, match="store: no table 'c': name one of a, b"):
        store.size("c")
