"""EmbeddingBag: torch.nn.EmbeddingBag's arguments and results over a table in sharded stores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.comm import SparseGroups
from nestpipe_kernels.jagged import JaggedTensor
from nestpipe_kernels.nn.drop_in import TableModule, check_arguments, matrix_shape, table_config
from nestpipe_kernels.nn.plan import Samples
from nestpipe_kernels.ops._arrays import as_tensor
from nestpipe_kernels.types import JaggedLike, LookupCall, PoolingType, SparseOptimizer, StoreKeys

__all__ = ["EmbeddingBag"]


class EmbeddingBag(TableModule):
    """Looks up and pools bags of ids: a drop-in for torch.nn.EmbeddingBag.

    Rows live in a store, as those of nk.nn.Embedding do; `weight` too is as there.

    Args:
        num_embeddings: size of the vocabulary, or UNBOUNDED: any int64 is an id.
        embedding_dim: floats per row.
        max_norm, norm_type, scale_grad_by_freq: refused, unless left at their defaults.
        mode: "sum", "mean" or "max".
        sparse: of no effect.
        _weight: float32 [num_embeddings, embedding_dim] to start from, copied. Default: drawn as torch.nn.EmbeddingBag
            does, the same numbers after the same torch.manual_seed; or the table's own rule, if `init` is given,
            which otherwise is for rows that come back after eviction.
        include_last_offset: offsets have one entry more, the number of ids.
        padding_idx: an id that is left out of its bag; a mean does not count it.
        device: CPU, or None.
        dtype: float32, or None.
        trainable: False: rows are never updated.
        optimizer, name, seed, process_group, sparse_groups, **settings: as for nk.nn.Embedding.
        _fill: False: there are no rows until nk.convert makes them.

    Raises:
        TypeError, ValueError: arguments that are wrong, contradict each other or cannot keep their meaning; named.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        trainable: bool = True,
        optimizer: SparseOptimizer | None = None,
        name: str = "weight",
        seed: int = 0,
        process_group: Any = None,
        sparse_groups: SparseGroups | int = 1,
        _fill: bool = True,
        **settings: Any,
    ) -> None:
        check_arguments("nn.EmbeddingBag", max_norm, scale_grad_by_freq, dtype)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"nn.EmbeddingBag: mode must be 'sum', 'mean' or 'max', got {mode!r}")
        config = table_config("nn.EmbeddingBag", num_embeddings, embedding_dim, name, trainable, settings)
        where = {"device": device, "seed": seed, "process_group": process_group, "sparse_groups": sparse_groups}
        super().__init__(config, padding_idx, _weight, optimizer, _fill, **where)
        self.mode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **more: Any,
    ) -> EmbeddingBag:
        """As torch.nn.EmbeddingBag.from_pretrained; `more`: keywords of the constructor, such as optimizer."""
        rows, columns = matrix_shape("nn.EmbeddingBag", embeddings)
        settings = (max_norm, norm_type, scale_grad_by_freq, mode, sparse, embeddings, include_last_offset, padding_idx)
        return cls(rows, columns, *settings, trainable=not freeze, **more)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """float32 [bags, embedding_dim]: a row of `input` [bags, n] for each bag, or `input` [n] cut at `offsets`.

        Args:
            input: int64 or int32 ids.
            offsets: int64 or int32, where each bag begins; for a 1-D input alone.
            per_sample_weights: float32, of the input's shape; with mode "sum".

        Raises:
            IndexError: an id outside a fixed vocabulary.
            TypeError: tensors of another type.
            ValueError: shapes that do not fit, weights with another mode.
        """
        input, offsets, per_sample_weights = map(as_tensor, (input, offsets, per_sample_weights))
        lengths = self._lengths(input, offsets)
        if per_sample_weights is not None:
            self._check_weights(per_sample_weights, input)
            per_sample_weights = per_sample_weights.contiguous().view(-1)
        bags = JaggedTensor._unchecked(input.contiguous().view(-1), per_sample_weights, lengths, None)  # plan_call does
        pooled: Tensor = self.look_up(bags)
        return pooled

    def _lengths(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        """int64 [bags]; tensor operations alone, so that a capture can repeat them for batches of any size."""
        if not isinstance(input, Tensor) or input.is_floating_point():
            got = str(input.dtype) if isinstance(input, Tensor) else type(input).__name__
            raise TypeError(f"{self.described}: input must be a tensor of int64 or int32 ids, got {got}")
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError(
                    f"{self.described}: with a 2-D input every row is a bag, so offsets must be None, got "
                    f"{_shape(offsets)}"
                )
            return torch.ones_like(input, dtype=torch.int64).sum(1)
        if input.dim() != 1:
            raise ValueError(f"{self.described}: input must have one or two dimensions, got {_shape(input)}")
        if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.is_floating_point():
            raise ValueError(
                f"{self.described}: a 1-D input needs 1-D integer offsets, where each bag begins, got {_shape(offsets)}"
            )
        starts = offsets.to(torch.int64)
        if self.include_last_offset:
            return starts[1:] - starts[:-1]
        number = torch.ones_like(input, dtype=torch.int64).sum(0, keepdim=True)
        return torch.cat([starts[1:], number]) - starts

    def _check_weights(self, weights: Any, input: Tensor) -> None:
        if self.mode != "sum":
            raise ValueError(f"{self.described}: per_sample_weights need mode 'sum', but it is {self.mode!r}")
        if not isinstance(weights, Tensor) or weights.dtype is not torch.float32 or weights.shape != input.shape:
            raise ValueError(
                f"{self.described}: per_sample_weights must be float32 of the input's shape {list(input.shape)}, got "
                f"{_shape(weights)}"
            )

    def plan_call(self, features: Any) -> LookupCall:
        """Check an input and describe its lookup; changes nothing. Raises IndexError, TypeError or ValueError."""
        if isinstance(features, Tensor):
            return self._plan_rows(features)
        if not isinstance(features, JaggedLike):
            raise TypeError(
                f"{self.described}: the input of a lookup must be a JaggedTensor of bags, got {type(features).__name__}"
            )
        lengths = features.lengths().to(torch.int64)
        values = features.values()
        if lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(f"{self.described}: offsets must ascend, got a bag of length {int(lengths.min())}")
        if int(lengths.sum()) != len(values):
            raise ValueError(
                f"{self.described}: bags have {int(lengths.sum())} ids together, but the input has {len(values)}; "
                "offsets must begin with 0"
                + (" and end with the number of ids (include_last_offset)" if self.include_last_offset else "")
            )
        return self._plan_bags(values, lengths, features.weights_or_none())

    def store_segments(self, store_index: int) -> list[tuple[str, PoolingType, bool]]:
        """One, named as the table. It counts as weighted: any call may have weights, so owners pool nothing of it."""
        return [(self._configs[0].name, PoolingType[self.mode.upper()], True)]

    def _plan_bags(self, values: Tensor, lengths: Tensor, weights: Tensor | None) -> LookupCall:
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        keys = self._checked_ids(values, lambda place: f"{place} (bag {_bag_of(offsets, place)})")
        store = StoreKeys(
            keys=keys,
            tables=torch.full((len(keys),), self._table, dtype=torch.int32),
            bag_offsets=offsets,
            segment_bags=(0, len(lengths)),
            segment_modes=(PoolingType[self.mode.upper()].code,),
            weights=None if weights is None else weights.detach().clone(),
            valid=None if self.padding_idx is None else keys != self.padding_idx,
        )
        return LookupCall(
            stores=[store],
            output_shapes=[(len(lengths), self.embedding_dim)],
            views=[[(0, 0)]],
            finish=lambda outputs: outputs[0],
            weights=weights,
            weight_positions=[None if weights is None else torch.arange(len(keys))],
            signature=[keys, lengths] if weights is None else [keys, lengths, weights],
            samples=Samples([lambda: torch.arange(len(lengths)).repeat_interleave(lengths)]),
        )

    def extra_repr(self) -> str:
        """As torch's, with the table's name."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _bag_of(offsets: Tensor, place: int) -> int:
    return int(torch.searchsorted(offsets, place, right=True)) - 1


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
