"""EmbeddingCollection: one embedding per key of many features, TorchRec's interface over sharded stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.jagged import JaggedTensor
from nestpipe_kernels.nn.collection import Collection
from nestpipe_kernels.nn.compiled import traced_lookup
from nestpipe_kernels.nn.configs import EmbeddingConfig, embedding_names
from nestpipe_kernels.nn.parameter_tables import rows_of_segment
from nestpipe_kernels.nn.plan import CallInput
from nestpipe_kernels.types import SparseOptimizer

__all__ = ["EmbeddingCollection"]


class EmbeddingCollection(Collection):
    """Looks up every key of every feature, without pooling; ignores per-sample weights of the input.

    With an optimizer (here or on the configs) the rows live in stores, sharded over the ranks of `process_group`, and
    are updated by the pipeline, or by the module itself at the end of backward. Without, the tables are parameters
    `embeddings.{table}.weight` that autograd and the user's optimizer train, with sparse gradients.

    Args:
        tables: one EmbeddingConfig per table, of any dims; features of several tables come out as feature@table.
        device: CPU, or None.
        need_indices: whether outputs carry their keys, as `weights()`.
        optimizer: `nk.optim` object for the tables that name none.
        seed: with the table's name and the key, determines a row's initial value.
        process_group: torch.distributed group of the ranks that share the tables; None for the default group, or for
            one process if torch.distributed is not initialised.
        sparse_groups: copies of the tables among the ranks (2D sparse parallelism): rows then travel inside groups of
            ranks that hold a copy each. A number of groups, or `nk.SparseGroups`; the same in all modules of a model.

    Raises:
        TypeError, ValueError: settings that are wrong or contradict each other, before anything is allocated.
    """

    _kind = EmbeddingConfig
    _pooled = False
    _tables_attribute = "embeddings"
    output_class: Any = JaggedTensor
    """What forward returns, per output name; a class of the same constructor."""

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        optimizer: SparseOptimizer | None = None,
        seed: int = 0,
        process_group: Any = None,
        sparse_groups: SparseGroups | int = 1,
    ) -> None:
        super().__init__(tables, device, optimizer, seed, process_group, sparse_groups)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' settings, in order."""
        return [config for config in self._configs if isinstance(config, EmbeddingConfig)]

    def need_indices(self) -> bool:
        """Whether outputs carry their keys."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The dim that all tables share. Raises ValueError if they differ."""
        dims = sorted(set(self._layout.output_dims))
        if len(dims) > 1:
            raise ValueError(f"EmbeddingCollection: tables have different dims {dims}; ask embedding_configs() instead")
        return dims[0]

    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of the outputs, per table."""
        return embedding_names(self._configs)

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Per output name, the JaggedTensor of its float32 [n, dim] embeddings; see Collection.forward."""
        output: dict[str, JaggedTensor] = super().forward(features)
        return output

    def _weighted(self) -> bool | None:
        return None

    def _traced(self, features: Any) -> dict[str, JaggedTensor]:
        keys, values, lengths, dims = features.keys(), features.values(), features.lengths(), self._layout.output_dims
        outputs = traced_lookup(self, dims, values, lengths, None, keys, pooled=False, with_keys=self._need_indices)
        by_key = lengths.view(len(keys), -1)
        result: dict[str, JaggedTensor] = {}
        for index, segment in enumerate(self._layout.segments):
            result[segment.output_name] = self.output_class(
                outputs[index],
                weights=outputs[index + len(self._layout.segments)] if self._need_indices else None,
                lengths=by_key[keys.index(segment.feature)],
            )
        return result

    def output_keys(self, features: Any) -> list[Tensor]:
        """With `need_indices`, the keys of every output."""
        if not self._need_indices:
            return []
        batch = self._read(features)
        return [batch.values[batch.slice_of(segment.feature)].clone() for segment in self._layout.segments]

    def _finish(self, batch: CallInput, outputs: Sequence[Tensor]) -> dict[str, JaggedTensor]:
        result: dict[str, JaggedTensor] = {}
        for segment, output in zip(self._layout.segments, outputs, strict=True):
            result[segment.output_name] = self.output_class(
                output,
                weights=batch.values[batch.slice_of(segment.feature)] if self._need_indices else None,
                lengths=batch.lengths[batch.keys.index(segment.feature)],
            )
        return result

    def _parameter_outputs(self, batch: CallInput, weights: Mapping[str, Tensor]) -> Sequence[Tensor]:
        return [rows_of_segment(segment, weights[segment.config.name], batch) for segment in self._layout.segments]
