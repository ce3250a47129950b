"""The memory of a store on an accelerator: torch tensors, which grow between calls, and what its kernels need to know.

Layout: csrc/include/nestpipe/cuda/device_store.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._native import core
from ..init import Custom
from ..ops.row_storage import embedding_words
from ..policy import Score
from ..types import DataType, TableSpec
from .settings import SEED_MASK, native_table

__all__ = ["DeviceMemory", "Room", "StoreState", "table_words"]

SLOTS = 15
"""Of a bucket of the index."""
BUCKET_BYTES = 16 + SLOTS * 16
STATE_WORDS = 16
TABLE_WORDS = 8
SECTOR_FLOATS = 8
SLAB_BYTES = 32 << 20
MAX_ROWS = (1 << 31) - 1
"""Row numbers of a store: sums over rows are 32 bits wide."""
OUT_OF_RANGE, NEGATIVE_COUNTS = 9, 10
"""Words of the state that Python writes: keys of a fixed table out of its range, counts below 0."""


@dataclass
class StoreState:
    """A copy of what a store counts on its device: DeviceState and DeviceTableState in device_store.h."""

    words: list[int]

    @property
    def num_rows(self) -> int:
        return self.words[0]

    @property
    def num_free(self) -> int:
        return self.words[1]

    @property
    def num_missing(self) -> int:
        return self.words[2]

    @property
    def num_new(self) -> int:
        return self.words[3]

    def table(self, table: int, word: int) -> int:
        """A word of a table: 0 size, 1 new keys of the call, 2 inserted, 3 evicted, 4 expired, 5 refused."""
        return self.words[STATE_WORDS + table * TABLE_WORDS + word]


@dataclass
class Room:
    """Memory that is there before anything changes; `DeviceMemory.take` lets the store have it."""

    tags: Tensor | None
    entries: Tensor | None
    slabs: list[Tensor]
    addresses: Tensor | None
    free_rows: Tensor | None


class DeviceMemory:
    """Index, slabs and state of a store, all on one device; nothing here starts a kernel of the store.

    Args:
        tables: with their rules, checked.
        dim, data_type, state_floats, state_init: what a row is.
        device: where the tensors lie.
        load: keys for each slot of the index at most.
        rows_per_slab: a power of two; None: 32 MB.
        limit: bytes that index and rows may take; None: as many as there are.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        dim: int,
        data_type: DataType,
        state_floats: int,
        state_init: float,
        device: torch.device,
        load: float,
        rows_per_slab: int | None,
        limit: int | None = None,
    ) -> None:
        self.device = device
        self.load = load
        self.limit = limit
        self.words = embedding_words(dim, data_type)
        self.row_floats: int = core().row_floats(self.words, state_floats)
        used = self.words + state_floats + 1
        self.stride_bytes = 4 * ((used + SECTOR_FLOATS - 1) // SECTOR_FLOATS + 1) * SECTOR_FLOATS
        self.rows_per_slab = rows_per_slab or _power_of_two(max(32, SLAB_BYTES // self.stride_bytes))
        (init_bits,) = struct.unpack("<I", struct.pack("<f", state_init))
        self._shape = [data_type.code, init_bits, dim, self.words, state_floats, self.row_floats]
        self.tables = table_words(tables).to(device)
        self.num_tables = len(tables)
        self.slabs: list[Tensor] = []
        self.tags = self._zeros(1, 4)
        self.entries = self._entries(1)
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)
        self._earlier_addresses: list[Tensor] = []
        """Kept: other streams may still read them, and what they say stays true."""
        self.free_rows = self._zeros(0)
        self.state = torch.zeros(STATE_WORDS + TABLE_WORDS * self.num_tables, dtype=torch.int64, device=device)

    def view(self) -> list[int]:
        """The store as its kernels take it (csrc/bindings/cuda/store.cpp)."""
        return [
            *self.index(self.tags, self.entries),
            self.addresses.data_ptr(),
            self.rows_per_slab,
            *self._shape,
            self.tables.data_ptr(),
            self.num_tables,
            self.free_rows.data_ptr(),
            self.state.data_ptr(),
        ]

    @staticmethod
    def index(tags: Tensor, entries: Tensor) -> list[int]:
        """An index as kernels take it."""
        return [tags.data_ptr(), entries.data_ptr(), tags.shape[0]]

    def read_state(self) -> StoreState:
        """What the store counts. Waits for the device."""
        return StoreState(self.state.cpu().tolist())

    def room(self, num_keys: int, num_rows: int) -> Room:
        """Memory for so many keys, and for row numbers below num_rows; nothing of the store changes.

        The index grows by half or more, rows by an eighth of what is there or more (less where the limit is near).

        Raises:
            torch.OutOfMemoryError: there is no room on the device, or below the limit.
        """
        room = Room(None, None, [], None, None)
        num_buckets = self.tags.shape[0]
        if num_keys > self.load * num_buckets * SLOTS:
            num_buckets = max(int(num_keys / (self.load * SLOTS)) + 1, num_buckets + num_buckets // 2)
        num_slabs = -(-num_rows // self.rows_per_slab)
        slab_bytes = self.rows_per_slab * self.stride_bytes
        more = max(num_slabs - len(self.slabs), 0)
        if self.limit is not None:
            left = self.limit - num_buckets * BUCKET_BYTES - len(self.slabs) * slab_bytes
            if more * slab_bytes > left and (more or num_buckets > self.tags.shape[0]):
                raise torch.OutOfMemoryError(f"the store's limit is {self.limit} bytes")
            spare = min(len(self.slabs) // 8, left // slab_bytes)
        else:
            spare = len(self.slabs) // 8
        if num_buckets > self.tags.shape[0]:
            room.tags, room.entries = self._zeros(num_buckets, 4), self._entries(num_buckets)
        if more:
            for _ in range(max(more, spare)):
                room.slabs.append(torch.empty(slab_bytes // 4, dtype=torch.float32, device=self.device))
            slabs = [*self.slabs, *room.slabs]
            addresses = torch.tensor([slab.data_ptr() for slab in slabs], dtype=torch.int64)
            room.addresses = addresses.to(self.device)
            room.free_rows = self._zeros(len(slabs) * self.rows_per_slab // 32)
            room.free_rows[: len(self.free_rows)] = self.free_rows
        return room

    def take(self, room: Room) -> None:
        """Use memory from `room`; a new index must have been filled on the current stream.

        Waits where rows have grown: rows may be read and written on other streams meanwhile, which find new addresses
        without an event.
        """
        if self.device.type != "cpu":  # the kernels that fill it read the old one, whose memory is free from here on
            stream: Any = torch.get_device_module(self.device).current_stream(self.device)
            for tensor in (self.tags, self.entries, self.free_rows):
                tensor.record_stream(stream)
            if room.addresses is not None:
                stream.synchronize()
        if room.tags is not None and room.entries is not None:
            self.tags, self.entries = room.tags, room.entries
        if room.addresses is not None and room.free_rows is not None:
            self.slabs += room.slabs
            self._earlier_addresses.append(self.addresses)
            self.addresses, self.free_rows = room.addresses, room.free_rows

    def clear(self) -> None:
        """No keys, no rows, no counts; the memory stays."""
        for tensor in (self.tags, self.free_rows, self.state):
            tensor.zero_()

    def bytes(self) -> dict[str, int]:
        """Allocated, by what it is for: "index", "slabs" (rows with their metadata), "other"."""
        other = (self.free_rows, self.addresses, self.state, self.tables)
        return {
            "index": self.tags.nbytes + self.entries.nbytes,
            "slabs": sum(slab.nbytes for slab in self.slabs),
            "other": sum(tensor.nbytes for tensor in other),
        }

    def describe(self) -> str:
        """How much it has, for messages."""
        index, slabs, _ = self.bytes().values()
        return f"its index of {index >> 20} MB and rows of {slabs >> 20} MB"

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _entries(self, num_buckets: int) -> Tensor:
        return torch.empty((num_buckets * SLOTS, 2), dtype=torch.int64, device=self.device)


def table_words(tables: Sequence[TableSpec]) -> Tensor:
    """int64 [T, 17] on the CPU: DeviceTable of device_store.h.

    Raises:
        ValueError: a rule or an initializer that only a store in host memory has.
    """
    return torch.frombuffer(bytearray(b"".join(_table_bytes(spec) for spec in tables)), dtype=torch.int64).clone()


def _table_bytes(spec: TableSpec) -> bytes:
    advice = "use a store in host memory (EmbeddingStore)"
    where = f"device store: table {spec.name!r}"
    if spec.admission is not None:
        raise ValueError(
            f"{where} has admission {spec.admission!r}, which needs counts of keys without a row: {advice}"
        )
    if isinstance(spec.eviction, Score):
        raise ValueError(f"{where} evicts by a function; LRU, LFU and TTL work on the device: choose one, or {advice}")
    if isinstance(spec.init, Custom) or isinstance(spec.default, Custom):
        raise ValueError(f"{where} has initial values from a function (init.Custom): {advice}")
    name, seed, init, quota, default, _, (kind, keep, steps, interval) = native_table(spec)
    absent = init if default is None else default
    return struct.pack(
        "<QQq4dq4dqqqqq", core().hash_name(name) & SEED_MASK, seed, init[0], *init[1], absent[0], *absent[1], quota,
        kind, keep, steps, interval,
    )  # fmt: skip


def _power_of_two(value: int) -> int:
    """The largest that is not above."""
    return 1 << (value.bit_length() - 1)
