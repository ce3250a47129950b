"""Which part of a batch feeds which embedding module, found by a probe; splitting batches and merging outputs."""

from __future__ import annotations

from nestpipe_kernels.capture.capture import (
    CapturedInputs,
    FunctionInputs,
    SparseInputs,
    capture_inputs,
    from_function,
    same_features,
)
from nestpipe_kernels.capture.merge import merge_outputs
from nestpipe_kernels.capture.modules import batch_coupled_modules, embedding_modules, warn_batch_coupled
from nestpipe_kernels.capture.split import batch_size_of, split
from nestpipe_kernels.capture.transfer import move_batch, pin_batch

__all__ = [
    "CapturedInputs",
    "FunctionInputs",
    "SparseInputs",
    "batch_coupled_modules",
    "batch_size_of",
    "capture_inputs",
    "embedding_modules",
    "from_function",
    "merge_outputs",
    "move_batch",
    "pin_batch",
    "same_features",
    "split",
    "warn_batch_coupled",
]
