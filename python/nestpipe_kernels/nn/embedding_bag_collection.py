"""EmbeddingBagCollection: pooled embeddings of many features, TorchRec's interface over sharded stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.jagged import KeyedTensor
from nestpipe_kernels.nn.collection import Collection
from nestpipe_kernels.nn.compiled import traced_lookup
from nestpipe_kernels.nn.configs import EmbeddingBagConfig
from nestpipe_kernels.nn.parameter_tables import pool_segment
from nestpipe_kernels.nn.plan import CallInput
from nestpipe_kernels.types import PoolingType, SparseOptimizer

__all__ = ["EmbeddingBagCollection"]


class EmbeddingBagCollection(Collection):
    """Looks up and pools the bags of every feature.

    With an optimizer (here or on the configs) the rows live in stores, sharded over the ranks of `process_group`, and
    are updated by the pipeline, or by the module itself at the end of backward. Without, the tables are parameters
    `embedding_bags.{table}.weight` that autograd and the user's optimizer train, with sparse gradients.

    Args:
        tables: one EmbeddingBagConfig per table; features of several tables come out as feature@table.
        is_weighted: whether inputs carry per-sample weights; all tables must pool by SUM then.
        device: CPU, or None.
        optimizer: `nk.optim` object for the tables that name none.
        seed: with the table's name and the key, determines a row's initial value.
        process_group: torch.distributed group of the ranks that share the tables; None for the default group, or for
            one process if torch.distributed is not initialised.
        sparse_groups: copies of the tables among the ranks (2D sparse parallelism): rows then travel inside groups of
            ranks that hold a copy each. A number of groups, or `nk.SparseGroups`; the same in all modules of a model.

    Raises:
        TypeError, ValueError: settings that are wrong or contradict each other, before anything is allocated.
    """

    _kind = EmbeddingBagConfig
    _pooled = True
    _tables_attribute = "embedding_bags"
    output_class: Any = KeyedTensor
    """What forward returns; a class of the same constructor."""

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer: SparseOptimizer | None = None,
        seed: int = 0,
        process_group: Any = None,
        sparse_groups: SparseGroups | int = 1,
    ) -> None:
        for config in tables if is_weighted else ():
            if isinstance(config, EmbeddingBagConfig) and config.pooling is not PoolingType.SUM:
                raise ValueError(
                    f"EmbeddingBagCollection: is_weighted needs pooling SUM, but table {config.name!r} "
                    f"has {config.pooling.value}; put it in a collection without weights"
                )
        super().__init__(tables, device, optimizer, seed, process_group, sparse_groups)
        self._is_weighted = is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' settings, in order."""
        return [config for config in self._configs if isinstance(config, EmbeddingBagConfig)]

    def is_weighted(self) -> bool:
        """Whether inputs carry per-sample weights."""
        return self._is_weighted

    def forward(self, features: Any) -> KeyedTensor:
        """KeyedTensor of float32 [B, sum of dims], features in (table, feature) order; see Collection.forward."""
        output: KeyedTensor = super().forward(features)
        return output

    def _weighted(self) -> bool | None:
        return self._is_weighted

    def _traced(self, features: Any) -> KeyedTensor:
        dims, weights = [sum(self._layout.output_dims)], features.weights_or_none()
        outputs = traced_lookup(self, dims, features.values(), features.lengths(), weights, features.keys())
        keyed: KeyedTensor = self.output_class(self._layout.output_names, self._layout.output_dims, outputs[0])
        return keyed

    def _finish(self, batch: CallInput, outputs: Sequence[Tensor]) -> Any:
        return self.output_class(self._layout.output_names, self._layout.output_dims, outputs[0])

    def _parameter_outputs(self, batch: CallInput, weights: Mapping[str, Tensor]) -> Sequence[Tensor]:
        segments = self._layout.segments
        return [torch.cat([pool_segment(segment, weights[segment.config.name], batch) for segment in segments], dim=1)]
