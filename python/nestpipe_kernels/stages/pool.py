"""TensorPool: memory of a batch's large tensors, used again once nobody refers to it any more.

Nobody gives anything back. A tensor of the pool is a view of a block, and holds a reference to it for as long as the
tensor, any view of it, an exchange under way or an autograd graph lives; a block with no reference but the pool's own
is free. So a tensor never shares memory with one that somebody can still see, whatever happens to its batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from threading import Lock

import numpy as np
import torch
from torch import Tensor

__all__ = ["TensorPool"]

SMALL_BYTES = 1 << 16
"""Smaller tensors come from torch's allocator, which finds them faster."""
SPARE = 8
"""Idle blocks kept beyond as many as are in use."""


class TensorPool:
    """Blocks of bytes of one rank; any thread may ask.

    Args:
        keep: False: everything comes from torch's allocator (for whoever works seldom, and should hold nothing).
        device: where tensors are; on an accelerator they come from its own allocator, which knows streams.
    """

    def __init__(self, keep: bool = True, device: torch.device | None = None) -> None:
        self._keep = keep and device is None
        self._device = device
        self._lock = Lock()
        self._blocks: list[np.ndarray] = []
        self._idle_count = _references([np.empty(0, dtype=np.uint8)])[0]

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Contiguous; contents are undefined."""
        size = prod(shape) * dtype.itemsize
        if not self._keep or size < SMALL_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        with self._lock:
            block = self._take(size)
            return torch.from_numpy(block[:size]).view(dtype).view(tuple(shape))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """As `empty`, filled with +0."""
        return self.empty(shape, dtype).zero_()

    def held_bytes(self) -> int:
        """Bytes of all blocks, idle or not."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks)

    def _take(self, size: int) -> np.ndarray:
        """The smallest idle block that fits without wasting more than half of it, or a new one."""
        idle = [k for k, count in enumerate(_references(self._blocks)) if count == self._idle_count]
        fitting = [k for k in idle if size <= self._blocks[k].nbytes <= 2 * size]
        if fitting:
            return self._blocks[min(fitting, key=lambda k: self._blocks[k].nbytes)]
        for k in reversed(idle[: max(0, len(idle) - (len(self._blocks) - len(idle)) - SPARE)]):
            del self._blocks[k]  # the oldest; sizes have changed
        block = np.empty(size + size // 4, dtype=np.uint8)
        self._blocks.append(block)
        return block


def _references(blocks: list[np.ndarray]) -> list[int]:
    """How often each block is referred to, counted alike for one that only its list holds."""
    return [sys.getrefcount(block) for block in blocks]
