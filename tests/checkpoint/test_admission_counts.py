"""Counts of keys that admission has not given a row move with their slices; counters go on."""

from __future__ import annotations

import dataclasses

import pytest
import safetensors.torch
import torch
from store_cases import contents, load_stores, make_store, save_stores

from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.errors import CheckpointError
from nestpipe_kernels.init import Uniform
from nestpipe_kernels.ops.owners import default_slice_owner, owners
from nestpipe_kernels.ops.owners.reference import hash_keys
from nestpipe_kernels.policy import CountingFilter, MinFrequency
from nestpipe_kernels.types import UNBOUNDED, TableSpec

EXACT = MinFrequency(3)
FILTER = MinFrequency(3, filter=CountingFilter(1 << 16))


def _tables(rule, name: str = "t") -> list[TableSpec]:
    init = Uniform(-0.5, 0.5)
    return [TableSpec(name, UNBOUNDED, init, 1, admission=rule), TableSpec("plain", UNBOUNDED, init, 2)]


def _stores(rule, world: int, name: str = "t"):
    return [make_store(tables=_tables(rule, name)) for _ in range(world)]


def _see(stores, keys: torch.Tensor, batch: int) -> None:
    """Every rank retrieves those of some keys that it owns."""
    tables = torch.zeros(keys.numel(), dtype=torch.int32)
    for rank, store in enumerate(stores):
        own = owners(keys, tables, store.table_hashes, default_slice_owner(len(stores))) == rank
        store.retrieve(keys[own], tables[own], None, batch)


def _filled(rule, world: int):
    """Keys 0 .. 99 have rows, 100 .. 299 were seen twice, 300 .. 499 once."""
    stores = _stores(rule, world)
    for batch, end in enumerate((500, 300, 100)):
        _see(stores, torch.arange(end), batch)
    return stores


@pytest.mark.parametrize("rule", [EXACT, FILTER])
def test_keys_go_on_counting_on_any_number_of_ranks(tmp_path, rule) -> None:
    stores = _filled(rule, 2)
    before = contents(stores)
    save_stores(tmp_path, stores)
    for world in (1, 3, 2):
        stores = _stores(rule, world)
        load_stores(tmp_path, stores)
        assert contents(stores) == before
        save_stores(tmp_path, stores)
    _see(stores, torch.arange(500), 9)
    rows = {key for _, key in contents(stores)}
    assert set(range(300)) <= rows
    if rule is EXACT:
        assert rows == set(range(300))


def test_exact_counts_are_the_same_after_moving_to_other_ranks_and_back(tmp_path) -> None:
    stores = _filled(EXACT, 2)
    save_stores(tmp_path, stores)
    others = _stores(EXACT, 3)
    load_stores(tmp_path, others)
    save_stores(tmp_path, others)
    again = _stores(EXACT, 2)
    load_stores(tmp_path, again)
    for old, new in zip(stores, again):
        for name, tensor in old.admission_state("t").items():
            assert torch.equal(new.admission_state("t")[name], tensor)
    assert sum(store.admission_state("t")["keys"].numel() for store in again) == 400


def test_files_of_counts_are_in_the_order_of_row_files(tmp_path) -> None:
    (store,) = _filled(EXACT, 1)
    save_stores(tmp_path, [store])
    name = Manifest.load(tmp_path).table("t").admission_files[0]
    found = safetensors.torch.load_file(tmp_path / name)
    shards = (hash_keys(store.table_hashes[:1], found["keys"]) >> 40) & 255
    assert list(zip(shards.tolist(), found["keys"].tolist())) == sorted(zip(shards.tolist(), found["keys"].tolist()))
    assert dict(zip(found["keys"].tolist(), found["counts"].tolist())) == {k: 2 - (k >= 300) for k in range(100, 500)}
    whole = store.admission_state("t")
    assert torch.equal(whole["keys"], torch.arange(100, 500)) and torch.equal(found["keys"].sort()[0], whole["keys"])


def test_loading_replaces_counts_and_counters(tmp_path) -> None:
    stores = _filled(EXACT, 2)
    sums = {name: sum(store.counters("t")[name] for store in stores) for name in stores[0].counters("t")}
    assert sums["inserted"] == 100 and sums["not_admitted"] > 0
    save_stores(tmp_path, stores)
    assert Manifest.load(tmp_path).table("t").counters == sums
    others = _stores(EXACT, 2)
    _see(others, torch.arange(1000, 1100), 0)
    load_stores(tmp_path, others)
    assert all(int(store.admission_state("t")["keys"].max()) < 500 for store in others)
    assert {name: sum(store.counters("t")[name] for store in others) for name in sums} == sums


def test_a_table_without_counts_has_no_file_of_them(tmp_path) -> None:
    save_stores(tmp_path, _filled(EXACT, 2))
    manifest = Manifest.load(tmp_path)
    assert manifest.table("plain").admission_files == [] and len(manifest.table("t").admission_files) == 2


def test_another_rule_is_named_and_starts_anew_on_request(tmp_path) -> None:
    save_stores(tmp_path, _filled(EXACT, 2))
    for rule in (None, MinFrequency(4)):
        stores = _stores(rule, 1)
        with pytest.raises(CheckpointError, match=r"is MinFrequency\(count=3, .*\) in the ch.* \(strict=False takes"):
            load_stores(tmp_path, stores)
        load_stores(tmp_path, stores, strict=False)
        assert stores[0].size("t") == 100
        assert not any(tensor.numel() for tensor in stores[0].admission_state("t").values())


@pytest.mark.parametrize("held", [False, True])
def test_damaged_counts_are_named_and_nothing_changes(tmp_path, held) -> None:
    save_stores(tmp_path, _filled(EXACT, 2))
    name = Manifest.load(tmp_path).table("t").admission_files[1]
    data = bytearray((tmp_path / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / name).write_bytes(data)
    stores = _stores(EXACT, 1)
    if held:
        _see(stores, torch.arange(3).repeat(3), 0)
    before = contents(stores), stores[0].counters("t")
    with pytest.raises(CheckpointError, match=f"{name}: tensor 'keys' is damaged"):
        load_stores(tmp_path, stores)
    assert (contents(stores), stores[0].counters("t")) == before


def test_clearing_one_table_leaves_the_others() -> None:
    store = make_store(tables=_tables(EXACT))
    keys = torch.arange(50)
    store.retrieve(keys, torch.ones(50, dtype=torch.int32), None, 0)
    store.retrieve(keys.repeat(3), torch.zeros(150, dtype=torch.int32), None, 0)
    store.retrieve(keys + 100, torch.zeros(50, dtype=torch.int32), None, 1)
    plain = store.find(keys, "plain")
    store.clear("t")
    assert (store.size("t"), store.size("plain")) == (0, 50)
    assert store.admission_state("t")["keys"].numel() == 0 and set(store.counters("t").values()) == {0}
    assert all(torch.equal(a, b) for a, b in zip(store.find(keys, "plain"), plain))
    store.retrieve(keys.repeat(3), torch.zeros(150, dtype=torch.int32), None, 2)
    assert (store.size("t"), store.size("plain")) == (50, 50)
    assert all(torch.equal(a, b) for a, b in zip(store.find(keys, "plain"), plain))


def test_descriptions_of_rules_tell_them_apart(tmp_path) -> None:
    save_stores(tmp_path, _filled(FILTER, 1))
    other = dataclasses.replace(FILTER, filter=None)
    with pytest.raises(CheckpointError, match="admission is"):
        load_stores(tmp_path, _stores(other, 1))
