"""EmbeddingCollection over stores: outputs against TorchRec, indices, different dims, padding."""

from __future__ import annotations

import pytest
import torch
from lookups import StoreLookups

from nestpipe_kernels import optim
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingCollection, EmbeddingConfig
from nestpipe_kernels.types import UNBOUNDED

FEATURES = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 1, 4, 5, 6, 6]), lengths=torch.tensor([2, 0, 1, 0, 4, 0]))


def test_outputs_equal_torchrecs() -> None:
    modules = pytest.importorskip("torchrec.modules.embedding_modules", reason="torchrec is not installed")
    configs = pytest.importorskip("torchrec.modules.embedding_configs", reason="torchrec is not installed")
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="torchrec is not installed")
    shapes = [("t", 10, ["b", "a"]), ("u", 20, ["a"])]
    ec = EmbeddingCollection(
        [EmbeddingConfig(size, 3, name, feature_names=names) for name, size, names in shapes],
        need_indices=True,
        optimizer=optim.SGD(lr=0.1),
    )
    twin = modules.EmbeddingCollection(
        [
            configs.EmbeddingConfig(num_embeddings=size, embedding_dim=3, name=name, feature_names=names)
            for name, size, names in shapes
        ],
        need_indices=True,
    )
    twin.load_state_dict(ec.state_dict())
    theirs = sparse.KeyedJaggedTensor(keys=["a", "b"], values=FEATURES.values(), lengths=FEATURES.lengths())
    ec.lookup_context = lookups = StoreLookups()
    ours, expected = ec(FEATURES), twin(theirs)
    assert list(ours) == list(expected) == ["b", "a@t", "a@u"]
    assert ec.embedding_names_by_table() == twin.embedding_names_by_table()
    for name, one in ours.items():
        assert one.values().equal(expected[name].values())
        assert one.lengths().equal(expected[name].lengths())
        assert one.weights().equal(expected[name].weights())
    (ours["a@t"].values().sum() + ours["b"].values().pow(2).sum()).backward()
    (expected["a@t"].values().sum() + expected["b"].values().pow(2).sum()).backward()
    grad = twin.embeddings["t"].weight.grad
    for (_, table, key), row in lookups.row_gradients.items():
        torch.testing.assert_close(row, grad[key] if table == 0 else torch.zeros(3), rtol=1e-6, atol=0)


def test_dims_may_differ_and_indices_are_optional() -> None:
    tables = [EmbeddingConfig(10, 2, "t", feature_names=["a"]), EmbeddingConfig(UNBOUNDED, 5, "u", feature_names=["b"])]
    ec = EmbeddingCollection(tables, optimizer=optim.SGD(lr=0.1))
    ec.lookup_context = StoreLookups()
    output = ec(FEATURES)
    assert {name: tuple(one.values().shape) for name, one in output.items()} == {"a": (3, 2), "b": (4, 5)}
    assert output["a"].weights_or_none() is None
    assert not ec.need_indices()
    with pytest.raises(ValueError, match=r"tables have different dims \[2, 5\]; ask embedding_configs\(\) instead"):
        ec.embedding_dim()
    assert EmbeddingCollection(tables[:1], optimizer=optim.SGD(lr=0.1)).embedding_dim() == 2


def test_padding_keys_read_zeros() -> None:
    table = EmbeddingConfig(10, 2, "t", feature_names=["a"], padding_idx=1)
    ec = EmbeddingCollection([table], optimizer=optim.SGD(lr=0.1))
    ec.lookup_context = lookups = StoreLookups()
    rows = ec(FEATURES)["a"].values()
    assert rows[[0, 2]].equal(torch.zeros(2, 2))
    assert rows[1].abs().min() > 0
    rows.sum().backward()
    assert [key for _, _, key in lookups.row_gradients] == [2]


def test_weights_of_the_input_are_ignored() -> None:
    ec = EmbeddingCollection([EmbeddingConfig(10, 2, "a")], optimizer=optim.SGD(lr=0.1))
    ec.lookup_context = StoreLookups()
    weighted = KeyedJaggedTensor(
        ["a"], torch.tensor([1, 2]), lengths=torch.tensor([2]), weights=torch.tensor([5.0, 7.0])
    )
    assert ec(weighted)["a"].values().equal(ec.embeddings["a"].weight[[1, 2]])
