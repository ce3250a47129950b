"""Embeddings of every storage type go through files bit by bit, and from one type to another with one rounding."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from store_cases import all_keys, contents, fill, load_stores, save_stores, specs

from nestpipe_kernels.checkpoint.manifest import Manifest
from nestpipe_kernels.checkpoint.settings import row_parts
from nestpipe_kernels.errors import CheckpointError
from nestpipe_kernels.optim import Adam, RowWiseAdagrad
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import DataType


def _store(data_type: DataType, dim: int = 5, optimizer=None) -> EmbeddingStore:
    return EmbeddingStore(specs(), dim=dim, optimizer=optimizer or Adam(), data_type=data_type)


def _saved(tmp_path, data_type: DataType, world: int = 1, **settings):
    stores = [_store(data_type, **settings) for _ in range(world)]
    for rank, store in enumerate(stores):
        fill(store, rank, world)
    save_stores(tmp_path, stores)
    return stores


@pytest.mark.parametrize("dim", [1, 5, 8])
@pytest.mark.parametrize("data_type", list(DataType))
def test_rows_of_a_type_come_back_bit_by_bit(tmp_path, data_type, dim) -> None:
    stores = _saved(tmp_path, data_type, 2, dim=dim, optimizer=RowWiseAdagrad())
    expected = contents(stores)
    for world in (3, 1):
        stores = [_store(data_type, dim, RowWiseAdagrad()) for _ in range(world)]
        load_stores(tmp_path, stores)
        assert contents(stores) == expected
        save_stores(tmp_path, stores)
    manifest = Manifest.load(tmp_path)
    assert manifest.table("item").data_type == data_type.value
    found = safetensors.torch.load_file(tmp_path / manifest.table("item").files[0].name)
    assert found["embedding"].dtype is data_type.torch_dtype and found["embedding"].shape[1] == dim
    assert torch.equal(found["embedding"].to(torch.float32), stores[0].find(found["keys"], "item")[0])


@pytest.mark.parametrize("source", list(DataType))
@pytest.mark.parametrize("target", list(DataType))
def test_fault_41_another_storage_type_is_rounded_once(tmp_path, source, target) -> None:
    """State and metadata stay as they are; every embedding is the nearest of the new type."""
    (saved,) = _saved(tmp_path, source)
    store = _store(target)
    load_stores(tmp_path, [store])
    for table, keys in enumerate(all_keys()):
        expected = saved.find(keys, table)[0].to(target.torch_dtype).to(torch.float32)
        assert torch.equal(store.find(keys, table)[0], expected)
        for name, _ in row_parts(store).slots:
            assert torch.equal(_slot(store, table, keys, name), _slot(saved, table, keys, name))


def _slot(store, table: int, keys: torch.Tensor, name: str) -> torch.Tensor:
    numbers = torch.full((keys.numel(),), table, dtype=torch.int32)
    rows = torch.empty(keys.numel(), store.row_floats)
    store.gather(store.find_handles(keys, numbers), keys, numbers, rows, None)
    return row_parts(store).slot(rows, name)


def test_a_value_beyond_fp16_is_named(tmp_path) -> None:
    stores = [_store(DataType.FP32)]
    fill(stores[0], 0, 1)
    key, numbers = torch.tensor([6]), torch.ones(1, dtype=torch.int32)
    stores[0].write_embeddings(stores[0].find_handles(key, numbers), torch.full((1, 5), -70000.0))
    save_stores(tmp_path, stores)
    half = _store(DataType.FP16)
    with pytest.raises(
        CheckpointError, match="table 'item': the row of key 6 has elements up to 70000, FP16 ends at 65504"
    ):
        load_stores(tmp_path, [half])
    assert len(half) == 0
    load_stores(tmp_path, [_store(DataType.BF16)])
