"""Arrays of other libraries are taken where tensors are, by DLPack."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import nestpipe_kernels as nk
from nestpipe_kernels.ops._arrays import as_tensor
from nestpipe_kernels.ops.bucketize import bucketize
from nestpipe_kernels.ops.dedup import dedup
from nestpipe_kernels.ops.intersect import intersect
from nestpipe_kernels.store import EmbeddingStore


def test_an_array_and_its_tensor_share_memory() -> None:
    array = np.arange(5)
    tensor = as_tensor(array)
    tensor[0] = 7
    assert isinstance(tensor, torch.Tensor) and array[0] == 7
    assert as_tensor(tensor) is tensor and as_tensor("text") == "text" and as_tensor(None) is None


def test_operations_on_keys_take_arrays() -> None:
    keys = np.array([5, -1, 5, 2**62])
    assert dedup(keys, np.zeros(4, dtype=np.int32)).inverse.tolist() == [0, 1, 0, 2]  # type: ignore[arg-type]
    assert bucketize(np.array([1, 0], dtype=np.int32), 2)[0].tolist() == [1, 0]  # type: ignore[arg-type]
    assert intersect(keys[:2], None, torch.tensor([-1]), None)[0].tolist() == [1]  # type: ignore[arg-type]


def test_modules_stores_and_jagged_types_take_arrays() -> None:
    ids, lengths = np.array([3, 1, 3]), np.array([2, 1])
    features = nk.KeyedJaggedTensor(["f"], ids, lengths=lengths)  # type: ignore[arg-type]
    assert torch.equal(features.values(), torch.from_numpy(ids)) and features.stride() == 2
    assert nk.JaggedTensor(ids, lengths=lengths).lengths().tolist() == [2, 1]  # type: ignore[arg-type]
    embedding = nk.nn.Embedding(5, 4, optimizer=nk.optim.SGD(0.1))
    assert torch.equal(embedding(ids), embedding(torch.from_numpy(ids)))
    bag = nk.nn.EmbeddingBag(5, 4, mode="sum", optimizer=nk.optim.SGD(0.1))
    assert torch.equal(bag(ids, np.array([0, 2])), bag(torch.from_numpy(ids), torch.tensor([0, 2])))
    store = EmbeddingStore(name="t", dim=4, optimizer=nk.optim.SGD(0.1))
    assert store.find_or_insert(ids)[1].tolist() == [1, 1, 0]  # type: ignore[arg-type]


def test_an_array_that_cannot_be_shared_is_named() -> None:
    keys = np.arange(3, dtype=np.longdouble)
    with pytest.raises(TypeError, match=r"a numpy array of float128 cannot be used as a tensor \(.*\); make a"):
        dedup(keys)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a numpy array of int64 cannot be used as a tensor \(negative strides\)"):
        nk.KeyedJaggedTensor(["f"], np.arange(4)[::-1], lengths=np.array([4]))  # type: ignore[arg-type]


def test_gradients_may_be_arrays_and_what_is_none_is_named() -> None:
    store = EmbeddingStore(name="t", dim=2, optimizer=nk.optim.SGD(0.5))
    before, _ = store.find_or_insert(torch.tensor([1]))
    store.apply_gradients(np.array([1]), np.ones((1, 2), dtype=np.float32), step=1)  # type: ignore[arg-type]
    assert torch.equal(store.find(torch.tensor([1]))[0], before - 0.5)
    with pytest.raises(TypeError, match="find_or_insert: out must be a tensor, got ndarray"):
        store.find_or_insert(torch.tensor([1]), out=np.ones((1, 2)))  # type: ignore[arg-type]
