"""Capture of models that hold this package's own collections."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nestpipe_kernels.capture import capture_inputs, embedding_modules, same_features
from nestpipe_kernels.jagged import KeyedJaggedTensor
from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from nestpipe_kernels.optim import SGD


class TwoTowers(nn.Module):
    """A pooled and an unpooled collection, fed with keys of one KeyedJaggedTensor and with ids from a matrix."""

    def __init__(self) -> None:
        super().__init__()
        bags = [EmbeddingBagConfig(1000, 4, "a"), EmbeddingBagConfig(1000, 4, "b")]
        self.bags = EmbeddingBagCollection(bags, optimizer=SGD(lr=0.1))
        self.sequences = EmbeddingCollection([EmbeddingConfig(50, 4, "c")], optimizer=SGD(lr=0.1))
        self.over = nn.Linear(8, 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        ids = batch["matrix"][:, :2].long()
        lengths = torch.full((ids.shape[0],), 2)
        kjt = KeyedJaggedTensor(["c"], ids.reshape(-1), lengths=lengths)
        sequence = self.sequences(kjt)["c"]
        pooled = self.bags(batch["kjt"]).values() + self.bags(batch["kjt"].permute([1, 0])).values()
        return self.over(pooled).sum() + sequence.values().sum()


def make_batch(size: int, seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * size,), generator=g)
    values = torch.randint(0, 1000, (int(lengths.sum()),), generator=g)
    return {
        "kjt": KeyedJaggedTensor(["a", "b"], values, lengths=lengths),
        "matrix": torch.randint(0, 50, (size, 3), generator=g).float(),
    }


def test_collections_are_captured() -> None:
    model = TwoTowers()
    modules = embedding_modules(model)
    assert list(modules) == ["bags", "sequences"]
    captured = capture_inputs(model, modules, make_batch(8, 0), lambda m, b: m(b))
    assert captured.num_calls == {"bags": 2, "sequences": 1}
    batch = make_batch(5, 1)
    planned = captured.replay(batch)
    assert planned["bags"][0] is batch["kjt"]
    assert same_features(planned["bags"][1], batch["kjt"].permute([1, 0]))
    assert planned["sequences"][0].values().tolist() == batch["matrix"][:, :2].long().reshape(-1).tolist()
    call = model.sequences.plan_call(planned["sequences"][0])
    assert call.stores[0].keys.tolist() == planned["sequences"][0].values().tolist()
