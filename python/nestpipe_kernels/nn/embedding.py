"""Embedding: torch.nn.Embedding's arguments and results over a table in sharded stores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.nn.drop_in import TableModule, check_arguments, matrix_shape, table_config
from nestpipe_kernels.ops._arrays import as_tensor
from nestpipe_kernels.types import SparseOptimizer

__all__ = ["Embedding"]


class Embedding(TableModule):
    """Looks up the row of every id: a drop-in for torch.nn.Embedding.

    The rows live in a store, sharded over the ranks of `process_group`, and are updated by the pipeline, or by the
    module itself at the end of backward, whichever rows the step has looked up: `sparse` says nothing new. `weight`
    reads all rows, and trains them where it is part of the loss; it is no parameter.

    Args:
        num_embeddings: size of the vocabulary, or UNBOUNDED: any int64 is an id.
        embedding_dim: floats per row.
        padding_idx: an id whose row lookups give no gradient. It starts as zeros, unless `_weight` is given.
        max_norm, norm_type, scale_grad_by_freq: refused, unless left at their defaults.
        sparse: of no effect.
        _weight: float32 [num_embeddings, embedding_dim] to start from, copied. Default: drawn as torch.nn.Embedding
            does, the same numbers after the same torch.manual_seed; or the table's own rule, if `init` is given,
            which otherwise is for rows that come back after eviction.
        _freeze: True: rows are never updated.
        device: CPU, or None.
        dtype: float32, or None.
        optimizer: `nk.optim` object; needed unless frozen.
        name: the table's name, in messages and checkpoints.
        seed: with the name, what an `init` rule depends on.
        process_group, sparse_groups: as for EmbeddingCollection.
        **settings: other fields of EmbeddingConfig: data_type, init, capacity, admission, eviction, tier, lr_scale ...
        _fill: False: there are no rows until nk.convert makes them.

    Raises:
        TypeError, ValueError: arguments that are wrong, contradict each other or cannot keep their meaning; named.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        optimizer: SparseOptimizer | None = None,
        name: str = "weight",
        seed: int = 0,
        process_group: Any = None,
        sparse_groups: SparseGroups | int = 1,
        _fill: bool = True,
        **settings: Any,
    ) -> None:
        check_arguments("nn.Embedding", max_norm, scale_grad_by_freq, dtype)
        config = table_config("nn.Embedding", num_embeddings, embedding_dim, name, not _freeze, settings)
        where = {"device": device, "seed": seed, "process_group": process_group, "sparse_groups": sparse_groups}
        super().__init__(config, padding_idx, _weight, optimizer, _fill, **where)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **more: Any,
    ) -> Embedding:
        """As torch.nn.Embedding.from_pretrained; `more`: keywords of the constructor, such as optimizer."""
        rows, columns = matrix_shape("nn.Embedding", embeddings)
        return cls(
            rows, columns, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, embeddings, freeze, **more
        )

    def forward(self, input: Tensor) -> Tensor:
        """float32 [..., embedding_dim]: the rows of ids int64 or int32 [...].

        Raises:
            IndexError: an id outside a fixed vocabulary.
            TypeError: not an integer tensor.
        """
        input = as_tensor(input)
        rows: Tensor = self.look_up(input)
        if self.padding_idx is None or not rows.requires_grad:
            return rows
        padding = input == self.padding_idx
        if padding.device.type == "cpu" and not torch.compiler.is_dynamo_compiling() and not bool(padding.any()):
            return rows
        return torch.where(padding.to(rows.device).unsqueeze(-1), rows.detach(), rows)
