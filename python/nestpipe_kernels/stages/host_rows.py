"""Rows between a store and a batch's buffer, each in host memory or on an accelerator.

A store copies by itself where both are in one place. Rows of a store in host memory go to an accelerator in chunks
through pinned memory: while the device copies one, the host reads or writes the next. The host waits for the device
only where it needs rows to write back.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..device import DeviceBackend
from ..ops.scatter_add_rows import scatter_rows
from ..types import RowStore

__all__ = ["gather", "write_back_rows"]

CHUNK_BYTES = 4 << 20
"""Large enough for a link's full rate, small enough that little is left over at both ends."""
AHEAD = 2
"""Chunks that are copied to the host while another is written back."""


def gather(
    store: RowStore,
    handles: Tensor,
    keys: Tensor,
    tables: Tensor,
    buffer: Tensor,
    index: Tensor | None,
    backend: DeviceBackend,
) -> None:
    """Rows of the store into a buffer, at `index` (int64 [n], on the host) or from its first row on."""
    if buffer.is_cpu or store.device == buffer.device:
        store.gather(handles, keys, tables, buffer, index)
        return
    for begin, end in _chunks(len(handles), store.row_floats):
        part = slice(begin, end)
        rows = backend.pinned((end - begin, store.row_floats), torch.float32)
        store.gather(handles[part], keys[part], tables[part], rows, None)
        if index is None:
            buffer[part].copy_(rows, non_blocking=True)
        else:
            scatter_rows(buffer, index[part], rows.to(buffer.device, non_blocking=True))


def write_back_rows(store: RowStore, handles: Tensor, buffer: Tensor, backend: DeviceBackend) -> None:
    """Rows of a buffer [n, row_floats] into the store, by handle."""
    if buffer.is_cpu or store.device == buffer.device:
        store.write_back(handles, buffer)
        return
    under_way: deque[tuple[slice, Tensor, Any]] = deque()

    def finish() -> None:
        part, rows, point = under_way.popleft()
        backend.reach(point)
        store.write_back(handles[part], rows)

    for begin, end in _chunks(len(handles), store.row_floats):
        rows = backend.pinned((end - begin, store.row_floats), torch.float32)
        rows.copy_(buffer[begin:end], non_blocking=True)
        under_way.append((slice(begin, end), rows, backend.record()))
        if len(under_way) > AHEAD:
            finish()
    while under_way:
        finish()


def _chunks(size: int, row_floats: int) -> list[tuple[int, int]]:
    step = max(CHUNK_BYTES // (4 * row_floats), 1)
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]
