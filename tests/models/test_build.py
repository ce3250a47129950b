"""The factory: tables and sizes follow from the data set; unknown names are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nestpipe_kernels import optim
from nestpipe_kernels.data import CriteoDataset, MovieLensDataset, SyntheticConfig, SyntheticDataset, batches
from nestpipe_kernels.data.dataset import Dataset
from nestpipe_kernels.models import build
from nestpipe_kernels.types import UNBOUNDED

SYNTHETIC = SyntheticDataset(SyntheticConfig(num_dense=3))


def test_unknown_model() -> None:
    optimizer: Any = None
    with pytest.raises(ValueError, match=r"unknown model 'nope': choose dlrm, hstu or fuxi"):
        build("nope", SYNTHETIC, optimizer)


@pytest.mark.parametrize("dataset", [SYNTHETIC, CriteoDataset, MovieLensDataset], ids=lambda d: d.name)
def test_tables_follow_from_the_data(dataset: Dataset) -> None:
    """Tables of a data set's class are enough: no file is read."""
    model = build("dlrm", dataset, optim.Adagrad(lr=0.1), embedding_dim=8, bottom_mlp=(16, 99), top_mlp=(4,))
    configs: Any = model.embedding_bag_collection.embedding_bag_configs()  # type: ignore[operator]
    assert [(c.name, tuple(c.feature_names)) for c in configs] == [(t.name, t.feature_names) for t in dataset.tables]
    assert {(c.num_embeddings, c.embedding_dim) for c in configs} == {(UNBOUNDED, 8)}
    assert (model.bottom is None) == (dataset.num_dense == 0)


def test_training_on_stores_is_the_same_again_and_lowers_the_loss() -> None:
    def losses() -> list[float]:
        model = build("dlrm", SYNTHETIC, optim.Adagrad(lr=0.05), embedding_dim=8, bottom_mlp=(8,), top_mlp=(8,), seed=2)
        dense = torch.optim.Adam([p for _, p in model.named_parameters()], lr=0.01)
        result = []
        loader = batches(SyntheticDataset(SyntheticConfig(num_dense=3, num_samples=64)), 32, epochs=15)
        for batch in loader:
            loss, _ = model(batch)
            dense.zero_grad()
            loss.backward()
            dense.step()
            result.append(loss.item())
        return result

    first = losses()
    assert first == losses()
    assert sum(first[-4:]) < 0.7 * sum(first[:4])
