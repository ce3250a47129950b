"""Which part of a batch feeds which embedding module, found by a probe; splitting batches and merging outputs."""

from __future__ import annotations

from nestpipe_kernels.capture.merge import merge_outputs
from nestpipe_kernels.capture.split import batch_size_of, split

__all__ = ["batch_size_of", "merge_outputs", "split"]
