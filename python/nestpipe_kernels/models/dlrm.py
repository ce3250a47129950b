"""DLRM (Naumov et al., 2019, arXiv:1906.00091): dot products between embeddings and a bottom MLP, then a top MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe_kernels.models.dense_layers import seeded_mlp

__all__ = ["DLRM"]


class DLRM(nn.Module):
    """Click probability from F pooled features of one dimension D and `num_dense` numbers.

    z = bottom(dense) [D]; the dot products of all pairs of distinct vectors among z and the F embeddings, concatenated
    after z, go through the top MLP to one logit. Without numbers there is no z: the pairs are those of the embeddings,
    and the embeddings themselves are put before the products, so that the top MLP sees more than products.

    Args:
        embedding_bag_collection: ours or TorchRec's, every table of dimension D.
        num_dense: numbers per sample, 0 for none.
        bottom_mlp: sizes of the bottom layers, the last one D; ignored where num_dense is 0.
        top_mlp: sizes of the hidden top layers; the last layer, of size 1, is added.
        seed: determines the initial dense parameters, alike on every rank.

    Raises:
        ValueError: tables of different dimensions, a bottom MLP that does not end in D, or a size that makes no sense.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        num_dense: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        seed: int = 0,
    ) -> None:
        super().__init__()
        configs: Any = embedding_bag_collection.embedding_bag_configs()  # type: ignore[operator]
        dims = {config.name: config.embedding_dim for config in configs}
        if len(set(dims.values())) != 1:
            raise ValueError(f"DLRM: all tables must have one embedding_dim, got {dims}")
        if num_dense < 0:
            raise ValueError(f"DLRM: num_dense must be >= 0, got {num_dense}")
        dim = next(iter(dims.values()))
        if num_dense and (not bottom_mlp or bottom_mlp[-1] != dim):
            raise ValueError(f"DLRM: the last bottom_mlp size must be the embedding_dim {dim}, got {list(bottom_mlp)}")
        self.embedding_bag_collection = embedding_bag_collection
        self.num_dense = num_dense
        self.embedding_dim = dim
        self.num_features = sum(len(config.feature_names) for config in configs)
        generator = torch.Generator().manual_seed(seed)
        self.bottom = seeded_mlp([num_dense, *bottom_mlp], generator, last_activation=True) if num_dense else None
        vectors = self.num_features + bool(num_dense)
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("_pairs", row * vectors + column, persistent=False)
        first = dim if num_dense else self.num_features * dim
        self.top = seeded_mlp([first + row.numel(), *top_mlp, 1], generator, last_activation=False)

    def logits(self, batch: Any) -> Tensor:
        """float32 [B] from a batch with `dense` float32 [B, num_dense] and `sparse` (KeyedJaggedTensor)."""
        pooled = self.embedding_bag_collection(batch.sparse).values()
        if self.bottom is None:
            direct = pooled
            vectors = pooled.view(-1, self.num_features, self.embedding_dim)
        else:
            direct = self.bottom(batch.dense)
            vectors = torch.cat([direct, pooled], 1).view(-1, self.num_features + 1, self.embedding_dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        chosen = products.index_select(1, self.get_buffer("_pairs"))
        result: Tensor = self.top(torch.cat([direct, chosen], 1))
        return result.squeeze(1)

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(loss, (logits [B] detached, labels [B])): binary cross-entropy with logits, the mean over the samples."""
        logits = self.logits(batch)
        loss = functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (logits.detach(), batch.labels)
