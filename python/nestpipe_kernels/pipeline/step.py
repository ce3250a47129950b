"""What one batch gave the caller: micro-batches joined in the order in which the loader had the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..capture.merge import merge_outputs
from ..stages.state import BatchState

__all__ = ["Step", "make_step"]


@dataclass
class Step:
    """What one batch gave.

    Attributes:
        index: batches that counted before this one, in this pipeline and in earlier ones over the same stores.
        loss: this rank's loss, a 0-dim tensor: micro-batch losses with their weights. 0 for a rank without samples.
        output: the model's second value, micro-batches joined in the caller's sample order; None for a rank without
            samples.
        skipped_rows: row gradients that did not count (nan_policy="skip_row"), over all ranks: each leaves its row out.
        dense_skipped: the dense step was left out because a dense gradient was not finite (nan_policy="skip_row").
        skipped: in words what was left out, with tables and keys; empty if nothing. With a grad_scaler the whole batch
            was: the next one has the same index.
    """

    index: int
    loss: Tensor
    output: Any
    skipped_rows: int = 0
    dense_skipped: bool = False
    skipped: str = ""


def make_step(batch: BatchState) -> Step:
    """Join a batch's losses and outputs.

    Raises:
        ValueError: an output has neither one entry per sample nor is a scalar; names its path.
    """
    step = Step(batch.clock, torch.zeros(()), None)
    if batch.verdict is not None:
        step.skipped_rows, step.dense_skipped = batch.verdict.skipped_rows, not batch.verdict.dense_ok
        step.skipped = batch.verdict.non_finite
    if batch.losses:
        loss = torch.zeros((), dtype=batch.losses[0][1].dtype, device=batch.losses[0][1].device)
        for coefficient, value in batch.losses:
            loss = loss + value * coefficient
        step.loss = loss / batch.loss_divisor
        indices = [micro.indices for micro in batch.micro if len(micro.indices)]
        step.output = merge_outputs(batch.outputs, indices, [c / batch.loss_divisor for c, _ in batch.losses])
    return step
