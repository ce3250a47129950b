"""From a model's name and a data set to a model with open-vocabulary tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nestpipe_kernels.data.dataset import Dataset
from nestpipe_kernels.models.dlrm import DLRM
from nestpipe_kernels.models.fuxi import FuXi
from nestpipe_kernels.models.hstu import HSTU
from nestpipe_kernels.types import UNBOUNDED, PoolingType, SparseOptimizer

__all__ = ["SEQUENCE_MODELS", "build"]

SEQUENCE_MODELS: dict[str, type[HSTU] | type[FuXi]] = {"hstu": HSTU, "fuxi": FuXi}
"""Models of sequences (data.SequenceDataset), by name."""


def build(
    name: str,
    dataset: Dataset,
    optimizer: SparseOptimizer,
    *,
    seed: int = 0,
    embedding_dim: int = 64,
    bottom_mlp: Sequence[int] = (128, 64),
    top_mlp: Sequence[int] = (256, 64),
    device: torch.device | str | None = None,
    process_group: Any = None,
    sparse_groups: Any = 1,
) -> nn.Module:
    """A model for the data set's features, over tables with an open vocabulary: DLRM with mean pooling, or a model of
    sequences.

    Args:
        name: "dlrm", "hstu" or "fuxi".
        dataset: says which tables and how many numbers there are.
        optimizer: update rule of the tables.
        seed: determines all initial values, alike on every rank and at any number of ranks.
        embedding_dim: D of every table.
        bottom_mlp: hidden sizes for the numbers; the last one is replaced by embedding_dim.
        top_mlp: hidden sizes of the top MLP.
        device: where the model lives; None for the CPU.
        process_group: ranks that share the tables; None for the default group.
        sparse_groups: copies of the tables among them, as EmbeddingBagCollection takes it.

    Raises:
        ValueError: an unknown model or sizes that make no sense.
    """
    if name in SEQUENCE_MODELS:
        made = _sequence_model(name, dataset, optimizer, seed, embedding_dim, process_group, sparse_groups)
        return made if device is None else made.to(device)
    if name != "dlrm":
        raise ValueError(f"unknown model {name!r}: choose dlrm, {' or '.join(SEQUENCE_MODELS)}")
    from nestpipe_kernels.nn import EmbeddingBagCollection, EmbeddingBagConfig

    tables = [
        EmbeddingBagConfig(
            UNBOUNDED,
            embedding_dim,
            table.name,
            feature_names=list(table.feature_names),
            pooling=PoolingType.MEAN,
        )
        for table in dataset.tables
    ]
    collection = EmbeddingBagCollection(
        tables, device=device, optimizer=optimizer, seed=seed, process_group=process_group, sparse_groups=sparse_groups
    )
    model = DLRM(collection, dataset.num_dense, (*bottom_mlp[:-1], embedding_dim), top_mlp, seed)
    return model if device is None else model.to(device)


def _sequence_model(
    name: str,
    dataset: Dataset,
    optimizer: SparseOptimizer,
    seed: int,
    embedding_dim: int,
    process_group: Any,
    sparse_groups: Any,
) -> nn.Module:
    from nestpipe_kernels.nn import EmbeddingCollection, EmbeddingConfig

    tables = [
        EmbeddingConfig(UNBOUNDED, embedding_dim, table.name, feature_names=list(table.feature_names))
        for table in dataset.tables
    ]
    collection = EmbeddingCollection(
        tables, optimizer=optimizer, seed=seed, process_group=process_group, sparse_groups=sparse_groups
    )
    return SEQUENCE_MODELS[name](collection, max_length=getattr(dataset, "max_length", 64), seed=seed)
