"""Collections without an optimizer: tables are parameters that autograd and the user's optimizer train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nestpipe_kernels import optim
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from nestpipe_kernels.types import PoolingType

FEATURES = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 1, 4, 5, 6, 6]), lengths=torch.tensor([2, 0, 1, 0, 4, 0]))


def test_outputs_and_training_equal_torchrecs() -> None:
    modules = pytest.importorskip("torchrec.modules.embedding_modules", reason="torchrec is not installed")
    configs = pytest.importorskip("torchrec.modules.embedding_configs", reason="torchrec is not installed")
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="torchrec is not installed")
    shapes: list[tuple[str, int, list[str], str]] = [("t", 3, ["b", "a"], "SUM"), ("u", 5, ["a"], "MEAN")]
    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(10, dim, name, feature_names=names, pooling=PoolingType[mode])
            for name, dim, names, mode in shapes
        ]
    )
    twin = modules.EmbeddingBagCollection(
        [
            configs.EmbeddingBagConfig(
                num_embeddings=10, embedding_dim=dim, name=name, feature_names=names, pooling=configs.PoolingType[mode]
            )
            for name, dim, names, mode in shapes
        ]
    )
    twin.load_state_dict(ebc.state_dict())
    theirs = sparse.KeyedJaggedTensor(keys=["a", "b"], values=FEATURES.values(), lengths=FEATURES.lengths())
    for module, features in ((ebc, FEATURES), (twin, theirs)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(features).values().pow(2).sum().backward()
            optimizer.step()
    assert ebc(FEATURES).keys() == twin(theirs).keys()
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(ebc.state_dict()[key], value, rtol=1e-6, atol=1e-7)


def test_gradients_are_sparse_and_names_are_torchrecs() -> None:
    ec = EmbeddingCollection([EmbeddingConfig(10, 2, "t", feature_names=["a", "b"])], need_indices=True)
    output = ec(FEATURES)
    output["a"].values().sum().backward()
    [(name, weight)] = ec.named_parameters()
    assert name == "embeddings.t.weight"
    assert weight.grad is not None
    assert weight.grad.is_sparse
    assert weight.grad.coalesce().indices().tolist() == [[1, 2]]
    assert output["b"].weights().tolist() == [4, 5, 6, 6]
    assert ec.row_stores() == []


def test_same_initial_values_as_with_an_optimizer() -> None:
    table = EmbeddingBagConfig(10, 4, "t")
    plain = EmbeddingBagCollection([table], seed=5).state_dict()
    stored = EmbeddingBagCollection([table], seed=5, optimizer=optim.SGD(lr=0.1)).state_dict()
    assert plain["embedding_bags.t.weight"].equal(stored["embedding_bags.t.weight"])
    assert plain["embedding_bags.t.weight"].abs().max() <= 10**-0.5


def test_fault_14_without_an_optimizer() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "t", feature_names=["b"])])
    with pytest.raises(
        IndexError, match=r"table 't', feature 'b': id 5 at position 1 \(sample 1\) is outside \[0, 5\)"
    ):
        ebc(FEATURES)


@pytest.mark.parametrize("mode", list(PoolingType)[:3])
def test_padding_is_not_pooled(mode: PoolingType) -> None:
    table = EmbeddingBagConfig(10, 4, "t", feature_names=["b"], pooling=mode, padding_idx=6)
    ebc = EmbeddingBagCollection([table])
    weight: Any = ebc.embedding_bags["t"].weight
    kept = weight[[4, 5]]
    expected = {"SUM": kept.sum(0), "MEAN": kept.mean(0), "MAX": kept.amax(0)}[mode.value]
    assert ebc(FEATURES)["b"][1].equal(expected)
    ec = EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["b"], padding_idx=6)])
    assert ec(FEATURES)["b"].values()[2:].equal(torch.zeros(2, 4))


def test_weights_and_frozen_tables() -> None:
    table = EmbeddingBagConfig(10, 4, "t", feature_names=["a"], trainable=False)
    ebc = EmbeddingBagCollection([table], is_weighted=True)
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    ebc(
        KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), lengths=torch.tensor([3]), weights=weights)
    ).values().sum().backward()
    weight: Any = ebc.embedding_bags["t"].weight
    assert weight.grad is None
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, weight[[1, 2, 3]].sum(1), rtol=1e-6, atol=0)


def test_reset_parameters() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t")], seed=5)
    weight: Any = ebc.embedding_bags["t"].weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    ebc.reset_parameters()
    assert weight.equal(before)


def test_what_needs_an_optimizer_says_so() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t")])
    for what, use in (
        ("sparse_optimizer", lambda: ebc.sparse_optimizer),
        (r"store\(\)", lambda: ebc.store("t")),
        (r"learning_rates\(\)", lambda: ebc.learning_rates(0)),
    ):
        with pytest.raises(
            ValueError, match=f"EmbeddingBagCollection: {what} needs an optimizer; this collection was made"
        ):
            use()
