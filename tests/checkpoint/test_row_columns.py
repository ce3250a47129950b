"""Rows by columns, as checkpoints load them: the same rows as by buffers, and nothing where they do not fit."""

from __future__ import annotations

import pytest
import torch
from store_cases import contents, fill, make_store, specs

from nestpipe_kernels.checkpoint.settings import row_parts
from nestpipe_kernels.errors import StoreFullError
from nestpipe_kernels.store import EmbeddingStore, RowMetadata


def _columns_of(store, handles) -> list[tuple[int, torch.Tensor]]:
    count = handles.numel()
    parts = row_parts(store).columns().values()
    columns = [(offset, torch.empty((count, *shape), dtype=dtype)) for offset, dtype, shape in parts]
    store.copy_columns(handles, columns)
    return columns


def test_rows_by_columns_are_the_rows_themselves() -> None:
    """New keys, keys that are there, keys that come twice, and row numbers that were used before."""
    store, other, third = make_store(), make_store(), make_store()
    fill(store, 0, 1)
    fill(other, 0, 1, salt=5)
    other.erase(other.keys("user")[::3], "user")
    third.reserve_keys("user", 1000)
    keys, handles = store.export_table("user")
    columns, metadata = _columns_of(store, handles), store.read_metadata(handles)
    for target in (other, third):
        target.load_columns(keys, "user", columns, metadata)
        found = {place: row for place, row in contents([target]).items() if place[0] == "user"}
        assert found == {place: row for place, row in contents([store]).items() if place[0] == "user"}
    assert third.keys("user").equal(keys)
    assert third.last_batch == int(metadata.last_used.max())
    twice = torch.cat([keys[:2], keys[:2]])
    fresh = make_store()
    again = RowMetadata(torch.arange(4), torch.arange(4))
    fresh.load_columns(twice, 0, [(offset, torch.cat([part[:2], part[:2]])) for offset, part in columns], again)
    assert fresh.size("user") == 2
    assert fresh.find(twice, "user")[0].equal(store.find(twice, "user")[0])


def test_rows_by_columns_that_do_not_fit_change_nothing() -> None:
    store, small = make_store(), make_store(tables=specs(capacity=3))
    fill(store, 0, 1)
    keys, handles = (part[:4] for part in store.export_table("user"))
    columns, metadata = _columns_of(store, handles), store.read_metadata(handles)
    with pytest.raises(
        StoreFullError, match=f"load_columns: table 'user' has 0 rows.*key {int(keys[3])} at position 3"
    ):
        small.load_columns(keys, "user", columns, metadata)
    with pytest.raises(IndexError, match=f"of a row of {store.row_floats * 4}"):
        small.load_columns(keys, "user", [(store.row_floats * 4 - 4, columns[0][1])], metadata)
    with pytest.raises(ValueError, match="column"):
        small.load_columns(keys, "user", [(0, columns[0][1][:-1])], metadata)
    assert (len(small), small.last_batch) == (0, -1)
    small.load_columns(keys[:3], "user", [], RowMetadata(torch.zeros(3, dtype=torch.int64), torch.arange(3)))
    assert torch.equal(small.find(keys[:3], "user")[0], torch.zeros(3, 4))


def test_memory_that_gives_out_between_columns_changes_nothing() -> None:
    store = make_store()
    fill(store, 0, 1)
    keys, handles = store.export_table("user")
    columns, metadata = _columns_of(store, handles), store.read_metadata(handles)
    loose = EmbeddingStore(specs(), dim=4, optimizer=store.optimizer)
    loose.load_columns(keys, "user", columns, metadata)
    used = sum(loose.memory()[part] for part in ("index", "slabs", "metadata", "admission"))
    for limit in (0, used // 4, used // 2, used - 1):
        tight = EmbeddingStore(specs(), dim=4, optimizer=store.optimizer, memory_limit=limit)
        with pytest.raises(MemoryError):
            tight.load_columns(keys, "user", columns, metadata)
        assert (len(tight), tight.find_handles(keys, torch.zeros(keys.numel(), dtype=torch.int32)).max()) == (0, -1)
        with pytest.raises(MemoryError):
            tight.reserve_keys("user", 1_000_000)
