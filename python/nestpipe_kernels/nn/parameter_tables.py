"""Tables as ordinary parameters: without an optimizer argument, autograd and the user's optimizer train them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe_kernels.nn.layout import Segment
from nestpipe_kernels.nn.plan import CallInput
from nestpipe_kernels.types import PoolingType

__all__ = ["make_parameter_table", "pool_segment", "rows_of_segment"]


def make_parameter_table(weight: Tensor, trainable: bool) -> nn.Module:
    """A module that holds `weight` [num_embeddings, dim] as its parameter `weight`."""
    table = nn.Module()
    table.weight = nn.Parameter(weight, requires_grad=trainable)
    return table


def pool_segment(segment: Segment, weight: Tensor, batch: CallInput) -> Tensor:
    """float32 [B, dim]: one feature's bags of `batch`, pooled; gradients of `weight` are sparse (max: dense)."""
    where = batch.slice_of(segment.feature)
    offsets = torch.zeros(batch.batch_size + 1, dtype=torch.int64)
    torch.cumsum(batch.lengths[batch.keys.index(segment.feature)], 0, out=offsets[1:])
    per_sample = None if batch.caller_weights is None else batch.caller_weights[where]
    return F.embedding_bag(
        batch.values[where],
        weight,
        offsets,
        mode=segment.mode.value.lower(),
        sparse=segment.mode is not PoolingType.MAX,
        per_sample_weights=per_sample,
        include_last_offset=True,
        padding_idx=segment.config.padding_key,
    )


def rows_of_segment(segment: Segment, weight: Tensor, batch: CallInput) -> Tensor:
    """float32 [n, dim]: a row per key of one feature; a padding key reads zeros."""
    ids = batch.values[batch.slice_of(segment.feature)]
    padding = segment.config.padding_key
    rows = F.embedding(ids, weight, padding_idx=padding, sparse=True)
    return rows if padding is None else rows * (ids != padding).unsqueeze(1)
