"""Stores of float16 and bfloat16, and tables whose rows start from a user's function."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stores import StateOf, keys_of, table_zero, whole_rows
from torch import Tensor

from nestpipe_kernels import optim
from nestpipe_kernels.init import Constant, Custom, Normal, Uniform
from nestpipe_kernels.ops.row_storage import pack_embeddings, unpack_embeddings
from nestpipe_kernels.policy import LRU, MinFrequency
from nestpipe_kernels.store import EmbeddingStore
from nestpipe_kernels.types import DataType, TableSpec

HALVES = [DataType.FP16, DataType.BF16]


def by_key(keys: Tensor, dim: int, seed: int) -> Tensor:
    """A function of the key whose values no storage type but float32 holds exactly."""
    return (keys[:, None] % 1000 + torch.arange(dim) / 3 + seed).float()


def store_of(data_type: DataType, dim: int = 5, **settings) -> EmbeddingStore:
    return EmbeddingStore(name="item", dim=dim, optimizer=StateOf(), data_type=data_type, **settings)


@pytest.mark.parametrize("data_type", HALVES)
@pytest.mark.parametrize("dim", [1, 4, 5])
def test_rows_are_packed_and_initial_values_rounded_once(dim: int, data_type: DataType) -> None:
    init = Normal(0.0, 1.0)
    store = store_of(data_type, dim, init=init, seed=3)
    words = (dim + 1) // 2
    assert store.embedding_words == words
    assert store.row_floats >= words + dim + 1
    keys = torch.arange(300) - 100
    expected = torch.from_numpy(init.reference(3, "item", keys.numpy(), dim)).to(data_type.torch_dtype).float()
    assert torch.equal(store.find(keys)[0], expected)
    absent = whole_rows(store, keys)
    assert torch.equal(store.find_or_insert(keys)[0], expected)
    present = whole_rows(store, keys)
    for rows in (absent, present):
        assert torch.equal(unpack_embeddings(rows, dim, data_type), expected)
        assert (rows[:, words : words + dim] == 0.5).all()
        assert (rows[:, words + dim :].view(torch.int32) == 0).all()


@pytest.mark.parametrize("data_type", HALVES)
def test_embeddings_are_rounded_as_they_are_written(data_type: DataType) -> None:
    store = store_of(data_type)
    keys = torch.arange(40)
    store.find_or_insert(keys)
    values = torch.randn(40, 5)
    handles = store.find_handles(keys, table_zero(keys))
    store.write_embeddings(handles, values)
    assert torch.equal(store.find(keys)[0], values.to(data_type.torch_dtype).float())
    rows = whole_rows(store, keys)
    pack_embeddings(values * 2, rows, data_type)
    rows[:, store.embedding_words :] = 7.0
    store.write_back(handles, rows)
    assert torch.equal(whole_rows(store, keys)[:, : store.embedding_words + 6], rows[:, : store.embedding_words + 6])


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("data_type", HALVES)
def test_apply_gradients_rounds_once(data_type: DataType, stochastic: bool) -> None:
    results = []
    for _ in range(2):
        store = EmbeddingStore(
            name="item", dim=6, optimizer=optim.SGD(lr=0.1), data_type=data_type, stochastic_rounding=stochastic
        )
        keys = torch.arange(500)
        before, _ = store.find_or_insert(keys)
        grads = torch.randn(500, 6, generator=torch.Generator().manual_seed(1))
        store.apply_gradients(keys, grads, step=1)
        results.append(store.find(keys)[0])
    exact = before - torch.tensor(0.1) * grads
    nearest = exact.to(data_type.torch_dtype).float()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], nearest) is not stochastic
    assert (results[0] - exact).abs().max() <= torch.finfo(data_type.torch_dtype).eps * exact.abs().max()


def test_overflow_of_float16_is_infinite() -> None:
    store = EmbeddingStore(
        name="item", dim=2, optimizer=optim.SGD(lr=1.0), data_type=DataType.FP16, init=Constant(65504.0)
    )
    store.find_or_insert(keys_of(1))
    store.apply_gradients(keys_of(1), torch.tensor([[-10.0, -20.0]]), step=1)
    assert store.find(keys_of(1))[0].tolist() == [[65504.0, float("inf")]]


def test_bad_settings() -> None:
    with pytest.raises(TypeError, match=r"store: data_type must be a DataType, got 'BF16': use DataType\.BF16"):
        store_of("BF16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="store: stochastic_rounding needs data_type FP16 or BF16, got FP32"):
        store_of(DataType.FP32, stochastic_rounding=True)
    with pytest.raises(TypeError, match="store: stochastic_rounding must be True or False, got 1"):
        store_of(DataType.BF16, stochastic_rounding=1)


# --------------------------------------------------------------------------------------------- a user's function


@pytest.mark.parametrize("data_type", list(DataType))
def test_custom_values_are_read_inserted_erased_and_undone(data_type: DataType) -> None:
    store = store_of(data_type, init=Custom(by_key), seed=4)
    keys = keys_of(7, -3, 2**62, 7)
    expected = by_key(keys, 5, 4).to(data_type.torch_dtype).float()
    assert torch.equal(store.find(keys)[0], expected)
    assert torch.equal(unpack_embeddings(whole_rows(store, keys), 5, data_type), expected)
    assert torch.equal(store.find_or_insert(keys)[0], expected)
    assert torch.equal(unpack_embeddings(whole_rows(store, keys), 5, data_type), expected)
    store.write_embeddings(store.find_handles(keys, table_zero(keys)), torch.zeros(4, 5))
    assert (store.find_or_insert(keys)[0] == 0).all()
    store.erase(keys[:1])
    assert torch.equal(store.find(keys[:1])[0], expected[:1])
    retrieval = store.retrieve(keys[:1], table_zero(keys[:1]), None, 0)
    for _ in range(2):
        assert torch.equal(store.find(keys[:1])[0], expected[:1])
        store.undo(retrieval)
        assert len(store) == 2
        retrieval = store.retrieve(keys[:1], table_zero(keys[:1]), None, 0)
    out = torch.full((3, store.row_floats), float("nan"))
    store.gather(keys_of(-1), keys_of(9), table_zero(keys_of(9)), out, keys_of(1))
    assert torch.equal(
        unpack_embeddings(out[1:2], 5, data_type), by_key(keys_of(9), 5, 4).to(data_type.torch_dtype).float()
    )
    assert out[[0, 2]].isnan().all()


def test_custom_values_after_eviction_beside_other_tables() -> None:
    tables = [
        TableSpec("given", -1, Custom(by_key), 1, capacity=4, eviction=LRU(slack=0.0)),
        TableSpec("drawn", -1, Uniform(-1.0, 1.0), 1),
        TableSpec("rare", -1, Uniform(-1.0, 1.0), 1, admission=MinFrequency(5), default=Custom(by_key)),
    ]
    store = EmbeddingStore(tables, dim=3, optimizer=StateOf())
    for batch in range(6):
        keys = torch.arange(4) + 4 * batch if batch != 4 else torch.arange(4)
        which = torch.tensor([0, 0, 1, 2], dtype=torch.int32)
        retrieval = store.retrieve(keys, which, None, batch)
        values = store.read_embeddings(retrieval.handles, keys, which)
        assert torch.equal(values[:2], by_key(keys[:2], 3, 1))
        assert values[2].abs().max() <= 1
        assert torch.equal(values[3:], by_key(keys[3:], 3, 1))  # not admitted: the default
        store.write_embeddings(retrieval.handles, torch.zeros(4, 3))
    assert store.counters("given")["evicted"] > 0
    retrieval = store.retrieve(keys_of(3), torch.tensor([2], dtype=torch.int32), keys_of(5), 6)
    admitted = store.read_embeddings(retrieval.handles, keys_of(3), torch.tensor([2], dtype=torch.int32))
    drawn = Uniform(-1.0, 1.0).reference(1, "rare", np.array([3]), 3)
    assert torch.equal(admitted, torch.from_numpy(drawn))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda keys, dim, seed: None,
            TypeError,
            "init of table 'item': .* must return a float32 tensor, got NoneType",
        ),
        (lambda keys, dim, seed: torch.zeros(len(keys), dim).double(), TypeError, "a float32 tensor, got float64"),
        (
            lambda keys, dim, seed: torch.zeros(dim),
            ValueError,
            r"must return \[2, 5\] on the CPU, .*, got \[5\] on cpu",
        ),
        (
            lambda keys, dim, seed: torch.where(keys == 8, torch.inf, 0.0)[:, None].repeat(1, dim),
            ValueError,
            "init of table 'item': .* gave values that are not finite for key 8",
        ),
    ],
)
def test_what_a_function_may_return(function, error, message) -> None:
    store = store_of(DataType.FP32, init=Custom(function))
    keys = keys_of(3, 8)
    out = torch.zeros(2, store.row_floats)
    calls = [
        lambda: store.find(keys),
        lambda: store.find_or_insert(keys),
        lambda: store.retrieve(keys, table_zero(keys), None, 0),
        lambda: store.gather(keys_of(-1, -1), keys, table_zero(keys), out, None),
    ]
    for call in calls:
        with pytest.raises(error, match=message):
            call()
    assert len(store) == 0
    assert (out == 0).all()
