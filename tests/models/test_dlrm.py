"""DLRM: its formula by hand, seeds, inputs without numbers, and its errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from nestpipe_kernels.data import Batch, SyntheticConfig, SyntheticDataset
from nestpipe_kernels.jagged import KeyedJaggedTensor, KeyedTensor
from nestpipe_kernels.models import DLRM


class SmallTables(nn.Module):
    """Stands in for an EmbeddingBagCollection: one nn.EmbeddingBag per table, ids taken modulo its size."""

    def __init__(self, features: dict[str, list[str]], dim: int, size: int = 100) -> None:
        super().__init__()
        self.features = features
        self.dim = dim
        generator = torch.Generator().manual_seed(9)
        self.tables = nn.ModuleDict(
            {
                name: nn.EmbeddingBag.from_pretrained(
                    torch.randn(size, dim, generator=generator), freeze=False, mode="sum", include_last_offset=True
                )
                for name in features
            }
        )

    def embedding_bag_configs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=n, embedding_dim=self.dim, feature_names=f) for n, f in self.features.items()]

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        names, outputs = [], []
        for table, features in self.features.items():
            for name in features:
                bags = sparse[name]
                names.append(name)
                outputs.append(self.tables[table](bags.values() % 100, bags.offsets()))
        return KeyedTensor.from_tensor_list(names, outputs)


def by_loops(model: DLRM, batch: Batch) -> Tensor:
    """The published formula, sample by sample and pair by pair."""
    pooled = model.embedding_bag_collection(batch.sparse).values()
    logits = []
    for i in range(len(batch)):
        embeddings = list(pooled[i].split(model.embedding_dim))
        vectors = embeddings if model.bottom is None else [model.bottom(batch.dense[i]), *embeddings]
        first = embeddings if model.bottom is None else vectors[:1]
        products = [torch.dot(vectors[a], vectors[b]) for a in range(len(vectors)) for b in range(a)]
        logits.append(model.top(torch.cat([*first, torch.stack(products)])))
    return torch.cat(logits)


FEATURES = {"user": ["user"], "item": ["item", "history"]}


def example(num_dense: int) -> tuple[DLRM, Batch]:
    batch = SyntheticDataset(SyntheticConfig(num_dense=num_dense)).batch(torch.arange(6))
    return DLRM(SmallTables(FEATURES, 4), num_dense, (8, 4), (5,), seed=1), batch


@pytest.mark.parametrize("num_dense", [0, 3])
def test_formula(num_dense: int) -> None:
    model, batch = example(num_dense)
    loss, (logits, labels) = model(batch)
    expected = by_loops(model, batch)
    torch.testing.assert_close(logits, expected.detach())
    # -log sigmoid(x) for a click, -log(1 - sigmoid(x)) otherwise
    signed = torch.where(batch.labels > 0, -expected, expected).detach().double()
    torch.testing.assert_close(loss.detach().double(), torch.log1p(signed.exp()).mean(), rtol=1e-6, atol=1e-6)
    assert not logits.requires_grad
    assert labels is batch.labels


@pytest.mark.parametrize("num_dense", [0, 3])
def test_every_parameter_gets_a_gradient(num_dense: int) -> None:
    model, batch = example(num_dense)
    model(batch)[0].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_one_feature_without_numbers() -> None:
    sparse = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    batch = Batch(torch.empty(2, 0), sparse, torch.zeros(2))
    model = DLRM(SmallTables({"a": ["a"]}, 4), 0, (), ())
    assert model(batch)[1][0].shape == (2,)


def test_parameters_follow_from_the_seed_alone() -> None:
    def dense_parameters(seed: int) -> list[Tensor]:
        model = DLRM(SmallTables(FEATURES, 4), 3, (8, 4), (5,), seed)
        return [p.detach() for name, p in model.named_parameters() if "tables" not in name]

    before = torch.get_rng_state()
    first = dense_parameters(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert all(torch.equal(a, b) for a, b in zip(first, dense_parameters(1)))
    assert not any(torch.equal(a, b) for a, b in zip(first, dense_parameters(2)))
    assert len(first) == 8


def test_training_lowers_the_loss() -> None:
    model, _ = example(3)
    data = SyntheticDataset(SyntheticConfig(num_dense=3))
    batch = data.batch(torch.arange(64))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_errors() -> None:
    class TwoDims(SmallTables):
        def embedding_bag_configs(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(name=n, embedding_dim=d, feature_names=[n]) for n, d in (("a", 4), ("b", 8))]

    with pytest.raises(ValueError, match=r"all tables must have one embedding_dim, got \{'a': 4, 'b': 8\}"):
        DLRM(TwoDims({"a": ["a"]}, 4), 3, (4,), (5,))
    tables = SmallTables(FEATURES, 4)
    with pytest.raises(ValueError, match=r"last bottom_mlp size must be the embedding_dim 4, got \[8\]"):
        DLRM(tables, 3, (8,), (5,))
    with pytest.raises(ValueError, match=r"last bottom_mlp size must be the embedding_dim 4, got \[\]"):
        DLRM(tables, 3, (), (5,))
    with pytest.raises(ValueError, match=r"num_dense must be >= 0, got -1"):
        DLRM(tables, -1, (4,), (5,))
    with pytest.raises(ValueError, match=r"layer sizes must be >= 1, got \[3, 0, 4\]"):
        DLRM(tables, 3, (0, 4), (5,))
