"""Clustering in csrc/keys/cluster*.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._native import core

__all__ = ["cluster"]

_OBJECTIVE_CODES = {"send_once": 0, "resend": 1}


def cluster(sample_offsets: Tensor, ids: Tensor, num_ids: int, num_parts: int, objective: str, seed: int) -> Tensor:
    """As `nestpipe_kernels.ops.cluster.cluster`, for checked arguments; ids int32 in [0, num_ids)."""
    num_samples = sample_offsets.numel() - 1
    order = torch.empty(num_samples, dtype=torch.int64)
    core().cluster(
        sample_offsets.data_ptr(),
        ids.data_ptr(),
        num_samples,
        num_ids,
        num_parts,
        _OBJECTIVE_CODES[objective],
        seed,
        order.data_ptr(),
    )
    return order
